"""Real vLLM engines inside the test process, stock or with Sluice's scheduler."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView

Requests = list[tuple[list[int], int, SLO | None]]
"""Prompt tokens, number of output tokens, objective."""

OBJECTIVES = (
    SLO(),
    SLO(ttft_s=0.05, tpot_s=0.02, priority=4),
    SLO(ttft_s=0.5, tpot_s=0.05, priority=2),
    SLO(e2e_s=3.0),
)


class InProcess:
    """One engine. Without a policy it is stock vLLM."""

    _started = False

    def __init__(
        self,
        model: Path,
        directory: Path,
        policy: str | None = None,
        options: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        survive_module_scan()
        self.reasoning_ends: frozenset[int] = frozenset()
        """Tokens that end the reasoning of requests to come."""
        self.table: StateTable | None = None
        self._log = directory / "batches.jsonl"
        if policy is not None:
            path = directory / "state"
            self.table = StateTable.create(256, path)
            settings = SchedulerSettings(
                state_table=path,
                policy=policy,
                policy_options=options or {},
                batch_log=self._log,
            )
            args["scheduler_cls"] = "sluice.replica.vllm.scheduler.make_scheduler"
            args["additional_config"] = settings.to_additional_config()
        defaults: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            # vLLM would choose bfloat16, which is slow on CPUs without instructions for it.
            "dtype": "float32",
        }
        # What was imported stays: no search for garbage looks through it, nor does vLLM search or
        # freeze by itself, so that what the engine leaves is found when it is closed.
        gc.freeze()
        with ExitStack() as patches:
            patches.enter_context(_vllm_leaves_garbage())
            if InProcess._started:
                # It would look again through all modules for what it has replaced.
                patches.enter_context(
                    patch.object(current_platform, "register_triton_kernel_overrides", create=True)
                )
            self.llm = LLM(
                model=str(model),
                enforce_eager=True,
                distributed_executor_backend="uni",
                disable_log_stats=True,
                **(defaults | args),
            )
        InProcess._started = True

    def batches(self) -> list[dict[str, Any]]:
        """The batch log so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def use(self, policy: str, options: dict[str, Any] | None = None) -> None:
        """Go on with another policy: much quicker than another engine. Nothing may be live."""
        assert not self.scheduler.requests
        self.scheduler._local._policy = make_policy(policy, options)
        if not self.llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, requests: Requests) -> list[tuple[int, ...]]:
        """Greedy output tokens of ``requests``, which are all there before the first batch."""
        return [tuple(output.outputs[0].token_ids) for output in self.run(requests)]

    def run(self, requests: Requests, transfers: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
        """vLLM's outputs of the same, with what vLLM is told of each prompt's KV."""
        params = [
            params_of(str(i), output, slo, self.reasoning_ends)
            for i, (_, output, slo) in enumerate(requests)
        ]
        for each, transfer in zip(params, transfers, strict=False):
            each.extra_args = {**(each.extra_args or {}), "kv_transfer_params": dict(transfer)}
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        return self.llm.generate(prompts, params, use_tqdm=False)

    def serve(
        self, requests: Requests, every: int, aborted: Collection[int] = ()
    ) -> dict[int, tuple[int, ...]]:
        """The same of requests that arrive one by one, every so many batches; ``aborted`` ones are
        stopped."""
        engine = self.llm.llm_engine
        outputs: dict[int, tuple[int, ...]] = {}
        arrived = batches = 0
        stopping: list[tuple[int, int]] = []
        while arrived < len(requests) or engine.has_unfinished_requests():
            if arrived < len(requests) and batches >= arrived * every:
                prompt, output, slo = requests[arrived]
                params = params_of(str(arrived), output, slo)
                engine.add_request(str(arrived), {"prompt_token_ids": prompt}, params)
                if arrived in aborted:
                    stopping.append((batches + 2 + arrived % 5, arrived))
                arrived += 1
            for at, number in [each for each in stopping if each[0] <= batches]:
                engine.abort_request([str(number)])
                stopping.remove((at, number))
            for result in engine.step():
                if result.finished:
                    outputs[int(result.request_id)] = tuple(result.outputs[0].token_ids)
            batches += 1
        return outputs

    def close(self) -> None:
        """Free the engine."""
        with _vllm_leaves_garbage():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


@contextmanager
def _vllm_leaves_garbage() -> Iterator[None]:
    """vLLM does not collect, freeze or unfreeze what this process has imported: seconds an
    engine."""
    with ExitStack() as patches:
        for name in ("collect", "freeze", "unfreeze"):
            patches.enter_context(patch.object(gc, name))
        yield


class Since:
    """What an engine has done since this was made."""

    def __init__(self, engine: InProcess) -> None:
        self._engine = engine
        self._before = engine.table.read().summary
        self._batches = len(engine.batches())

    def __getitem__(self, counter: str) -> Any:
        return self._engine.table.read().summary[counter] - self._before[counter]

    def batches(self) -> list[dict[str, Any]]:
        return self._engine.batches()[self._batches :]


def outputs_of_stock(
    model: Path, directory: Path, requests: Requests, **args: Any
) -> list[tuple[int, ...]]:
    """What stock vLLM generates."""
    engine = InProcess(model, directory, **args)
    outputs = engine.generate(requests)
    engine.close()
    return outputs


def params_of(
    name: str, output: int, slo: SLO | None, reasoning_ends: frozenset[int] = frozenset()
) -> Any:
    """Sampling parameters of a greedy request with exactly ``output`` tokens."""
    from vllm import SamplingParams

    extra = None
    if slo is not None:
        args = RequestArgs(name, time.monotonic(), slo, reasoning_ends=reasoning_ends)
        extra = to_xargs(args)
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=extra)


class RandomDeferral(BatchPolicy):
    """Leaves out half of the queue, cuts prefills anywhere, in random order."""

    name = "random-deferral"
    source = "this test"
    local_order = SLIDE

    def fill(self, batch: Any, queue: QueueView, now_s: float, latency: LatencyModel) -> None:
        chance = random.Random(f"{len(queue)}:{queue.table[0].tolist()}")
        rows = list(range(len(queue)))
        chance.shuffle(rows)
        for row in rows[: (len(rows) + 1) // 2]:
            batch.add(row, chance.randrange(1, 41))


def random_prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(300, 1000) for _ in range(length)]


def mixed_requests(count: int, seed: int = 0, longest: int = 500) -> Requests:
    """Prompts of very different length, some sharing a prefix, with varied objectives."""
    chance = random.Random(seed)
    shared = random_prompt(chance, 150)
    requests: Requests = []
    for i in range(count):
        length = int(2 ** chance.uniform(0, longest.bit_length() - 1))
        prompt = random_prompt(chance, length)
        if i % 4 == 0:
            prompt = (shared + prompt)[:longest]
        requests.append((prompt, chance.randrange(1, 40), OBJECTIVES[i % len(OBJECTIVES)]))
    return requests
