"""Completion windows: the demand test, and what is left of the engines' time."""

from __future__ import annotations

from itertools import accumulate
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.placement.windows import (
    SLOT_S,
    SPANS_S,
    Leftover,
    Promised,
    SpareTime,
    behind_until_s,
    nearest_window_s,
)

seconds = st.floats(0.0, 3_000.0)
batches = st.lists(st.builds(Promised, seconds, seconds), max_size=6)
spares = st.lists(st.floats(0.0, 1.0), min_size=len(SPANS_S) - 1, max_size=len(SPANS_S) - 1).map(
    lambda rates: (
        0.0,
        *accumulate(
            rate * (after - before)
            for rate, before, after in zip(rates, SPANS_S, SPANS_S[1:], strict=False)
        ),
    )
)


def late(promised: list[Promised], spare: tuple[float, ...]) -> list[float]:
    """The deadlines that batches miss that run one after another, the earliest deadline first."""
    missed, done_s = [], 0.0
    for due_in_s, work_s in sorted(promised):
        done_s += work_s
        if work_s and done_s > np.interp(due_in_s, SPANS_S, spare) * (1 + 1e-9) + 1e-6:
            missed.append(due_in_s)
    return missed


@given(batches, seconds, spares)
def test_the_nearest_window_is_kept_and_makes_no_batch_late_that_was_not(
    promised: list[Promised], work_s: float, spare: tuple[float, ...]
) -> None:
    nearest_s = nearest_window_s(promised, work_s, spare)
    if nearest_s == inf:
        return
    for window_s in (nearest_s * (1 + 1e-9) + 1e-6, nearest_s + 10.0, nearest_s + 1e5):
        for due_s in late([*promised, Promised(window_s, work_s)], spare):
            # It was late before, and all that is due by then comes first.
            assert due_s in late(promised, spare) and due_s < window_s


@given(batches, st.floats(1.0, 3_000.0), spares)
def test_no_nearer_window_could_be_promised(
    promised: list[Promised], work_s: float, spare: tuple[float, ...]
) -> None:
    nearest_s = min(nearest_window_s(promised, work_s, spare), 1e7)
    for share in (0.0, 0.5, 0.99):
        window_s = share * nearest_s - 1e-3
        if window_s > 0.0 and late([*promised, Promised(window_s, work_s + 1e-2)], spare) == []:
            pytest.fail(f"{window_s} could be promised")


@given(batches, spares)
def test_those_behind_are_up_to_the_last_one_that_is_late(
    promised: list[Promised], spare: tuple[float, ...]
) -> None:
    last_s = behind_until_s(promised, spare)
    missed = late(promised, spare)
    assert not missed or last_s >= max(missed)
    if last_s > -inf:
        assert any(each.due_in_s == last_s and each.work_s for each in promised)


def test_a_new_batch_goes_before_those_that_can_wait_and_behind_those_that_cannot() -> None:
    half = tuple(0.5 * span_s for span_s in SPANS_S)
    assert nearest_window_s([], 30.0, half) == 60.0
    assert nearest_window_s([Promised(1_000.0, 100.0)], 30.0, half) == 60.0
    assert nearest_window_s([Promised(200.0, 90.0)], 30.0, half) == 240.0
    assert nearest_window_s([Promised(200.0, 90.0), Promised(300.0, 60.0)], 1.0, half) == 302.0
    assert nearest_window_s([], 1.0, (0.0,) * len(SPANS_S)) == inf


def noted(*ready: float, level: float = 0.9) -> SpareTime:
    spare = SpareTime(level)
    for number, replicas in enumerate(ready):
        spare.note(Load(number * SLOT_S, replicas))
    return spare


def test_what_is_left_is_what_most_spans_of_the_day_had() -> None:
    assert noted(1.0).within() is None
    # Replicas that have not started yet do not count as a time without any.
    assert noted(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0).within() == pytest.approx(SPANS_S)
    steady = noted(*[2.0] * 41).within()
    assert steady is not None
    assert steady == pytest.approx([2.0 * span_s for span_s in SPANS_S])
    # Every other slot has none: short spans may find nothing, long ones half.
    wavy = noted(*[1.0, 1.0, 0.0, 0.0] * 40).within()
    assert wavy is not None
    assert wavy[1] == 0.0
    assert wavy[7] / SPANS_S[7] == pytest.approx(0.25, abs=0.05)
    assert list(wavy) == sorted(wavy)


def test_promised_work_and_long_silence_leave_less() -> None:
    spare = SpareTime(0.9)
    spare.note(Load(0.0, 1.0))
    spare.note(Load(10.0, 1.0, asked=5.0, asked_s=4.0))
    assert spare.within() == pytest.approx([0.6 * span_s for span_s in SPANS_S])
    spare.note(Load(1e7, 0.0, asked=5.0, asked_s=4.0))
    assert spare.within() == pytest.approx([0.0] * len(SPANS_S))


def test_parts_of_a_fleet_add_up() -> None:
    parts = [Leftover(1.0, (0.0, 1.0)), Leftover(2.0, (0.0, 3.0))]
    assert Leftover.of(parts) == Leftover(2.0, (0.0, 4.0))
    assert Leftover.of([]) is None
