"""The three anchors of TPOT: by example, against their definitions, and what holds between them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request.objective import (
    SLO,
    WINDOW_TOKENS,
    Anchor,
    TokenClock,
    TPOTAnchor,
    TPOTMeter,
    tpot_s,
)

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


def test_a_pause_at_the_start() -> None:
    # The second token comes late, and the rest makes up for it.
    times = times_of([0.2] + [0.01] * 40)
    assert of_times(times, MEAN) == pytest.approx(0.6 / 41)
    assert of_times(times, RUNNING_MAX) == pytest.approx(0.2)
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
    assert len(of_groups(chunks, WINDOW)._ends) <= WINDOW_TOKENS + 1


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


def test_neither_a_window_nor_the_running_maximum_bounds_the_other() -> None:
    early, late = times_of([0.2] + [0.01] * 30), times_of([0.01] * 30 + [0.2])
    assert of_times(early, WINDOW) < of_times(early, RUNNING_MAX)
    assert of_times(late, WINDOW) > of_times(late, RUNNING_MAX)


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
