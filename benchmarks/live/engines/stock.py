"""One stock vLLM engine in this process, with vLLM's own priorities."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.benchmarks.live.engines.base import OneEngine, Result, Work, result_of
from sluice.replica.vllm.setup import survive_module_scan


class StockEngine(OneEngine):
    """An engine core whose requests arrive while it computes, as in a process of its own: requests
    that arrive during a step are available to the next one.

    Args:
        model: the model's directory.
        args: vLLM's engine arguments.
    """

    def __init__(self, model: Path, **args: Any) -> None:
        super().__init__()
        from vllm import LLM

        survive_module_scan()
        self._llm: Any = LLM(
            model=str(model),
            async_scheduling=False,
            disable_log_stats=True,
            scheduling_policy="priority",
            **args,
        )
        self._scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def use(self, step_tokens: int, long_tokens: int = 0) -> None:
        """Set other bounds.

        Args:
            step_tokens: max tokens of a step; at most those that the engine was made for.
            long_tokens: max tokens of one prefill in a step; 0: no separate bound.
        """
        self._scheduler.max_num_scheduled_tokens = step_tokens
        self._scheduler.scheduler_config.long_prefill_token_threshold = long_tokens

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives now, or arrived some time ago; on the engine's thread. The tighter its
        objective, the higher its priority."""
        from vllm import SamplingParams

        self._arrived_s[work.name] = time.monotonic() if arrived_s is None else arrived_s
        params = SamplingParams(
            temperature=0.0, max_tokens=work.output, ignore_eos=True, logprobs=0
        )
        prompt = {"prompt_token_ids": list(work.prompt)}
        priority = round(1e3 * work.ttft_s)  # the lowest first
        self._llm.llm_engine.add_request(work.name, prompt, params, priority=priority)

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine's thread run ``action`` before its next step; from any thread."""
        self._actions.put(action)

    def run(self) -> dict[str, Result]:
        """Run until no request is left."""
        engine = self._llm.llm_engine
        results: dict[str, Result] = {}
        while True:
            while not self._actions.empty():
                self._actions.get()()
            if not engine.has_unfinished_requests():
                break
            for item in engine.step():
                name, output = item.request_id, item.outputs[0]
                if output.token_ids:
                    self._first_s.setdefault(name, time.monotonic())
                if item.finished:
                    ttft_s = self._first_s.pop(name) - self._arrived_s.pop(name)
                    results[name] = result_of(output, ttft_s)
        return results
