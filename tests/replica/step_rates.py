"""What Sluice's scheduler costs of vLLM's steps, with and without asynchronous scheduling.

Run with ``python -m tests.replica.step_rates [--rounds 7] [--requests 64] [--step-ms 10]``. One
engine core of vLLM runs the same requests in turns under vLLM's own scheduler and under Sluice's,
with the same worker and KV cache:

- ``model``: a small model on this machine's CPU, one batch at a time: all that vLLM offers on CPUs.
- ``device``: a device whose every step takes ``--step-ms``, beside which this process is free, as
  it is beside a GPU; one batch at a time, and two in flight (asynchronous scheduling). It computes
  nothing, so this shows what the loop of the engine can hide, not what a GPU does.

In a round all requests decode together. Printed are medians over the rounds of the steps per second
and of the engine loop's processor time per step, which other work on the cores hardly changes, and
the median of the ratios within a round.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from sluice.benchmarks.options import number_option
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO

from .in_process import params_of

from vllm.v1.executor.uniproc_executor import UniProcExecutor  # isort: skip  # after its settings

PROMPT, OUTPUT = 32, 100
"""Tokens of each request."""


class Counting(UniProcExecutor):
    """Counts the batches with tokens."""

    steps = 0

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        self.steps += output.total_num_scheduled_tokens > 0
        return super().execute_model(output, non_block)


class Result:
    """What the device returns, at a time."""

    def __init__(self, output: Any, at_s: float = 0.0) -> None:
        self._output = output
        self._at_s = at_s

    def result(self) -> Any:
        time.sleep(max(0.0, self._at_s - time.monotonic()))
        return self._output


class Device(UniProcExecutor):
    """Takes ``step_s`` for each batch, one after the other."""

    steps, step_s = 0, 0.0
    in_flight = 1

    def _init_executor(self) -> None:
        super()._init_executor()
        # vLLM turns it off on CPUs, whose model runner cannot. The schedulers are made after this.
        self.vllm_config.scheduler_config.async_scheduling = self.in_flight > 1
        self._free_s = 0.0

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        ids = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[
                [300] if computed[each] + tokens >= PROMPT else []
                for each, tokens in output.num_scheduled_tokens.items()
            ],
        )
        self.steps += bool(ids)
        self._free_s = max(time.monotonic(), self._free_s) + (self.step_s if ids else 0.0)
        self._ran = Result(ran, self._free_s)
        return Result(None) if ids else self._ran

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._ran if non_block else self._ran.result()


class PipelinedDevice(Device):
    """Has the next batch ready while it computes one."""

    in_flight = 2


class Core:
    """An engine core with both schedulers."""

    def __init__(self, model: Path, directory: Path, kind: type[Any], policy: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        survive_module_scan()
        path = directory / kind.__name__
        table = StateTable.create(1024, path)
        table.set_model(LinearLatency(a=0.005, b=0.0001))
        config = EngineArgs(
            model=str(model),
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=2048,
            max_num_seqs=256,
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            dtype="float32",
            distributed_executor_backend=kind,
            scheduler_cls="sluice.replica.vllm.scheduler.make_scheduler",
            additional_config=SchedulerSettings(
                state_table=path, policy=policy
            ).to_additional_config(),
        ).create_engine_config()
        self.core: Any = EngineCore(config, kind, log_stats=False)
        own = self.core.scheduler
        stock = (AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=own.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            log_stats=False,
            block_size=own.block_size,
            hash_block_size=own.hash_block_size,
        )
        self.schedulers = {"stock": stock, "sluice": own}
        self._rounds = 0

    def round(self, system: str, count: int) -> tuple[float, float]:
        """Steps per second of ``count`` requests, and processor time per step, milliseconds."""
        from vllm.v1.request import Request

        core = self.core
        core.scheduler = self.schedulers[system]
        self._rounds += 1
        for number in range(count):
            name = f"{self._rounds}-{number}"
            slo = SLO(ttft_s=60.0, tpot_s=1.0) if system == "sluice" else None
            prompt = [300 + (self._rounds + number * each) % 700 for each in range(PROMPT)]
            core.scheduler.add_request(
                Request(
                    name,
                    prompt,
                    params_of(name, OUTPUT, slo),
                    None,
                    block_hasher=core.request_block_hasher,
                )
            )
        steps, started_s, began_s = core.model_executor.steps, time.monotonic(), time.thread_time()
        tokens = 0
        while core.scheduler.has_requests() or core.batch_queue:
            outputs, _ = core.step_fn()
            for client in (outputs or {}).values():
                tokens += sum(len(each.new_token_ids) for each in client.outputs)
        assert tokens == count * OUTPUT
        steps = core.model_executor.steps - steps
        busy_s = time.thread_time() - began_s
        return steps / (time.monotonic() - started_s), 1e3 * busy_s / steps


def compare(core: Core, rounds: int, count: int) -> str:
    """A row of the report."""
    for system in core.schedulers:
        core.round(system, count)
    found: dict[str, list[tuple[float, float]]] = {system: [] for system in core.schedulers}
    for number in range(rounds):
        for system in sorted(core.schedulers, reverse=bool(number % 2)):
            found[system].append(core.round(system, count))
    rates, busy = ({s: median(each[i] for each in found[s]) for s in found} for i in (0, 1))
    pairs = zip(found["sluice"], found["stock"], strict=True)
    ratios = [ours / theirs for (ours, _), (theirs, _) in pairs]
    spread = f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
    cells = [f"{rates['stock']:.1f}", f"{rates['sluice']:.1f}", spread]
    return " | ".join([*cells, f"{busy['stock']:.2f}", f"{busy['sluice']:.2f}"])


@click.command()
@number_option("--rounds", default=7, least=1, most=100, words="Rounds of each system.")
@number_option("--requests", default=64, least=1, most=256, words="Requests of a round.")
@number_option("--step-ms", default=10, least=1, most=1000, words="Of the device, milliseconds.")
@click.option("--policy", default="deadline_triage", show_default=True, help="Sluice's policy.")
def main(rounds: int, requests: int, step_ms: int, policy: str) -> None:
    """Compare the rates of steps."""
    Device.step_s = step_ms / 1e3
    kinds = {
        "model": Counting,
        "device": Device,
        "device, asynchronous": PipelinedDevice,
    }
    click.echo(
        "| runs on | requests | stock, steps/s | Sluice, steps/s | ratio | stock, ms a step | "
        "Sluice, ms a step |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = local_model(directory / "model", layers=4, hidden=512)
        for text, kind in kinds.items():
            core = Core(model, directory, kind, policy)
            click.echo(f"| {text} | {requests} | {compare(core, rounds, requests)} |")
            core.core.shutdown()


if __name__ == "__main__":
    main()
