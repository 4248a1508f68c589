"""The watchdog over the worker's progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.stats import StalledError, TaskWatchdog

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
