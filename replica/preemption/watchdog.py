"""Detects that the worker makes no progress: it hangs, or workers wait for each other
indefinitely."""

from __future__ import annotations

import time
from collections.abc import Callable


class StalledError(RuntimeError):
    """The worker makes no progress."""


class TaskWatchdog:
    """Checks the progress of the worker at each :meth:`look`.

    Args:
        limit_s: without progress for this long, seconds, the worker counts as stalled.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0

    def look(self, task: int, reached: int) -> float:
        """Record the progress of the worker.

        Args:
            task: the one that should be computing.
            reached: the mark of the last check.

        Returns:
            seconds until the next call, at most.

        Raises:
            StalledError: the worker has made no progress for too long.
        """
        now_s = self._clock()
        if self._seen != (task, reached):
            self._seen, self._since_s = (task, reached), now_s
        left_s = self._since_s + self._limit_s - now_s
        if left_s <= 0:
            raise StalledError(
                f"the worker has made no progress with task {task} for {self._limit_s:g} s"
            )
        return left_s
