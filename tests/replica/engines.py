"""Real vLLM engines in this process or in a child process of it, and the requests they run."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sluice.replica.vllm.setup import survive_module_scan


def quiet_vllm() -> None:
    """For a command that imports vLLM: one thread, and none of its lines between those of JSON."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Work(NamedTuple):
    """One request; its name is unique among the live ones."""

    name: str
    prompt: Sequence[int]
    output: int
    ttft_s: float
    best_effort: bool = False
    tpot_s: float | None = None


class Result(NamedTuple):
    """Greedy tokens, and the time from the arrival to the first one."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    reason: str | None


class OneEngine:
    """Base class of engines in this process: sets the environment, which vLLM reads on import."""

    add: Callable[[Work], None]
    run: Callable[[], dict[str, Result]]

    def __init__(self) -> None:
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        os.environ.update(fixed, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._arrived_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}

    def _start(self, model: Path, **args: Any) -> None:
        """Start vLLM with the model's directory and its engine arguments."""
        from vllm import LLM

        survive_module_scan()
        self._llm: Any = LLM(model=str(model), disable_log_stats=True, **args)

    def alone(self, work: Work) -> Result:
        """The result of a request that runs alone, from an empty prefix cache."""
        self.reset()
        self.add(work)
        return self.run()[work.name]

    def reset(self) -> None:
        """Empty the prefix cache. Raises RuntimeError: blocks are in use."""
        if not self._llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("KV blocks are in use, though nothing is live")

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _request(self, work: Any, arrived_s: float | None, **more: Any) -> tuple[Any, ...]:
        """The arguments of vLLM's ``add_request``; ``more`` are parameters of the sampling."""
        from vllm import SamplingParams

        self._arrived_s[work.name] = time.monotonic() if arrived_s is None else arrived_s
        greedy = {"temperature": 0.0, "logprobs": 0}
        params = SamplingParams(max_tokens=work.output, ignore_eos=True, **(greedy | more))
        return work.name, {"prompt_token_ids": list(work.prompt)}, params

    def _step(self, results: dict[str, Result]) -> None:
        """Run one step, and add the requests that it has ended."""
        for item in self._llm.llm_engine.step():
            name, output = item.request_id, item.outputs[0]
            if output.token_ids:
                self._first_s.setdefault(name, time.monotonic())
            if item.finished:
                results[name] = Result(
                    tuple(output.token_ids),
                    tuple(next(iter(each.values())).logprob for each in output.logprobs or ()),
                    self._first_s.pop(name, float("inf")) - self._arrived_s.pop(name),
                    output.finish_reason,
                )


class StockEngine(OneEngine):
    """Stock vLLM with its own priorities. What arrives during a step is available to the next
    one."""

    def __init__(self, model: Path, **args: Any) -> None:
        super().__init__()
        self._start(model, async_scheduling=False, scheduling_policy="priority", **args)
        self._scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def use(self, step_tokens: int, long_tokens: int = 0) -> None:
        """Set the max tokens of a step, and of one prefill in it; 0: no separate bound."""
        self._scheduler.max_num_scheduled_tokens = step_tokens
        self._scheduler.scheduler_config.long_prefill_token_threshold = long_tokens

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives; the tighter its objective, the higher its priority."""
        priority = round(1e3 * work.ttft_s)  # the lowest first
        self._llm.llm_engine.add_request(*self._request(work, arrived_s), priority=priority)

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine's thread run ``action`` before its next step; from any thread."""
        self._actions.put(action)

    def run(self) -> dict[str, Result]:
        """Run until no request is left."""
        results: dict[str, Result] = {}
        while True:
            while not self._actions.empty():
                self._actions.get()()
            if not self._llm.llm_engine.has_unfinished_requests():
                return results
            self._step(results)


class EngineProcess:
    """The engine that ``make`` returns, in a child process: two engines in one process would share
    the global state of vLLM and torch. Everything that is sent must be picklable."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            self._pool.submit(_make, make).result()
        except BaseException:
            self._pool.shutdown()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(engine, *args)`` there. Raises BrokenProcessPool: the process ended."""
        return self._pool.submit(_call, function, args).result()

    def close(self) -> None:
        """Close the engine, and end the process."""
        with self._pool:
            self.call(_close)


_engines: list[Any] = []
"""The engine of a child process."""


def _make(make: Callable[[], Any]) -> None:
    _engines.append(make())


def _close(engine: Any) -> None:
    engine.close()


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(_engines[0], *args)
