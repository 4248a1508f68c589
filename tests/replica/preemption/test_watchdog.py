"""The watchdog over the worker's progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.stats import StalledError, TaskWatchdog
from tests.replica.preemption.waits import spread

LIMIT_S = 10.0


@given(st.lists(st.tuples(st.floats(0.0, 9.9), st.integers(1, 3), st.integers(0, 3))))
def test_it_raises_only_where_nothing_has_changed_for_the_limit(looks):
    now_s, since_s, last = 0.0, 0.0, None
    watchdog = TaskWatchdog(LIMIT_S, clock=lambda: now_s)
    for pause_s, task, reached in looks:
        now_s += pause_s
        if (task, reached) != last:
            last, since_s = (task, reached), now_s
        if now_s - since_s >= LIMIT_S:
            with pytest.raises(StalledError, match=f"no progress with task {task} for 10 s"):
                watchdog.look(task, reached)
        else:
            assert watchdog.look(task, reached) == pytest.approx(since_s + LIMIT_S - now_s)


def test_overheads_are_told_with_the_interval_of_their_median():
    """Of 10 pairs, the sign test leaves out one at each end: 2 * 11 / 1024 is below 5 %, and
    2 * 56 / 1024 above."""
    ratios = iter([1.0, 1.0, 1.5, 0.9, 1.2, 1.1, 1.0, 1.3, 0.8, 1.4, 1.25, 0.95])
    found = spread(10, lambda: next(ratios), lambda: 1.0)  # the first one warms up
    assert (found["median"], found["interval"]) == (0.15, [-0.1, 0.4])
    assert (found["pairs"], found["one_ms"], found["other_ms"]) == (10, 1150.0, 1000.0)


def test_every_second_pair_is_the_other_way_round():
    calls = []
    spread(6, lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 1.0)
    assert "".join(calls) == "ab" + 3 * "abba"
