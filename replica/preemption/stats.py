"""Counts and times of an engine's preemptions."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.replica.preemption.messages import Timing
from sluice.scheduling.fleet.state import STOP_BUCKETS_S


class StalledError(RuntimeError):
    """The worker makes no progress."""


class TaskWatchdog:
    """Checks at each ``look`` that the worker makes progress, within ``limit_s`` seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0

    def look(self, task: int, reached: int) -> float:
        """Record the mark of the last check; returns the max seconds until the next call. Raises
        StalledError: no progress for too long."""
        now_s = self._clock()
        if self._seen != (task, reached):
            self._seen, self._since_s = (task, reached), now_s
        left_s = self._since_s + self._limit_s - now_s
        if left_s <= 0:
            raise StalledError(
                f"the worker has made no progress with task {task} for {self._limit_s:g} s"
            )
        return left_s


@dataclass(slots=True)
class Stats:
    """Counts since the start, as in the state table; ``stop_s``: from stop signals to stops.
    ``suspended``: prefills now; ``late_stops``: signals to prefills that ended before they saw
    them; ``reserved_bytes``: on one worker."""

    rounds: int = 0
    suspended: int = 0
    suspensions: int = 0
    late_stops: int = 0
    resumes: int = 0
    discards: int = 0
    suspended_s: float = 0.0
    decide_s: float = 0.0
    reserved_bytes: int = 0
    stop_s: float = 0.0
    stop_histogram: list[int] = field(default_factory=lambda: [0] * (len(STOP_BUCKETS_S) + 1))

    def ended(self, signalled_s: list[float], timing: Timing) -> list[float]:
        """A task ended that had stop signals at these times; how long each stop took."""
        stopped_s = timing.stopped_s
        self.suspensions += len(stopped_s)
        self.late_stops += len(signalled_s) - len(stopped_s)
        self.suspended_s += timing.suspended_s
        took_s = [max(0.0, end - begin) for begin, end in zip(signalled_s, stopped_s, strict=False)]
        for each_s in took_s:
            self.stop_s += each_s
            self.stop_histogram[bisect_left(STOP_BUCKETS_S, each_s)] += 1
        return took_s
