"""TDG, ProServe's gain function, has the properties that its Table 1 claims."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO, Anchor, GainWeights, TokenClock
from sluice.simulation.metrics import token_deadlines_s
from tests.scheduling.views import slos

WEIGHTS = GainWeights(first=30.0, later=1.0)
CHAT = SLO(ttft_s=1.0, tpot_s=0.1)

# The paper's setting: both objectives stated, and no other.
papers_slos = st.builds(
    SLO, ttft_s=st.floats(0.01, 5), tpot_s=st.floats(0.001, 1), priority=st.integers(1, 10)
)
weights = st.builds(GainWeights, first=st.floats(0.1, 100), later=st.floats(0.1, 10))


def deadlines_s(slo: SLO, arrival_s: float, emitted_s: Floats) -> Floats:
    return token_deadlines_s(arrival_s, *slo.columns[:3], np.asarray(emitted_s, float))


def tdg(
    slo: SLO,
    emitted_s: Floats | list[float],
    weights: GainWeights = WEIGHTS,
    arrival_s: float = 0.0,
) -> float:
    """Tokens that left before their deadline, weighted and times the priority: ProServe Eq. 3."""
    times = np.asarray(emitted_s, float)
    worth = np.where(np.arange(len(times)) == 0, weights.first, weights.later)
    return slo.priority * float(worth @ (times < deadlines_s(slo, arrival_s, times)))


@st.composite
def emissions(draw: st.DrawFn) -> Floats:
    """Ascending times from 0, of bursts, steady tokens and stalls."""
    gaps = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 3.0])
    return np.cumsum(np.array(draw(st.lists(gaps, max_size=40))))


def test_by_hand() -> None:
    # TTFT met by 0.2 s; the second token is on time, the third stalls, the fourth catches up.
    slo, times = replace(CHAT, priority=3), [10.8, 10.85, 11.25, 11.29]
    assert tdg(slo, times, arrival_s=10.0) == 3 * (30 + 1 + 0 + 1)
    assert tdg(CHAT, []) == tdg(SLO(), []) == 0


@given(slo=slos, times=emissions(), weights=weights)
def test_it_is_what_a_token_clock_counts(slo: SLO, times: Floats, weights: GainWeights) -> None:
    clock = TokenClock(slo, 5.0, weights)
    for now_s in (times + 5.0).tolist():
        clock.emit(1, now_s)
    gain, ideal = tdg(slo, times + 5.0, weights, 5.0), tdg(slo, np.zeros(len(times)), weights)
    assert gain == pytest.approx(clock.gain)
    assert ideal == pytest.approx(clock.earned.first_ideal + clock.earned.later_ideal)
    assert 0 <= gain <= ideal


@given(slo=papers_slos, times=emissions(), weights=weights, priority=st.integers(1, 10))
def test_gain_is_proportional_to_priority(
    slo: SLO, times: Floats, weights: GainWeights, priority: int
) -> None:
    other = tdg(replace(slo, priority=priority), times, weights)
    assert other * slo.priority == pytest.approx(tdg(slo, times, weights) * priority)


def test_gain_sees_a_stall_behind_an_equal_mean() -> None:
    late = np.concatenate([[0.5], np.full(10, 1.9)])
    tight = replace(CHAT, tpot_s=0.15)
    assert tdg(tight, late) < tdg(tight, 0.5 + 0.14 * np.arange(11))


@given(weights=weights, priority=st.integers(1, 10))
def test_a_missed_first_token_costs_its_own_weight(weights: GainWeights, priority: int) -> None:
    slo = replace(CHAT, priority=priority)
    ideal = tdg(slo, np.zeros(4), weights)
    first_late = tdg(slo, [1.01, 1.05, 1.1, 1.15], weights)
    assert ideal - first_late == pytest.approx(priority * weights.first)
    third_late = tdg(slo, [0.95, 1.04, 1.25, 1.26], weights)
    assert ideal - third_late == pytest.approx(priority * weights.later)


@given(slo=papers_slos, late=st.floats(0.001, 50), weights=weights)
def test_serving_a_late_request_still_gains(slo: SLO, late: float, weights: GainWeights) -> None:
    assert slo.ttft_s is not None and slo.tpot_s is not None
    first_s = slo.ttft_s + late
    # Served at once from here on, with as many tokens as there is a deadline still ahead of.
    tokens = int(late / slo.tpot_s) + 3
    assume(tokens < 60_000)
    assert tdg(slo, [first_s], weights) == 0 < tdg(slo, np.full(tokens, first_s), weights)


@given(slo=papers_slos, times=emissions(), weights=weights, data=st.data())
def test_it_never_falls_when_tokens_leave_earlier(
    slo: SLO, times: Floats, weights: GainWeights, data: st.DataObject
) -> None:
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(times), max_size=len(times)))
    earlier = np.minimum.accumulate((times * np.array(shares))[::-1])[::-1]
    assert tdg(slo, earlier, weights) >= tdg(slo, times, weights)


def test_the_footnotes_anchor_gives_up_that_property() -> None:
    # An early first token starts the clock of the others.
    early, late = [0.1, 1.05], [0.99, 1.05]
    assert tdg(CHAT, early) == tdg(CHAT, late) == 31
    gains = []
    for times in (early, late):
        clock = TokenClock(CHAT, 0.0, WEIGHTS, Anchor.FIRST_TOKEN)
        for now_s in times:
            clock.emit(1, now_s)
        gains.append(clock.gain)
    assert gains == [30, 31]
