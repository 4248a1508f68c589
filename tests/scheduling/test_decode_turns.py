"""When steps of decodes come beside prefills that stop for them, and how long those may be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.preemption import (
    LEAST_GAP_SHARE,
    REMEMBERED_S,
    USABLE,
    DecodeTurns,
    decode_step_due_s,
)

STEP_S, GAP_S = 0.02, 0.05
NONE = np.empty(0)
MODEL = LinearLatency(a=0.006, b=4e-4)


def due_s(*decodes, stop_s=0.0):
    """Of decodes ``(first token, emitted, last token, TPOT)``."""
    first_s, emitted, last_s, tpot_s = np.array(decodes, float).reshape(-1, 4).T
    return decode_step_due_s(first_s, emitted, last_s, tpot_s, STEP_S, GAP_S, stop_s)


@pytest.mark.parametrize(
    ("decodes", "expected_s"),
    [
        ([(1.0, 1, 1.0, 0.1)], 1.07),  # most of a TPOT after its last token, with the step
        ([(1.0, 1, 1.0, 0.2), (1.02, 1, 1.02, 0.1)], 1.09),  # of several the earliest
        ([(0.0, 50, 1.0, 0.1)], 1.07),  # far ahead: the same, and its lead is kept
        ([(0.0, 10, 0.92, 0.1)], 0.972),  # a bit behind: most of the time until it is due
        ([(0.0, 10, 1.2, 0.1)], 1.205),  # late: soon, after a share for prefills
        ([(math.nan, 9, 1.0, 0.1)], 1.07),  # one that makes nothing up
        ([(1.0, 1, 1.0, math.inf)], 1.05),  # no TPOT: the gap
        ([(1.0, 1, 1.0, math.nan)], 1.05),
        ([(1.0, 1, 1.0, 0.02)], 1.05),  # no step holds it
        ([], None),
    ],
)
def test_a_step_of_decodes_is_due_by_their_own_tpot(decodes, expected_s):
    assert due_s(*decodes) == pytest.approx(expected_s)


def test_a_prefill_is_stopped_for_decodes_before_their_step_is_due():
    assert due_s((1.0, 1, 1.0, 0.1), stop_s=0.01) == pytest.approx(1.06)


def test_a_tpot_that_a_step_can_hold_is_not_given_up_for_a_long_stop():
    """Stops are mostly shorter than is planned, and a step that was late is made up for."""
    assert due_s((1.0, 1, 1.0, 0.03), stop_s=0.02) == pytest.approx(1.0 + LEAST_GAP_SHARE * STEP_S)


@given(
    st.floats(1.3, 10.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    st.floats(0.0, 1.0),
)
def test_late_steps_do_not_add_up(paces, overruns, planned):
    """If each step by itself could come in time, no token is later than the latest of them was."""
    tpot_s = paces * STEP_S
    most_s = tpot_s - (1.0 + LEAST_GAP_SHARE) * STEP_S
    stop_s = planned * most_s
    late_s = [each * (most_s - stop_s) for each in overruns]
    now_s = 0.0
    for emitted, each_s in enumerate(late_s, start=1):
        begins_s = due_s((0.0, emitted, now_s, tpot_s), stop_s=stop_s)
        assert begins_s >= now_s + LEAST_GAP_SHARE * STEP_S - 1e-9
        now_s = begins_s + stop_s + each_s + STEP_S
        assert now_s <= emitted * tpot_s + max(late_s) + 1e-9


def test_steps_on_time_use_most_of_a_tpot():
    now_s, tpot_s = 0.0, 0.1
    for emitted in range(1, 100):
        now_s = due_s((0.0, emitted, now_s, tpot_s)) + STEP_S
    assert now_s == pytest.approx(99 * USABLE * tpot_s)


def test_the_planned_stop_is_twice_the_share_of_tasks_that_stops_took():
    turns = DecodeTurns(checks=40)
    assert turns.stop_s(1.0) == pytest.approx(2 / 40)
    turns.stopped(0.0, 0.0)  # nothing is known of such a task
    assert turns.stop_s(1.0) == pytest.approx(2 / 40)
    for _ in range(400):
        turns.stopped(0.1, 1.0)
        turns.stopped(0.0, 2.0)
    assert turns.stop_s(1.0) == pytest.approx(2 * 0.1 / 3, rel=0.01)
    assert turns.stop_s(0.1) == pytest.approx(0.2 * 0.1 / 3, rel=0.01)
    for _ in range(4_000):
        turns.stopped(1.0, 0.1)  # a task has ended by then
    assert turns.stop_s(1.0) < 2.0


def most_tokens(turns, *tpots_s, step_s=STEP_S, computed=0, least=256, now_s=0.0, **gap):
    return turns.most_tokens(np.array(tpots_s), step_s, MODEL, computed, least, now_s, **gap)


@given(
    st.integers(1, 500),
    st.lists(st.floats(0.001, 10.0), min_size=1, max_size=4),
    st.integers(0, 8_000),
    st.integers(1, 1_000),
)
def test_a_task_stops_within_half_of_what_a_step_leaves_of_the_tightest_tpot(
    checks, tpots_s, computed, least
):
    turns = DecodeTurns(checks)
    most = most_tokens(turns, *tpots_s, computed=computed, least=least)
    held = [each for each in tpots_s if each > STEP_S]
    if not held:
        assert most > 1_000_000
        return
    task_s = MODEL.step_s(StepSample.of([(most, computed)]))
    assert most >= least
    if most > least:
        # Not so short that the fixed time of a step is much of it.
        least_s = 10.0 * MODEL.fixed_s
        assert turns.stop_s(task_s) <= (min(held) - STEP_S) / 2 + 1e-9 or task_s <= least_s + 1e-9


def test_tasks_are_bounded_by_decodes_only_and_a_while_after():
    """A prefill pool has no decodes, and a decode may come while a task runs."""
    turns = DecodeTurns(40)
    unbounded = most_tokens(turns)
    assert unbounded > 1_000_000
    bounded = most_tokens(turns, 0.1, 0.5, now_s=1.0)
    assert bounded < 3_000
    assert most_tokens(turns, 0.5, now_s=2.0) == most_tokens(turns, now_s=3.0) == bounded
    assert bounded < most_tokens(turns, 0.5, now_s=2.0 + REMEMBERED_S) < unbounded
    assert most_tokens(turns, now_s=3.0 + 2 * REMEMBERED_S) == unbounded


def test_a_task_is_bounded_before_a_decode_comes():
    turns = DecodeTurns(40)
    bounded = most_tokens(turns, gap_s=0.1)
    assert bounded == most_tokens(DecodeTurns(40), 0.1)
    assert most_tokens(turns, gap_s=0.001) == most_tokens(DecodeTurns(40), 2 * STEP_S)
    assert most_tokens(turns, 0.06, gap_s=0.1) < bounded
    assert most_tokens(DecodeTurns(40), 0.5, gap_s=0.1) == bounded
    assert most_tokens(DecodeTurns(40), 0.5) > bounded


def test_tasks_that_cannot_stop_are_not_bounded_by_their_stops():
    assert most_tokens(DecodeTurns(0), 0.1) > 1_000_000
