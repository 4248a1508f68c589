"""Deadlines do not depend on whose clock shows what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.protocol.connection import WINDOW_S, ClockOffset
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, decode_row, delta, free_row, hello, waiting_row
from tests.examples import examples

_ways_s = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60)


@given(_ways_s, st.floats(-1e6, 1e6), st.floats(0.001, 20.0))
def test_the_quickest_recent_message_tells_how_the_clocks_differ(
    ways_s: list[float], skew_s: float, every_s: float
) -> None:
    """Whatever the skew: what is said of a message is how much longer than the quickest it took,
    of all in the last window, and perhaps of some in the two before."""
    offset, window_s = ClockOffset(), WINDOW_S
    heard: list[tuple[float, float]] = []
    now_s = 0.0
    for way_s in ways_s:
        now_s += every_s
        heard.append((now_s, way_s))
        longer_s = offset.observe(now_s - way_s - skew_s, now_s)
        least_s = way_s - longer_s
        recent = [way for at, way in heard if now_s - at <= 3 * window_s]
        latest = [way for at, way in heard if now_s - at < window_s]
        assert min(recent) - 1e-6 <= least_s <= min(latest) + 1e-6
        assert offset.seconds == pytest.approx(skew_s + least_s, abs=1e-6)
        assert longer_s >= 0.0


def test_a_clock_that_stood_still_is_followed() -> None:
    offset = ClockOffset()
    assert offset.observe(100.0, 100.0) == 0.0
    # The sender's machine was moved, and its clock was not told of those 7 s.
    for now_s in (101.0, 115.0, 129.0, 131.0, 159.0):
        assert offset.observe(now_s - 7.0, now_s) == 7.0
    assert offset.observe(165.0 - 7.0, 165.0) == 0.0
    assert offset.seconds == 7.0


def test_one_that_was_silent_for_long_is_judged_anew() -> None:
    offset = ClockOffset()
    offset.observe(100.0, 100.0)
    assert offset.observe(1_000.0, 1_005.0) == 0.0
    assert offset.seconds == 5.0


CONFIG = ControllerConfig()
NAMES = ("a", "b", "c")
DRIFT = 1e-4
"""Seconds that a bad clock loses in a second; the usual ones lose a tenth of that."""

# All times are whole 1024ths of a second, so sums of them are exact and decisions can be equal.
_ticks = st.integers(0, 2_048).map(lambda ticks: ticks / 1_024)
_hours = st.integers(-50_000_000, 50_000_000).map(lambda ticks: ticks / 1_024)
_skews = st.tuples(*[st.sampled_from([-2.0, 2.0]) | _hours] * len(NAMES))
_actions = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 7), st.integers(1, 4_000)),
        st.tuples(st.just("hello"), st.integers(0, 2), st.integers(0, 0), st.integers(0, 0)),
        st.tuples(st.just("ask"), st.integers(1, 4_000), st.integers(0, 8), st.booleans()),
        st.tuples(st.just("wait"), _ticks),
    ),
    min_size=5,
    max_size=40,
)


class Fleet:
    """A controller and what three replicas tell it, each by a clock of its own.

    Args:
        skews_s: what each replica's clock is ahead.
        drift: seconds that it loses in a second.
    """

    def __init__(self, skews_s: tuple[float, ...], drift: float = 0.0) -> None:
        self.clock = Clock(100_000.0)
        self.controller = Controller(CONFIG, self.clock)
        self._skews_s = skews_s
        self._drift = drift
        self._tables: list[dict[int, np.ndarray]] = [{} for _ in NAMES]
        self._seqs = [0] * len(NAMES)
        self._epoch = 0
        self._keys = 0

    def own_s(self, replica: int) -> float:
        """What the replica's clock shows."""
        return self.clock.now_s + self._skews_s[replica] - self._drift * self.clock.now_s

    async def hello(self, replica: int) -> None:
        """It registers with all that it has."""
        now_s = self.own_s(replica)
        self._seqs[replica] += 1
        self._tables[replica] = dict(enumerate(self._tables[replica].values()))
        rows = list(self._tables[replica].values())
        message = hello(NAMES[replica], rows, seq=self._seqs[replica], now_s=now_s)
        self._stamp(message.summary, now_s)
        self._epoch = (await self.controller.hello(message)).epoch

    async def report(self, replica: int, slot: int, tokens: int) -> None:
        """A request comes to a slot, decodes there or leaves it."""
        now_s = self.own_s(replica)
        table = self._tables[replica]
        self._keys += 1
        known = table.get(slot)
        if known is None:
            change = table[slot] = waiting_row(self._keys, tokens, now_s)
        elif known["emitted_tokens"] == 0:
            change = table[slot] = decode_row(int(known["key"]), tokens, now_s)
        else:
            change = free_row()
            del table[slot]
        self._seqs[replica] += 1
        message = delta(
            NAMES[replica], self._epoch, self._seqs[replica], {slot: change}, now_s=now_s
        )
        self._stamp(message.summary, now_s)
        if (await self.controller.report(message)).resync:
            await self.hello(replica)

    async def ask(self, tokens: int, waited: int, stated: bool) -> RouteDecision:
        """A router asks."""
        self._keys += 1
        slo = SLO(ttft_s=1.0, tpot_s=0.1) if stated else SLO()
        query = RouteQuery(1_000_000 + self._keys, slo, tokens, waited / 16)
        (decision,) = (await self.controller.route([query])).decisions
        return decision

    async def act(self, action: tuple[object, ...]) -> RouteDecision | None:
        """Do what was drawn."""
        match action:
            case ("report", int(replica), int(slot), int(tokens)):
                await self.report(replica, slot, tokens)
            case ("hello", int(replica), _, _):
                await self.hello(replica)
            case ("ask", int(tokens), int(waited), bool(stated)):
                return await self.ask(tokens, waited, stated)
            case ("wait", float(seconds)):
                self.clock.advance(seconds)
        return None

    @staticmethod
    def _stamp(summary: np.void, now_s: float) -> None:
        summary["updated_s"] = summary["step_started_s"] = now_s


@contextmanager
def wall_time_steps() -> Iterator[None]:
    """Each look at the wall clock shows another hour, forwards and back."""
    hours = iter([(-1) ** n * 3_600.0 * n for n in range(100_000)])
    now_s = time.time()
    with patch.object(time, "time", lambda: now_s + next(hours)):
        yield


@given(_actions, _skews)
@settings(deadline=None, max_examples=examples(12))
async def test_skewed_clocks_and_steps_of_wall_time_change_no_decision(
    actions: list[tuple[object, ...]], skews_s: tuple[float, ...]
) -> None:
    """Replicas whose clocks are seconds or hours apart are decided on as if they were not."""
    plain, skewed = Fleet((0.0,) * len(NAMES)), Fleet(skews_s)
    for action in [*(("hello", replica, 0, 0) for replica in range(3)), *actions]:
        expected = await plain.act(action)
        with wall_time_steps():
            assert await skewed.act(action) == expected


async def test_a_drifting_clock_moves_a_prediction_by_no_more_than_it_drifts() -> None:
    """For long: what a clock has lost is followed, not added up."""
    plain, drifting = Fleet((0.0,) * len(NAMES)), Fleet((0.0,) * len(NAMES), DRIFT)
    decided = 0
    for replica in range(len(NAMES)):
        await plain.hello(replica)
        await drifting.hello(replica)
    for number in range(200):
        for fleet in (plain, drifting):
            for _ in range(4):
                fleet.clock.advance(2.0)
                for replica in range(len(NAMES)):
                    await fleet.report(replica, number % 3, 1_500 + 400 * replica)
        expected, told = await plain.ask(2_000, 0, True), await drifting.ask(2_000, 0, True)
        assert (told.replica_id, told.reason, told.tier) == (
            expected.replica_id,
            expected.reason,
            expected.tier,
        )
        if expected.predicted_ttft_s is not None:
            decided += 1
            # The clocks' difference is known from the last three windows.
            assert told.predicted_ttft_s == pytest.approx(
                expected.predicted_ttft_s, abs=DRIFT * 90.0
            )
    assert decided > 100
