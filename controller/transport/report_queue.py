"""Reports that have arrived and wait for their turn beside decisions.

A request waits for its decision, and nothing waits for a report. But reports are many: all replicas
of a large fleet together send more of them than one process can take in, and a connection that is
always full is read to its end first. So a report only joins a queue when it is read, and the event
loop looks for questions again after every :data:`TURN_S` of reports.

Where there is not enough time for both, reports get as much as decisions: replicas of which nothing
is heard count as aged, and nothing can be guaranteed there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sluice.controller.transport.frames import Frames
from sluice.controller.transport.wire_format import Report

TURN_S: Final = 0.000_5
"""Reports are taken in for this long before questions are looked for, seconds, and for longer where
decisions took longer meanwhile."""

MOST_BYTES: Final = 16 << 20
"""Most bytes of reports that wait; for more the oldest are taken in at once."""


class _Waiting(NamedTuple):
    connection: Frames
    report: Report
    due_s: float
    size: int


class ReportQueue:
    """Takes reports in, in the order in which they came. ``O(1)`` each beside the work itself.

    Args:
        take: takes one in and answers it, unless its connection has ended; with whether its sender
            still waits for the answer.
        clock: monotonic seconds.
    """

    def __init__(self, take: Callable[[Frames, Report, bool], None], clock: Callable[[], float]):
        self._take = take
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._owed_s = 0.0
        self._scheduled = False

    def add(self, connection: Frames, report: Report, due_s: float, size: int) -> None:
        """A report of ``size`` bytes was read, whose sender waits until ``due_s``."""
        self._waiting.append(_Waiting(connection, report, due_s, size))
        self._bytes += size
        while self._bytes > MOST_BYTES:
            self._next()
        self._schedule()

    def decided(self, took_s: float) -> None:
        """Decisions took this long, seconds."""
        if self._waiting:
            self._owed_s += took_s

    def finish(self) -> None:
        """Take in all that wait now."""
        while self._waiting:
            self._next()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until_s = self._clock() + max(TURN_S, self._owed_s)
        self._owed_s = 0.0
        while self._waiting:
            self._next()
            if self._clock() >= until_s:
                break
        self._schedule()

    def _next(self) -> None:
        connection, report, due_s, size = self._waiting.popleft()
        self._bytes -= size
        if not connection.closed:
            self._take(connection, report, self._clock() <= due_s)
