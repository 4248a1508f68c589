"""Steps of one vLLM core under vLLM's scheduler and Sluice's. To import it imports vLLM."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds

from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.setup import survive_module_scan
from sluice.replica.vllm_args import by_option
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO

PROMPT, OUTPUT = 32, 100
"""Tokens of each request."""

DRAFTS: Final = (0, 1, 3, 5)
"""Drafted tokens that each decode checks, in :func:`verify_cost`."""

SPECULATIVE: Final[dict[str, Any]] = {
    "async-scheduling": False,
    "speculative-config": with_all_lengths(
        {"method": "ngram", "num_speculative_tokens": max(DRAFTS)}
    ),
}
"""vLLM's arguments for :func:`verify_cost`."""


class Counting(UniProcExecutor):
    """Notes each batch in ``ran``. ``drafts`` drafted tokens replace those of vLLM's drafter."""

    drafts = 0
    ran: list[tuple[int, int]]

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Run a batch."""
        self._ids = list(output.num_scheduled_tokens)
        self.ran.append((len(self._ids), output.total_num_scheduled_tokens))
        return super().execute_model(output, non_block)

    def take_draft_token_ids(self) -> Any:
        """Drafts for the latest batch."""
        return DraftTokenIds(self._ids, [[17] * self.drafts for _ in self._ids])


class Core:
    """An engine core with both schedulers, ``stock`` and ``sluice``. ``directory`` gets the state
    table; ``kind`` is the executor; ``args`` are vLLM's, by command-line name."""

    def __init__(
        self, model: Path | str, directory: Path, kind: type[Any], policy: str, args: dict[str, Any]
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        survive_module_scan()
        path = directory / kind.__name__
        StateTable.create(1024, path).set_model(LinearLatency(a=0.005, b=0.0001))
        settings = SchedulerSettings(state_table=path, policy=policy)
        config = EngineArgs(
            model=str(model),
            distributed_executor_backend=kind,
            scheduler_cls="sluice.replica.vllm.scheduler.make_scheduler",
            additional_config=settings.to_additional_config(),
            **{name.replace("-", "_"): value for name, value in by_option(args).items()},
        ).create_engine_config()
        self.core: Any = EngineCore(config, kind, log_stats=False)
        own = self.core.scheduler
        # An executor may have turned it off, or on.
        self.pipelined = bool(config.scheduler_config.async_scheduling)
        stock = (AsyncScheduler if self.pipelined else Scheduler)(
            vllm_config=config,
            kv_cache_config=own.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            log_stats=False,
            block_size=own.block_size,
            hash_block_size=own.hash_block_size,
        )
        self.schedulers = {"stock": stock, "sluice": own}
        self._rounds = 0

    def round(self, system: str, count: int) -> tuple[list[float], float]:
        """Have ``count`` requests decode: each step's duration and this loop's processor time,
        seconds."""
        core = self.core
        core.scheduler, core.model_executor.ran = self.schedulers[system], []
        self._rounds += 1
        for number in range(count):
            core.scheduler.add_request(self._request(system, number))
        steps_s, tokens, busy_s = [], 0, time.thread_time()
        while core.scheduler.has_requests() or core.batch_queue:
            began_s = time.monotonic()
            outputs, executed = core.step_fn()
            core.post_step(executed)
            steps_s.append(time.monotonic() - began_s)
            for client in (outputs or {}).values():
                tokens += sum(len(each.new_token_ids) for each in client.outputs)
        if tokens != count * OUTPUT:
            raise RuntimeError(f"{count} requests of {OUTPUT} tokens had {tokens}")
        return steps_s, time.thread_time() - busy_s

    def _request(self, system: str, number: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name, extra = f"{self._rounds}-{number}", None
        if system == "sluice":
            extra = to_xargs(RequestArgs(name, time.monotonic(), SLO(ttft_s=60.0, tpot_s=1.0)))
        greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUT}
        prompt = [300 + (self._rounds + number * each) % 700 for each in range(PROMPT)]
        params, hasher = SamplingParams(**greedy, extra_args=extra), self.core.request_block_hasher
        return Request(name, prompt, params, None, block_hasher=hasher)


def compare(core: Core, rounds: int, count: int) -> dict[str, Any]:
    """Both schedulers in turns: median steps a second and the loop's processor time of a step,
    milliseconds; median, min and max of the ratio within a round."""
    names = tuple(core.schedulers)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[:: -1 if number % 2 else 1]:
            steps_s, busy_s = core.round(name, count)
            ran = sum(tokens > 0 for _, tokens in core.core.model_executor.ran)
            found[name].append((ran / sum(steps_s), 1e3 * busy_s / ran))
    # The first ones warm up.
    rates, busy = ({name: [each[i] for each in found[name][1:]] for name in names} for i in (0, 1))
    ratios = [own / other for own, other in zip(rates["sluice"], rates["stock"], strict=True)]
    return {
        "requests": count,
        **{f"{name} steps/s": round(median(rates[name]), 1) for name in names},
        "ratio": [round(each, 3) for each in (median(ratios), min(ratios), max(ratios))],
        **{f"{name} CPU ms": round(median(busy[name]), 2) for name in names},
    }


def verify_cost(core: Core, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Median time of a step that checks drafts, and its ratio to one without, vLLM's scheduler."""
    rows: list[dict[str, Any]] = []
    stock = core.schedulers["stock"]
    stock.dynamic_sd_lookup = [0] * len(stock.dynamic_sd_lookup)  # vLLM's drafter has nothing to do
    for count in counts:
        medians_ms: list[float] = []
        for drafts in DRAFTS:
            core.core.model_executor.drafts = drafts
            core.round("stock", count)  # the first one warms up
            steps_s, _ = core.round("stock", count)
            steps = zip(core.core.model_executor.ran, steps_s, strict=True)
            wanted = count, count * (1 + drafts)
            medians_ms.append(1e3 * median(step_s for ran, step_s in steps if ran == wanted))
            ratio = round(medians_ms[-1] / medians_ms[0], 3)
            row = {"decodes": count, "drafts": drafts, "step ms": round(medians_ms[-1], 3)}
            rows.append({**row, "ratio": ratio})
    return rows
