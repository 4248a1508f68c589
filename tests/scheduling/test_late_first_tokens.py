"""First tokens that a replica is going to miss."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.late_first_tokens import late
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, report, row

MODEL = LinearLatency(a=0.010, b=0.000_1, c=0.0)
"""A second for 10,000 tokens."""


def found(
    fleet: Fleet, *due_s: float, begun_s: float = 0.0, seen_s: float = 0.0, spare_s: float = 0.0
) -> list[bool]:
    """Which are late that are due then by plan, and ``spare_s`` later as stated."""
    planned_s = np.array(due_s)
    return late(fleet, 0, 2_000, (begun_s, seen_s), planned_s, planned_s + spare_s).tolist()


def holding(*tokens: int, ttft_s: float = 2.0, slower: float = 1.0) -> Fleet:
    """A replica with prompts of so many tokens, each due a moment later."""
    rows = [
        row(SLO(ttft_s=ttft_s + 0.001 * place), count, key=place + 1)
        for place, count in enumerate(tokens)
    ]
    return fleet_of(report(*rows, latency=MODEL.corrected(slower, slower)))


def dues(count: int, ttft_s: float = 2.0) -> list[float]:
    return [float(np.float32(ttft_s + 0.001 * place)) for place in range(count)]


def test_late_is_what_the_capacity_until_then_does_not_hold() -> None:
    assert found(holding(19_000), *dues(1)) == [False]
    assert found(holding(21_000), *dues(1)) == [True]
    assert found(holding(21_000), *dues(1), spare_s=0.2) == [False], "only the plan is missed"
    assert found(holding(19_000, slower=1.2), *dues(1)) == [True]
    assert found(holding(19_000), 1.0) == [False], "none that is due then is there"


def test_later_ones_count_as_if_those_that_leave_had_left() -> None:
    assert found(holding(15_000, 15_000), *dues(2)) == [False, True]
    assert found(holding(25_000, 15_000), *dues(2)) == [True, False]
    assert found(holding(15_000, 15_000, 4_000), *dues(3)) == [False, True, False]


@pytest.mark.parametrize("tokens", [500, 5_000])
def test_a_step_is_overdue_when_the_longest_batch_would_have_ended(tokens: int) -> None:
    fleet = holding(tokens)
    batch_s = MODEL.a + MODEL.work_s(min(tokens, 2_000), 0)
    assert found(fleet, *dues(1), seen_s=batch_s) == [False]
    # It is expected to take as long again as it is overdue; then comes what is left of the prompt.
    left_s = MODEL.a + MODEL.work_s(tokens, 0) - batch_s
    last_s = batch_s + (2.0 - batch_s - left_s) / 2
    assert found(fleet, *dues(1), seen_s=last_s - 0.02) == [False]
    assert found(fleet, *dues(1), seen_s=last_s + 0.02) == [True]


def test_best_effort_prompts_may_be_what_takes_so_long() -> None:
    mine = row(SLO(ttft_s=0.3), 100)
    other = row(SLO(), 5_000, key=2, best_effort=True)
    assert found(fleet_of(report(mine, latency=MODEL)), *dues(1, 0.3), seen_s=0.2) == [True]
    both = fleet_of(report(mine, other, latency=MODEL))
    assert found(both, *dues(1, 0.3), seen_s=0.2) == [False]


@given(
    asked=st.lists(
        st.tuples(st.floats(0.1, 8.0), st.integers(1, 20_000), st.floats(0.0, 1.0)), max_size=12
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_nothing_that_was_just_promised_is_late(asked: list[tuple[float, int, float]]) -> None:
    fleet = fleet_of(report(latency=MODEL))
    placer = Placer(fleet, make_routing("least_tokens"), make_admission("moore_hodgson"))
    promised: list[float] = []
    for key, (ttft_s, tokens, waited) in enumerate(asked):
        slo = SLO(ttft_s=ttft_s, tpot_s=0.2)
        query = RouteQuery(key, slo, tokens, waited * ttft_s)
        if placer.place(query, 0.0).tier is Tier.GUARANTEED:
            promised.append(ttft_s - waited * ttft_s)
        assert not any(found(fleet, *sorted(promised)))


@given(
    tokens=st.lists(st.integers(100, 9_000), min_size=1, max_size=8),
    slower=st.floats(1.0, 8.0),
    seen_s=st.floats(0.0, 3.0),
)
@settings(max_examples=examples(100), deadline=None)
def test_who_stays_is_in_time_once_the_others_have_left(
    tokens: list[int], slower: float, seen_s: float
) -> None:
    which = found(holding(*tokens, slower=slower), *dues(len(tokens)), seen_s=seen_s)
    rest = [
        row(SLO(ttft_s=2.0 + 0.001 * place), count, key=place + 1)
        for place, count in enumerate(tokens)
        if not which[place]
    ]
    left = fleet_of(report(*rest, latency=MODEL.corrected(slower, slower)))
    due_s = [each for each, leaves in zip(dues(len(tokens)), which, strict=True) if not leaves]
    assert not any(found(left, *due_s, begun_s=inf))
