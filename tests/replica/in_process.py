"""Real vLLM engines inside the test process, stock or with Sluice's scheduler."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

from replica.state_table import StateTable
from replica.vllm_args import RequestArgs, SchedulerSettings, to_xargs
from scheduling.objective import SLO

OBJECTIVES = (
    SLO(),
    SLO(ttft_s=0.05, tpot_s=0.02, priority=4),
    SLO(ttft_s=0.5, tpot_s=0.05, priority=2),
    SLO(e2e_s=3.0),
)


class InProcess:
    """One engine. Without a policy it is stock vLLM."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        policy: str | None = None,
        options: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        from vllm import LLM

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
            args["scheduler_cls"] = "replica.vllm_scheduler.make_scheduler"
            args["additional_config"] = settings.to_additional_config()
        defaults: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
        }
        self.llm = LLM(
            model=str(model),
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **(defaults | args),
        )

    def batches(self) -> list[dict[str, Any]]:
        """The batch log so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def generate(self, requests: list[tuple[list[int], int, SLO | None]]) -> list[tuple[int, ...]]:
        """Greedy output tokens of (prompt tokens, output tokens, objective)."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=output,
                ignore_eos=True,
                extra_args=None
                if slo is None
                else to_xargs(RequestArgs(str(i), time.monotonic(), slo)),
            )
            for i, (_, output, slo) in enumerate(requests)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Free the engine."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def mixed_requests(
    count: int, seed: int = 0, longest: int = 500
) -> list[tuple[list[int], int, SLO | None]]:
    """Prompts of very different length, some sharing a prefix, with varied objectives."""
    chance = random.Random(seed)
    shared = [chance.randrange(300, 1000) for _ in range(150)]
    requests: list[tuple[list[int], int, SLO | None]] = []
    for i in range(count):
        length = int(2 ** chance.uniform(0, longest.bit_length() - 1))
        prompt = [chance.randrange(300, 1000) for _ in range(length)]
        if i % 4 == 0:
            prompt = (shared + prompt)[:longest]
        requests.append((prompt, chance.randrange(1, 40), OBJECTIVES[i % len(OBJECTIVES)]))
    return requests
