"""What an engine's preemptions cost."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

BLOCKED_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the histogram of blocking times, seconds; one more bucket is above them."""

_KEPT = 1024


@dataclass(slots=True)
class Stats:
    """Counts since the start.

    Attributes:
        tasks: batches sent to the worker.
        preemptions: prefills that stopped.
        late: those told to stop that had ended before they saw it.
        discards: prefills given up.
        failures: prefills that raised.
        deepest: most suspended at once.
        suspended_s: time that prefills were suspended, all together.
        decide_s: time that decisions took, all together.
        blocked: histogram of the time from the signal to the stop.
        latest_blocked_s: the latest of these times.
        latest_busy_s: how long the latest task that could be preempted computed.
    """

    tasks: int = 0
    preemptions: int = 0
    late: int = 0
    discards: int = 0
    failures: int = 0
    deepest: int = 0
    suspended_s: float = 0.0
    decide_s: float = 0.0
    blocked: list[int] = field(default_factory=lambda: [0] * (len(BLOCKED_BUCKETS_S) + 1))
    latest_busy_s: float = 0.0
    latest_blocked_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def stopped(self, signalled_s: list[float], stopped_s: tuple[float, ...]) -> None:
        """A task ended that was told to stop at the first times, and stopped at the others."""
        self.preemptions += len(stopped_s)
        self.late += len(signalled_s) - len(stopped_s)
        for signal_s, stop_s in zip(signalled_s, stopped_s, strict=False):
            blocked_s = max(0.0, stop_s - signal_s)
            self.blocked[bisect_left(BLOCKED_BUCKETS_S, blocked_s)] += 1
            self.latest_blocked_s.append(blocked_s)
