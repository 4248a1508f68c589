"""Reports wait for their turn beside decisions, and neither keeps the other from its time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sluice.controller.transport import channel
from sluice.controller.transport.channel import TURN_S, ReportQueue
from sluice.protocol.connection import Frames
from sluice.protocol.messages import Report
from tests.controller.fleet import Clock


class Taken:
    """A queue whose reports take ``TURN_S`` each, by a clock of its own, and what it took in."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.queue = ReportQueue(self._take, self.clock)
        self.line = Frames(1)
        self.numbers: list[int] = []
        self.wanted: list[bool] = []

    def add(self, *numbers: int, left_s: float = 10.0, size: int = 1) -> None:
        for number in numbers:
            report = Report(number, 0.0, left_s, msgspec.Raw(b""))
            self.queue.add(self.line, report, self.clock() + left_s, size)

    def _take(self, connection: Frames, report: Report, wanted: bool) -> None:
        assert connection is self.line
        self.clock.advance(TURN_S)
        self.numbers.append(report.number)
        self.wanted.append(wanted)

    async def turns(self, count: int) -> list[int]:
        """How many were taken in after each turn of the event loop."""
        found = []
        for _ in range(count):
            await asyncio.sleep(0)
            found.append(len(self.numbers))
        return found


async def test_questions_are_looked_for_after_each_part_of_the_reports() -> None:
    taken = Taken()
    taken.add(*range(4))
    assert taken.numbers == [], "reading one takes no time from a decision"
    assert await taken.turns(5) == [1, 2, 3, 4, 4]
    assert taken.numbers == [0, 1, 2, 3]


async def test_reports_get_as_much_time_as_decisions() -> None:
    taken = Taken()
    taken.add(*range(9))
    assert await taken.turns(1) == [1]
    taken.queue.owed_s += 5 * TURN_S  # of decisions meanwhile
    assert await taken.turns(3) == [6, 7, 8]


async def test_a_report_whose_sender_no_longer_waits_is_answered_so_and_a_closed_one_dropped() -> (
    None
):
    taken = Taken()
    taken.add(1, left_s=TURN_S)
    taken.add(2, left_s=TURN_S / 2)
    taken.queue.finish()
    assert (taken.numbers, taken.wanted) == ([1, 2], [True, False])
    taken.add(3)
    taken.line.closed = True
    await taken.turns(1)
    assert taken.numbers == [1, 2]


async def test_the_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_BYTES", 10)
    taken = Taken()
    taken.add(1, 2, size=5)
    assert taken.numbers == []
    taken.add(3, size=6)
    assert taken.numbers == [1, 2]
    taken.add(4, size=11)
    assert taken.numbers == [1, 2, 3, 4]
