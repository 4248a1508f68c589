"""Deadlines with both anchors, the token gain, and attainment."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request import kernels
from sluice.scheduling.request.objective import SLO, Anchor, GainWeights, TokenClock
from sluice.scheduling.request.queue import QueueView
from tests.scheduling.views import decode, queues, slos

times = st.floats(0, 1_000)


@pytest.mark.parametrize(
    ("token", "first_token_s", "anchor", "due_s"),
    [
        (1, None, Anchor.ENVELOPE, 10.5),
        (3, 10.1, Anchor.ENVELOPE, 10.6),  # the early first token buys slack
        (3, 10.1, Anchor.FIRST_TOKEN, 10.2),  # it starts the clock early
        (3, 10.9, Anchor.FIRST_TOKEN, 10.6),  # a late one does not start it late
    ],
)
def test_deadlines_by_number(
    token: int, first_token_s: float | None, anchor: Anchor, due_s: float
) -> None:
    slo = SLO(ttft_s=0.5, tpot_s=0.05)
    assert slo.deadline_s(token, 10.0, first_token_s, anchor) == pytest.approx(due_s)


def test_deadlines_where_an_objective_is_missing() -> None:
    assert SLO().deadline_s(1, 10.0) == inf
    assert SLO().deadline_s(7, 10.0, 11.0) == inf
    assert SLO(ttft_s=1).deadline_s(2, 10.0, 10.5) == inf, "no pace is promised"
    assert SLO(e2e_s=3).deadline_s(1, 10.0) == SLO(e2e_s=3).deadline_s(9, 10.0, 11.0) == 13.0
    assert SLO(tpot_s=0.1).deadline_s(1, 10.0) == inf
    for anchor in Anchor:  # without TTFT the pace can only start from the real first token
        assert SLO(tpot_s=0.1).deadline_s(3, 10.0, 12.0, anchor) == pytest.approx(12.2)
    assert SLO(ttft_s=1, tpot_s=1, e2e_s=2).deadline_s(9, 10.0, 10.5) == 12.0, "end to end caps"


@given(slo=slos, arrival_s=times, first_after_s=st.floats(0, 10), token=st.integers(1, 500))
def test_later_tokens_are_never_due_earlier(
    slo: SLO, arrival_s: float, first_after_s: float, token: int
) -> None:
    first_s = arrival_s + first_after_s
    for anchor in Anchor:
        # The first token's own deadline does not know when it came, so start from the second.
        due_s = [slo.deadline_s(i, arrival_s, first_s, anchor) for i in (token + 1, token + 2)]
        assert due_s[0] <= due_s[1]


@given(slo=slos, arrival_s=times, first_after_s=st.floats(0, 10), token=st.integers(1, 500))
def test_the_first_token_anchor_is_the_stricter_one(
    slo: SLO, arrival_s: float, first_after_s: float, token: int
) -> None:
    first_s = arrival_s + first_after_s
    strict = slo.deadline_s(token, arrival_s, first_s, Anchor.FIRST_TOKEN)
    assert strict <= slo.deadline_s(token, arrival_s, first_s, Anchor.ENVELOPE)


@given(slo=slos, arrival_s=times, early=st.floats(0, 5), token=st.integers(1, 500))
def test_the_envelope_does_not_depend_on_progress_where_a_ttft_is_stated(
    slo: SLO, arrival_s: float, early: float, token: int
) -> None:
    stated = SLO(ttft_s=1.0, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s)
    due_s = {stated.deadline_s(token, arrival_s, arrival_s + t) for t in (early, early + 1)}
    assert len(due_s) == 1


@pytest.mark.parametrize("value", [0, -1, inf, nan])
@pytest.mark.parametrize("field", ["ttft_s", "tpot_s", "e2e_s"])
def test_impossible_objectives_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be positive and finite"):
        SLO(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", [0, 11, 1.5, True])
def test_priorities_out_of_range_are_refused(priority: int) -> None:
    with pytest.raises(ValueError, match="an integer from 1 to 10"):
        SLO(priority=priority)


def test_gain_by_number() -> None:
    # Due at 1.0, 1.1, 1.2 and 1.3; the third token is late, the fourth exactly due is late too.
    clock = TokenClock(SLO(ttft_s=1.0, tpot_s=0.1, priority=2), 0.0, GainWeights(5.0, 1.0))
    for now_s in (0.5, 1.0, 1.25):
        clock.emit(1, now_s)
    clock.emit(1, 1.0 + 3 * 0.1)
    assert clock.ideal_gain == 2 * (5 + 1 + 1 + 1)
    assert clock.gain == 2 * (5 + 1)
    assert clock.ttft_s == 0.5
    assert clock.tpot_s == pytest.approx(0.8 / 3)


@given(
    slo=slos,
    gaps=st.lists(st.floats(0, 2), max_size=30),
    anchor=st.sampled_from(Anchor),
    batch=st.integers(1, 3),
)
def test_gain_is_between_nothing_and_the_ideal(
    slo: SLO, gaps: list[float], anchor: Anchor, batch: int
) -> None:
    clock = TokenClock(slo, 5.0, GainWeights(5.0, 1.0), anchor)
    now_s = 5.0
    for gap in gaps:
        now_s += gap
        clock.emit(batch, now_s)
    assert 0 <= clock.gain <= clock.ideal_gain
    tokens = batch * len(gaps)
    assert clock.tokens == tokens
    assert clock.ideal_gain == pytest.approx(slo.priority * (tokens + 4 if tokens else 0))


@given(slo=slos, gaps=st.lists(st.floats(0, 2), min_size=1, max_size=20), sooner=st.floats(0, 1))
def test_emitting_sooner_never_gains_less_under_the_envelope(
    slo: SLO, gaps: list[float], sooner: float
) -> None:
    stated = SLO(ttft_s=1.0, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s, priority=slo.priority)
    gains = []
    for factor in (1.0, sooner):
        clock = TokenClock(stated, 0.0)
        now_s = 0.0
        for gap in gaps:
            now_s += gap * factor
            clock.emit(1, now_s)
        gains.append(clock.gain)
    assert gains[1] >= gains[0]


def test_attainment() -> None:
    def run(slo: SLO, *emissions: float) -> bool:
        clock = TokenClock(slo, 0.0)
        for now_s in emissions:
            clock.emit(1, now_s)
        return clock.attained(emissions[-1] if emissions else 0.0)

    assert run(SLO(ttft_s=1, tpot_s=0.1), 0.9, 1.0, 1.05)
    assert not run(SLO(ttft_s=1, tpot_s=0.1), 1.1, 1.2)
    assert not run(SLO(ttft_s=1, tpot_s=0.1), 0.1, 0.4, 0.5), "0.2 s a token in the mean"
    assert not run(SLO(e2e_s=1), 0.5, 1.5)
    assert run(SLO(tpot_s=0.1), 9.0), "one token has no pace to miss"
    assert run(SLO())
    assert not run(SLO(ttft_s=1)), "no token, no attainment"


def test_a_request_lasts_until_its_last_token_whatever_the_clock_says_at_its_end() -> None:
    """What an engine told afterwards of its tokens may be later than the end that was seen."""
    clock = TokenClock(SLO(e2e_s=1.0), 5.0)
    clock.emit(1, 5.5)
    clock.emit(1, 6.25)
    assert (clock.e2e_s(6.5), clock.e2e_s(5.9)) == (1.5, 1.25)
    assert clock.missed(5.9) == clock.missed(6.5) == ("e2e",)
    assert not clock.attained(5.9)


@given(queue=queues(), anchor=st.sampled_from(Anchor))
def test_the_compiled_rule_is_that_of_the_views(queue: QueueView, anchor: Anchor) -> None:
    # Also of requests whose first or last token's time nobody knows.
    views = [
        view._replace(first_token_s=None, last_token_s=None) if index % 3 == 2 else view
        for index, view in enumerate(queue.requests)
    ]
    views.append(decode("recomputes")._replace(pending_tokens=2))
    table = QueueView(views).table
    expected = [
        v.slo.deadline_s(v.emitted_tokens + 1, v.arrival_s, v.first_token_s, anchor, v.last_token_s)
        for v in views
    ]
    assert kernels.deadlines_s(table, anchor.code).tolist() == pytest.approx(expected)
    assert kernels.is_prefill(table).tolist() == [view.is_prefill for view in views]


def test_a_group_of_tokens_has_a_pace_for_each_of_them_since_the_token_before() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)

    def gain(gap_s: float, tokens: int) -> float:
        clock = TokenClock(slo, 0.0, anchor=Anchor.LAST_TOKEN)
        clock.emit(1, 0.5)
        clock.emit(tokens, 0.5 + gap_s)
        return clock.gain - 1

    assert [gain(0.29, 3), gain(0.31, 3), gain(0.09, 1), gain(0.11, 1)] == [3, 0, 1, 0]


def test_the_rest_of_a_stream_is_due_when_the_objective_says() -> None:
    clock = TokenClock(SLO(ttft_s=1.0, tpot_s=0.5), 100.0)
    assert clock.rest(10, 103.0) == SLO(ttft_s=6.0, tpot_s=0.5), "the eleventh token's deadline"
    assert clock.rest(10, 130.0).ttft_s == 31.0, "late already: as soon as a new request's"
    assert TokenClock(SLO(ttft_s=1.0), 100.0).rest(10, 130.0).ttft_s == 31.0
    assert TokenClock(SLO(), 100.0).rest(10, 130.0) == SLO()
