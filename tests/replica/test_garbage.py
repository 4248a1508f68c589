"""When garbage is collected, with the clock in the test's hand, and that Python's own collector
stays out of the way meanwhile."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.vllm.gc_control import (
    LEAST_INTERVAL_S,
    MOST_INTERVAL_S,
    CollectionRule,
    GarbageCollector,
)
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from tests.scheduling.views import decode, prefill, queue_of, queues

PACED = SLO(ttft_s=1.0, tpot_s=0.1)
STEP_S = 0.03


def rule(pause_s=0.01):
    return CollectionRule(0.0, least_s=5.0, most_s=60.0, pause_s=pause_s)


def decoding(due_in_s, now_s):
    """A queue of one decode whose next token is due ``due_in_s`` after ``now_s``."""
    first_s = now_s + due_in_s - PACED.tpot_s
    return queue_of(decode("d", PACED, arrival_s=first_s - 0.5, first_token_s=first_s))


@pytest.mark.parametrize(
    ("now_s", "queue", "due"),
    [
        (4.9, queue_of(), False),
        (5.0, queue_of(), True),
        (5.0, queue_of(decode("free")), True),
        (5.0, queue_of(prefill("waits", 10)), False),
        (5.0, queue_of(decode("free"), prefill("begun", 10, computed=5)), False),
        # 30 ms of the slack go to the batch itself; four times 10 ms must be left.
        (5.0, decoding(0.071, 5.0), True),
        (5.0, decoding(0.069, 5.0), False),
        (5.0, decoding(-1.0, 5.0), False),
        (59.9, decoding(-1.0, 59.9), False),
        (60.0, decoding(-1.0, 60.0), True),
        (60.0, queue_of(prefill("waits", 10)), True),
    ],
)
def test_a_collection_waits_for_calm_but_not_for_ever(now_s, queue, due):
    assert rule().due(now_s, queue, STEP_S) is due


def test_the_last_pause_says_how_much_slack_is_ample():
    tried = rule()
    assert tried.due(5.0, decoding(0.2, 5.0), STEP_S)
    tried.collected(5.0, 5.08)
    assert not tried.due(10.0, decoding(0.2, 10.0), STEP_S)
    assert not tried.due(10.2, decoding(0.2, 10.2), STEP_S)
    assert tried.due(10.2, decoding(0.5, 10.2), STEP_S)


@given(queues(), st.floats(0, 200), st.floats(0, 1))
def test_never_twice_in_a_short_time_and_always_within_a_long_one(queue, now_s, step_s):
    due = rule().due(now_s, queue, step_s)
    assert not (due and now_s < 5.0)
    assert due or now_s < 60.0


@pytest.mark.parametrize("limits", [(-1.0, 1.0), (2.0, 1.0)])
def test_impossible_intervals_are_refused(limits):
    with pytest.raises(ValueError, match="least_s <= most_s"):
        CollectionRule(0.0, *limits)


class Cycle:
    """Unreachable as soon as it is made, but only for a collector."""

    made = 0

    def __init__(self):
        self.me = self
        Cycle.made += 1

    def __del__(self):
        Cycle.made -= 1


def test_garbage_is_kept_until_it_is_time_and_pythons_collector_comes_back():
    times_s = [100.0]
    collector = GarbageCollector(lambda: times_s[-1])
    collector.before_batch(QueueView(), STEP_S)
    try:
        assert not gc.isenabled()
        for _ in range(2000):
            Cycle()
        busy = queue_of(prefill("waits", 10))
        for time_s in (101.0, 100.0 + LEAST_INTERVAL_S, 99.9 + MOST_INTERVAL_S):
            times_s.append(time_s)
            collector.before_batch(busy, STEP_S)
            assert Cycle.made == 2000
        times_s.append(100.0 + MOST_INTERVAL_S)
        collector.before_batch(busy, STEP_S)
        assert Cycle.made == 0
    finally:
        collector.stop()
    assert gc.isenabled()
    collector.stop()
    assert gc.isenabled()
