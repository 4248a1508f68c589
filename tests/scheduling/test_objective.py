"""Deadlines with both anchors, the token gain, and attainment."""

import pickle
from itertools import accumulate
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request import kernels
from sluice.scheduling.request.objective import (
    SLO,
    WINDOW_TOKENS,
    Anchor,
    GainWeights,
    TokenClock,
    TPOTAnchor,
    TPOTMeter,
    tpot_s,
)
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


@given(slo=slos, arrival_s=times, after_s=st.floats(0, 10), token=st.integers(1, 500))
def test_deadlines_ascend_and_the_envelope_is_loose_and_fixed(
    slo: SLO, arrival_s: float, after_s: float, token: int
) -> None:
    first_s = arrival_s + after_s
    for anchor in Anchor:
        # The first token's own deadline does not know when it came, so start from the second.
        due_s = [slo.deadline_s(i, arrival_s, first_s, anchor) for i in (token + 1, token + 2)]
        assert due_s[0] <= due_s[1]
    strict = slo.deadline_s(token, arrival_s, first_s, Anchor.FIRST_TOKEN)
    assert strict <= slo.deadline_s(token, arrival_s, first_s, Anchor.ENVELOPE)
    stated = SLO(ttft_s=1.0, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s)
    due_s = [stated.deadline_s(token, arrival_s, first_s + later_s) for later_s in (0, 1)]
    assert due_s[0] == due_s[1], "with a TTFT it does not depend on progress"


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
    assert (clock.earned.first_ideal, clock.earned.later_ideal) == (2 * 5, 2 * 3)
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
    ideal = clock.earned.first_ideal + clock.earned.later_ideal
    assert 0 <= clock.gain <= ideal
    tokens = batch * len(gaps)
    assert clock.tokens == tokens
    assert ideal == pytest.approx(slo.priority * (tokens + 4 if tokens else 0))


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


MEAN, RUNNING_MAX, WINDOW = TPOTAnchor

gaps = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=60)
groups = st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 14)), min_size=1, max_size=20)


def times_of(gaps_s: list[float], first_s: float = 5.0) -> list[float]:
    return list(accumulate(gaps_s, initial=first_s))


def of_times(times_s: list[float], anchor: TPOTAnchor) -> float:
    found = tpot_s(np.array(times_s), anchor)
    assert found is not None
    return found


def of_groups(chunks: list[tuple[float, int]], anchor: TPOTAnchor) -> TPOTMeter:
    """A meter after chunks, each with the time since the one before and its tokens."""
    meter, now_s = TPOTMeter(anchor), 5.0
    for gap_s, tokens in chunks:
        now_s += gap_s
        meter.emit(tokens, now_s)
    return meter


def by_definition(times_s: list[float], anchor: TPOTAnchor) -> float:
    """From all times at once, as the anchors are defined."""
    mean = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    if anchor is MEAN:
        return mean
    if anchor is RUNNING_MAX:
        return max((t - times_s[0]) / i for i, t in enumerate(times_s) if i)
    ends = [i for i, t in enumerate(times_s) if i + 1 == len(times_s) or times_s[i + 1] != t]
    found = []
    for end in ends:
        before = [begin for begin in ends if begin <= end - WINDOW_TOKENS]
        if before:
            found.append((times_s[end] - times_s[before[-1]]) / (end - before[-1]))
    return max(found, default=mean)


def test_a_pause_in_the_middle() -> None:
    # The window is any ten tokens with the pause, the running maximum that of the token after it.
    times = times_of([0.01] * 20 + [0.2] + [0.01] * 20)
    assert of_times(times, MEAN) == pytest.approx(0.6 / 41)
    assert of_times(times, RUNNING_MAX) == pytest.approx(0.4 / 21)
    assert of_times(times, WINDOW) == pytest.approx(0.29 / 10)


def test_tokens_in_one_chunk() -> None:
    # 1, 5 and 5 tokens, 0.3 s apart: the second token was due one TPOT after the first.
    chunks = [(0.0, 1), (0.3, 5), (0.3, 5)]
    assert of_groups(chunks, MEAN).tpot_s == pytest.approx(0.06)
    assert of_groups(chunks, RUNNING_MAX).tpot_s == pytest.approx(0.3)
    assert of_groups(chunks, WINDOW).tpot_s == pytest.approx(0.06)
    # A fourth chunk: from the end of the second to its own end are ten tokens.
    assert of_groups([*chunks, (0.8, 5)], WINDOW).tpot_s == pytest.approx(1.1 / 10)
    # All at once is no time at all, and one token has no pace.
    for anchor in TPOTAnchor:
        assert of_groups([(0.3, 7)], anchor).tpot_s == 0.0
        assert of_groups([(0.3, 1)], anchor).tpot_s is None
        assert of_groups([], anchor).tpot_s is None


def test_times_of_two_clocks_do_not_run_backwards() -> None:
    for anchor in TPOTAnchor:
        meter = TPOTMeter(anchor)
        meter.emit(1, 5.0)
        meter.emit(1, 4.0)
        assert (meter.tpot_s, meter.last_token_s) == (0.0, 5.0)


@given(chunks=groups, anchor=st.sampled_from(TPOTAnchor), split=st.booleans())
def test_the_meter_agrees_with_the_definition(
    chunks: list[tuple[float, int]], anchor: TPOTAnchor, split: bool
) -> None:
    meter, now_s, times = TPOTMeter(anchor), 5.0, list[float]()
    for gap_s, tokens in chunks:
        now_s += gap_s
        # Whether tokens of one time are told together or one by one does not matter.
        for part in [1] * tokens if split else [tokens]:
            meter.emit(part, now_s)
            times += [now_s] * part
        if len(times) > 1:
            assert meter.tpot_s == by_definition(times, anchor)
    assert meter.tokens == len(times)
    assert tpot_s(np.array(times), anchor) == meter.tpot_s


@given(chunks=groups)
def test_the_meter_keeps_a_bounded_number_of_times(chunks: list[tuple[float, int]]) -> None:
    assert len(pickle.dumps(of_groups(chunks * 20, WINDOW))) < 700


@given(gaps_s=gaps)
def test_what_holds_between_the_anchors(gaps_s: list[float]) -> None:
    mean, running, window = (of_times(times_of(gaps_s), anchor) for anchor in TPOTAnchor)
    slowest = max(gaps_s) + 1e-9
    # The last token is one of those that the running maximum looks at.
    assert mean <= running <= slowest
    assert window <= slowest
    # Windows that tile the stream are its mean; the rest of less than a window may be slower.
    if len(gaps_s) % WINDOW_TOKENS == 0:
        assert mean <= window + 1e-9
    tiles = -(-len(gaps_s) // WINDOW_TOKENS) * WINDOW_TOKENS
    assert mean <= window * tiles / len(gaps_s) + 1e-9
    if len(gaps_s) <= WINDOW_TOKENS:
        assert window == mean


@given(share=st.lists(st.floats(0, 1), min_size=1, max_size=40), ttft_s=st.floats(0.1, 2.0))
def test_deadlines_from_the_first_token_keep_the_running_maximum_and_the_mean(
    share: list[float], ttft_s: float
) -> None:
    """Every token comes in time by the plan's deadline, early by any share of what is left."""
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    times = [ttft_s]
    for part in share:
        due_s = slo.deadline_s(len(times) + 1, 0.0, ttft_s, Anchor.FIRST_TOKEN)
        times.append(times[-1] + part * max(0.0, due_s - times[-1]))
    assert of_times(times, MEAN) <= of_times(times, RUNNING_MAX) <= 0.1 + 1e-9


def test_deadlines_from_the_first_token_do_not_keep_a_window() -> None:
    # Ten tokens at once, then ten at their deadlines: the plan has used slack that no window has.
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    times = [1.0] * 11 + [
        slo.deadline_s(token, 0.0, 1.0, Anchor.FIRST_TOKEN) for token in range(12, 22)
    ]
    assert of_times(times, RUNNING_MAX) <= 0.1 + 1e-9
    assert of_times(times, WINDOW) == pytest.approx(0.2)


@given(share=st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_deadlines_from_the_last_token_keep_every_anchor(share: list[float]) -> None:
    slo, times = SLO(ttft_s=1.0, tpot_s=0.1), [0.5]
    for part in share:
        due_s = slo.deadline_s(len(times) + 1, 0.0, 0.5, Anchor.LAST_TOKEN, times[-1])
        times.append(times[-1] + part * (due_s - times[-1]))
    for anchor in TPOTAnchor:
        assert of_times(times, anchor) <= 0.1 + 1e-9


@pytest.mark.parametrize(("anchor", "missed"), [(MEAN, ()), (RUNNING_MAX, ()), (WINDOW, ("tpot",))])
def test_the_clock_judges_by_the_anchor_that_the_objective_states(
    anchor: TPOTAnchor, missed: tuple[str, ...]
) -> None:
    clock = TokenClock(SLO(ttft_s=6.0, tpot_s=0.02, tpot_anchor=anchor), 0.0)
    times = times_of([0.01] * 20 + [0.2] + [0.01] * 20)
    for time_s in times:
        clock.emit(1, time_s)
    assert clock.missed(times[-1]) == missed
    assert clock.attained(times[-1]) == (not missed)
    assert clock.tpot_s == of_times(times, anchor)
    assert clock.mean_tpot_s == of_times(times, MEAN)


def test_an_unknown_anchor_is_refused() -> None:
    assert SLO(tpot_anchor="window").tpot_anchor is WINDOW  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of mean, running_max, window, got 'max'"):
        SLO(tpot_anchor="max")  # type: ignore[arg-type]
