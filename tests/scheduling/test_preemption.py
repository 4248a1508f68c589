import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.preemption import (
    MIN_GAP_SHARE,
    REMEMBERED_S,
    USABLE,
    AgedShare,
    DecodeTurns,
    InFlight,
    Prefill,
    TaskBounds,
    decide,
    decode_step_due_s,
)

BOUNDS = TaskBounds(chunk_tokens=1000, small_chunk_tokens=100, batch_tokens=400)
S_PER_TOKEN = 0.001

seconds = st.floats(0, 20).map(lambda value: round(value, 3))
tokens = st.integers(1, 3000)


@st.composite
def queues(draw, most=12):
    made = []
    for index in range(draw(st.integers(0, most))):
        count = draw(tokens)
        due_s = draw(seconds | st.just(math.inf))
        ttft_s = draw(st.sampled_from([1.0, 5.0])) if due_s < math.inf else math.inf
        alone_s, free = count * S_PER_TOKEN, draw(st.booleans())
        made.append(Prefill(f"r{index}", due_s, count, alone_s, free, ttft_s))
    return made


tops = st.none() | st.builds(InFlight, seconds | st.just(math.inf), seconds, st.booleans())


def together_s(members):
    return sum(each.alone_s for each in members)


def chosen(waiting, top, now_s, bounds=BOUNDS, **options):
    return decide(waiting, top, now_s, together_s, bounds, **options)


def late(each, now_s):
    return each.due_s - now_s - each.alone_s < 0


def feasible(batch, waiting, now_s):
    """Whether the head can still meet its deadline."""
    (head,) = (each for each in waiting if each.request_id == batch.members[0][0])
    assert head.due_s == batch.due_s
    return not late(head, now_s)


@given(queues(), tops, seconds)
def test_a_task_holds_waiting_prefills_once_within_its_bounds(waiting, top, now_s):
    batch = chosen(waiting, top, now_s)
    if batch is None:
        assert not waiting or top is not None
        return
    pending = {each.request_id: each.tokens for each in waiting}
    names = [name for name, _ in batch.members]
    assert len(set(names)) == len(names)
    assert all(1 <= count <= pending[name] for name, count in batch.members)
    total = sum(count for _, count in batch.members)
    assert total <= BOUNDS.chunk_tokens
    if len(names) > 1 and feasible(batch, waiting, now_s) and total >= BOUNDS.batch_tokens:
        by_name = {each.request_id: each for each in waiting}
        head, *joined = (by_name[name] for name in names)
        alike = [each for each in joined if each.ttft_s <= head.ttft_s and not late(each, now_s)]
        assert head.tokens < BOUNDS.batch_tokens
        assert all(each.tokens < BOUNDS.batch_tokens for each in alike)
        # The others joined while the sum was small.
        rest = [each for each in joined if each not in alike]
        assert not rest or sum(each.tokens for each in rest) + head.tokens < BOUNDS.batch_tokens


@given(queues(), seconds)
def test_the_head_is_the_feasible_one_with_the_earliest_deadline(waiting, now_s):
    """Of the guaranteed ones, where there are some."""
    batch = chosen(waiting, None, now_s)
    first = [each for each in waiting if not each.best_effort] or waiting
    in_time = [each for each in first if not late(each, now_s)]
    if not waiting:
        assert batch is None
    elif in_time:
        assert batch.due_s == min(each.due_s for each in in_time)
        assert feasible(batch, waiting, now_s)
    else:
        assert batch.due_s == max(each.due_s for each in first)
        assert not feasible(batch, waiting, now_s)


@given(queues(), tops.filter(bool), seconds)
def test_only_a_feasible_and_more_urgent_one_preempts_one_of_its_tier(waiting, top, now_s):
    batch = chosen(waiting, top, now_s)
    if batch is not None and batch.best_effort == top.best_effort:
        assert feasible(batch, waiting, now_s)
        if top.due_s - now_s - top.left_s >= 0:
            assert batch.due_s < top.due_s


@given(queues(), tops, seconds)
def test_what_has_no_guarantee_neither_stops_nor_precedes_what_has_one(waiting, top, now_s):
    batch = chosen(waiting, top, now_s)
    guaranteed = {each.request_id for each in waiting if not each.best_effort}
    if batch is None:
        assert not waiting or top is not None
        assert top is None or not (top.best_effort and guaranteed)
        return
    names = {name for name, _ in batch.members}
    if batch.best_effort:
        assert not guaranteed
        assert top is None or top.best_effort
    else:
        assert names <= guaranteed


def test_a_late_guaranteed_prefill_comes_before_one_without_a_guarantee():
    promised = Prefill("promised", 1.0, 2000, 2.0)
    free = Prefill("free", math.inf, 10, 0.01, best_effort=True)
    assert chosen([free, promised], None, 5.0).members == (("promised", 1000),)
    assert chosen([free], InFlight(1.0, 2.0), 5.0) is None
    assert chosen([promised], InFlight(math.inf, 2.0, best_effort=True), 5.0) is not None


@given(queues(), seconds)
def test_who_joins_leaves_the_head_its_deadline(waiting, now_s):
    batch = chosen(waiting, None, now_s)
    if batch is not None and feasible(batch, waiting, now_s) and len(batch.members) > 1:
        alone = {each.request_id: each.alone_s for each in waiting}
        assert now_s + sum(alone[name] for name, _ in batch.members) < batch.due_s


@given(queues(), tops, seconds)
def test_the_same_again_changes_nothing(waiting, top, now_s):
    """What was started does not preempt itself, nor does what was left preempt it."""
    batch = chosen(waiting, top, now_s)
    if batch is None or not feasible(batch, waiting, now_s):
        return
    started = {name for name, _ in batch.members}
    rest = [each for each in waiting if each.request_id not in started]
    head = next(each for each in waiting if each.request_id == batch.members[0][0])
    top = InFlight(batch.due_s, head.alone_s, batch.best_effort)
    assert chosen(rest, top, now_s) is None


def test_late_prefills_run_together():
    waiting = [Prefill(f"r{index}", 1.0, 300, 0.3) for index in range(5)]
    assert [name for name, _ in chosen(waiting, None, 5.0).members] == ["r0", "r1", "r2"]
    free = [
        each._replace(request_id=f"free {index}", best_effort=True)
        for index, each in enumerate(waiting)
    ]
    assert len(chosen([waiting[0], *free], None, 5.0).members) == 1


def test_without_batching_every_task_is_one_prefill():
    waiting = [Prefill(f"r{index}", 10.0 + index, 10, 0.01) for index in range(5)]
    alone = replace(BOUNDS, batch_tokens=0)
    assert chosen(waiting, None, 0.0, alone).members == (("r0", 10),)
    assert len(chosen(waiting, None, 0.0).members) == 5


def test_short_prefills_with_one_objective_run_together_up_to_a_chunk():
    """Whatever arrives with their objective would wait for them. With a longer one, or late ones,
    or where they are long, the sum stays below ``together``."""

    def joined(**changes):
        first = Prefill("head", 10.0, 300, 0.3, ttft_s=1.0)
        others = [Prefill(f"r{index}", 10.1, 300, 0.3, ttft_s=1.0) for index in range(4)]
        waiting = [first, *(each._replace(**changes) for each in others)]
        return len(chosen(waiting, None, 8.5).members)

    assert joined() == 3  # 1000 tokens
    assert joined(due_s=10.0, alone_s=0.7) == 2  # 1.5 s of slack
    assert joined(tokens=400) == 1
    assert joined(ttft_s=1.1) == 1
    assert joined(due_s=8.7) == 1


def test_what_could_not_be_suspended_runs_in_small_chunks():
    waiting = [Prefill("long", 10.0, 2000, 2.0)]
    assert chosen(waiting, None, 0.0).members == (("long", 1000),)
    assert chosen(waiting, None, 0.0, full=True).members == (("long", 100),)
    assert chosen(waiting, None, 0.0, max_tokens=300).members == (("long", 300),)


def test_no_slack_is_spent_on_prefills_without_a_deadline():
    waiting = [
        Prefill("head", 10.0, 10, 0.01),
        Prefill("promised", 11.0, 10, 0.01),
        Prefill("free", math.inf, 10, 0.01),
        Prefill("free too", math.inf, 10, 0.01),
    ]
    assert chosen(waiting, None, 0.0).members == (("head", 10), ("promised", 10))
    assert chosen(waiting[2:], None, 0.0).members == (("free", 10), ("free too", 10))


@given(
    patience_s=st.floats(0.5, 30),
    share=st.floats(0.01, 0.5),
    chunks=st.integers(1, 20),
    chunk_s=st.floats(0.01, 1),
    task_s=st.floats(0.01, 1),
)
def test_who_has_waited_long_is_done_within_its_share(patience_s, share, chunks, chunk_s, task_s):
    """More urgent tasks come one after the other without an end."""
    lane = AgedShare(patience_s, share)
    now_s, left = 0.0, chunks
    while left:
        if lane.has_turn(0.0, chunk_s, now_s):
            left -= 1
            now_s += chunk_s
        else:
            now_s += task_s
    work_s = chunks * chunk_s
    assert patience_s < now_s <= patience_s + work_s / share + (chunks + 1) * (task_s + chunk_s)
    # And those that are more urgent keep the rest.
    assert work_s <= share * (now_s - patience_s) + chunk_s


def test_nobody_has_a_turn_before_the_patience_is_over():
    lane = AgedShare(10.0, 0.5)
    assert not any(lane.has_turn(0.0, 0.01, now_s) for now_s in (0.0, 5.0, 10.0))
    assert not lane.has_turn(0.0, 0.01, 10.1)  # nothing was earned yet
    assert lane.has_turn(0.0, 0.01, 10.2)
    assert not lane.has_turn(10.0, 0.01, 10.3)  # another one, which has not waited


STEP_S, GAP_S = 0.02, 0.05
MODEL = LinearLatency(a=0.006, b=4e-4)


def due_s(*decodes, stop_s=0.0):
    """Of decodes ``(first token, emitted, last token, TPOT)``."""
    first_s, emitted, last_s, tpot_s = np.array(decodes, float).reshape(-1, 4).T
    return decode_step_due_s(first_s, emitted, last_s, tpot_s, STEP_S, GAP_S, stop_s)


SHARE_S = MIN_GAP_SHARE * STEP_S


@pytest.mark.parametrize(
    ("decodes", "stop_s", "expected_s"),
    [
        pytest.param([(1.0, 1, 1.0, 0.1)], 0.0, 1.07, id="most of a TPOT after its last token"),
        pytest.param([(1.0, 1, 1.0, 0.2), (1.02, 1, 1.02, 0.1)], 0.0, 1.09, id="the earliest"),
        pytest.param([(0.0, 50, 1.0, 0.1)], 0.0, 1.07, id="far ahead: its lead is kept"),
        pytest.param([(0.0, 10, 0.92, 0.1)], 0.0, 0.972, id="behind: most of the time left"),
        pytest.param([(0.0, 10, 1.2, 0.1)], 0.0, 1.2 + SHARE_S, id="late: after a share"),
        pytest.param([(math.nan, 9, 1.0, 0.1)], 0.0, 1.07, id="one that makes nothing up"),
        pytest.param([(1.0, 1, 1.0, math.inf)], 0.0, 1.05, id="no TPOT: the gap"),
        pytest.param([(1.0, 1, 1.0, math.nan)], 0.0, 1.05, id="an unknown TPOT: the gap"),
        pytest.param([(1.0, 1, 1.0, 0.02)], 0.0, 1.05, id="a TPOT that no step can hold"),
        pytest.param([(1.0, 1, 1.0, 0.1)], 0.01, 1.06, id="earlier by the stop"),
        pytest.param([(1.0, 1, 1.0, 0.03)], 0.02, 1.0 + SHARE_S, id="a stop longer than the rest"),
        pytest.param([], 0.0, None, id="no decodes"),
    ],
)
def test_a_step_of_decodes_is_due_by_their_own_tpot(decodes, stop_s, expected_s):
    assert due_s(*decodes, stop_s=stop_s) == pytest.approx(expected_s)


@given(
    st.floats(1.3, 10.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    st.floats(0.0, 1.0),
)
def test_late_steps_do_not_add_up(paces, overruns, planned):
    """If each step by itself could come in time, no token is later than the latest of them was."""
    tpot_s = paces * STEP_S
    most_s = tpot_s - STEP_S - SHARE_S
    stop_s = planned * most_s
    late_s = [each * (most_s - stop_s) for each in overruns]
    now_s = 0.0
    for emitted, each_s in enumerate(late_s, start=1):
        begins_s = due_s((0.0, emitted, now_s, tpot_s), stop_s=stop_s)
        assert begins_s >= now_s + SHARE_S - 1e-9
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


def max_tokens(turns, *tpots_s, step_s=STEP_S, computed=0, least=256, now_s=0.0, **gap):
    return turns.max_tokens(np.array(tpots_s), step_s, MODEL, computed, least, now_s, **gap)


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
    most = max_tokens(turns, *tpots_s, computed=computed, least=least)
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
    unbounded = max_tokens(turns)
    assert unbounded > 1_000_000
    bounded = max_tokens(turns, 0.1, 0.5, now_s=1.0)
    assert bounded < 3_000
    assert max_tokens(turns, 0.5, now_s=2.0) == max_tokens(turns, now_s=3.0) == bounded
    assert bounded < max_tokens(turns, 0.5, now_s=2.0 + REMEMBERED_S) < unbounded
    assert max_tokens(turns, now_s=3.0 + 2 * REMEMBERED_S) == unbounded


def test_a_task_is_bounded_before_a_decode_comes():
    turns = DecodeTurns(40)
    bounded = max_tokens(turns, gap_s=0.1)
    assert bounded == max_tokens(DecodeTurns(40), 0.1)
    assert max_tokens(turns, gap_s=0.001) == max_tokens(DecodeTurns(40), 2 * STEP_S)
    assert max_tokens(turns, 0.06, gap_s=0.1) < bounded
    assert max_tokens(DecodeTurns(40), 0.5, gap_s=0.1) == bounded
    assert max_tokens(DecodeTurns(40), 0.5) > bounded


def test_tasks_that_cannot_stop_are_not_bounded_by_their_stops():
    assert max_tokens(DecodeTurns(0), 0.1) > 1_000_000
