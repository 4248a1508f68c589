"""When garbage is collected, with the clock in the test's hand, and that Python's own collector
stays out of the way meanwhile."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.local_scheduler import GarbageCollector
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from tests.scheduling.views import decode, prefill, queue_of, queues

PACED = SLO(ttft_s=1.0, tpot_s=0.1)
STEP_S = 0.03


class Process:
    """A process whose collections take ``pause_s``, just after one."""

    def __init__(self, monkeypatch, pause_s=0.01):
        self.now_s, self.pause_s, self.collections = 0.0, pause_s, 0
        monkeypatch.setattr(gc, "collect", self.collect)
        for name in ("disable", "freeze"):
            monkeypatch.setattr(gc, name, lambda: None)
        self.collector = GarbageCollector(lambda: self.now_s)
        self.collector.before_batch(QueueView(), STEP_S)
        assert self.collects(5.01, lambda now_s: queue_of())  # its pause counts from now on

    def collect(self):
        self.collections += 1
        self.now_s += self.pause_s

    def collects(self, since_s, queue, step_s=STEP_S):
        """Whether garbage is collected before a batch of ``queue(now_s)``, after ``since_s``."""
        self.now_s, before = self.now_s + since_s, self.collections
        self.collector.before_batch(queue(self.now_s), step_s)
        return self.collections > before


def decoding(due_in_s):
    """A queue of one decode whose next token is due in ``due_in_s``."""

    def queue(now_s):
        first_s = now_s + due_in_s - PACED.tpot_s
        return queue_of(decode("d", PACED, arrival_s=first_s - 0.5, first_token_s=first_s))

    return queue


def always(*views):
    return lambda now_s: queue_of(*views)


@pytest.mark.parametrize(
    ("since_s", "queue", "collects"),
    [
        (4.9, always(), False),
        (5.01, always(), True),
        (5.01, always(decode("free")), True),
        (5.01, always(prefill("waits", 10)), False),
        (5.01, always(decode("free"), prefill("begun", 10, computed=5)), False),
        # 30 ms of the slack go to the batch itself; four times 10 ms must be left.
        (5.01, decoding(0.071), True),
        (5.01, decoding(0.069), False),
        (5.01, decoding(-1.0), False),
        (59.9, decoding(-1.0), False),
        (60.01, decoding(-1.0), True),
        (60.01, always(prefill("waits", 10)), True),
    ],
)
def test_a_collection_waits_for_slack_but_at_most_a_minute(since_s, queue, collects, monkeypatch):
    assert Process(monkeypatch).collects(since_s, queue) is collects


def test_the_last_pause_says_how_much_slack_is_enough(monkeypatch):
    process = Process(monkeypatch, pause_s=0.08)
    assert not process.collects(5.01, decoding(0.2))
    assert process.collects(0.2, decoding(0.5))


@given(queues(), st.floats(0, 200), st.floats(0, 1))
def test_never_twice_in_a_short_time_and_always_within_a_long_one(queue, since_s, step_s):
    with pytest.MonkeyPatch.context() as patch:
        collects = Process(patch).collects(since_s, lambda now_s: queue, step_s)
    assert not (collects and since_s < 4.99)
    assert collects or since_s < 60.01


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
        for time_s in (101.0, 105.0, 159.9):
            times_s.append(time_s)
            collector.before_batch(busy, STEP_S)
            assert Cycle.made == 2000
        times_s.append(160.0)
        collector.before_batch(busy, STEP_S)
        assert Cycle.made == 0
    finally:
        collector.stop()
    assert gc.isenabled()
    collector.stop()
    assert gc.isenabled()
