"""A real engine in which requests arrive at given checks of a prefill."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.replica.preemption.messages import MAX_CHECKS
from tests.replica.engines import Result
from tests.replica.preemption.waits import PreemptiveEngine

_STOP_LIMIT_S = 60.0
_DEFAULTS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 16 << 20,
    "enforce_eager": True,
}


class CheckedEngine(PreemptiveEngine):
    """The same engine, whose checks are counted. ``stops``: how often a check waited for its stop
    signal; ``adapters``: LoRA adapters, by the name of the request that uses it."""

    def __init__(self, model: Path, directory: Path, ranks: int = 1, **args: Any) -> None:
        if ranks > 1:
            # vLLM itself binds only one worker to each NUMA node.
            cores = sorted(os.sched_getaffinity(0))
            each = [str(cores[rank % len(cores)]) for rank in range(ranks)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(each)
        super().__init__(model, directory, ranks, **(_DEFAULTS | args))
        self.stops = 0
        self.adapters: dict[str, Any] = {}

    @property
    def free_blocks(self) -> int:
        """Number of unused KV blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _request(self, work: Any, arrived_s: float | None, **more: Any) -> tuple[Any, ...]:
        request = super()._request(work, arrived_s, **more)
        return *request, None, self.adapters.get(work.name)

    def abort(self, names: Sequence[str]) -> None:
        """Stop requests; on the engine's thread."""
        self._llm.llm_engine.abort_request(list(names))

    def run(self) -> dict[str, Result]:
        """Run until no request is left; what :meth:`at_checks` asked for ends."""
        results = super().run()
        vars(self._checks or self).pop("check", None)
        return results

    def at_checks(
        self, actions: Mapping[int, Callable[[], None]], waits: Collection[int] | None = None
    ) -> None:
        """Run each of ``actions`` on the engine's thread when preemptible prefills have passed its
        number of checks in total, counted from now. Ends with the next :meth:`run`.

        Args:
            actions: by number of checks.
            waits: the checks that wait until their task receives the stop signal, so that it stops
                exactly there; default: all.
        """
        checks, words = self._checks, self.executor.words
        check = type(checks).check
        waits = actions.keys() if waits is None else waits
        passed = 0

        def checked() -> None:
            nonlocal passed
            passed += 1
            here = passed
            if here in actions:
                self.post(actions[here])
            if here in waits:
                limit_s = time.monotonic() + _STOP_LIMIT_S
                while not words.stops(checks.task):
                    if time.monotonic() > limit_s:
                        raise TimeoutError(f"the task at check {here} received no stop signal")
                    time.sleep(0)
                self.stops += 1
            check(checks)

        checks.check = checked

    def after_checks(self, actions: Sequence[tuple[int, Callable[[], None]]]) -> threading.Thread:
        """The same where the checks are in other processes: run each of ``actions`` soon after the
        running prefill has passed its number of checks since the action before. Returns the
        watching thread, to be joined."""
        words = self.executor.words
        begun = self.scheduler._tasks

        def watch() -> None:
            nonlocal begun
            for checks, action in actions:
                limit_s = time.monotonic() + _STOP_LIMIT_S
                while time.monotonic() < limit_s:
                    task, passed = divmod(words.reached(), MAX_CHECKS)
                    if task > begun and passed >= checks:
                        begun = task
                        break
                    time.sleep(0)
                self.post(action)

        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher
