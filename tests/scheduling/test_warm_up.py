"""After the warm-up no plan has to compile or load anything, whatever the queue."""

from __future__ import annotations

import pytest

from sluice.scheduling.batching.warm_up import warm_up
from tests.compiled_loops import run

# Each policy in a process of its own, as one would load the loops of the next: children of one that
# has imported everything and called nothing, which spares each the imports.
_PLAN_AFTER_WARM_UP = """
import multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice.scheduling.batching import POLICIES, make_policy
from sluice.scheduling.batching.warm_up import warm_up
from tests.compiled_loops import loaded
from tests.scheduling.views import budgets, latencies, queues

def check(name):
    assert sum(loaded().values()) == 0
    warm_up(name)
    before = loaded()
    assert sum(before.values()) > 0
    policy = make_policy(name)

    @settings(max_examples=12, database=None, derandomize=True)
    @given(st.data())
    def plan(data):
        queue = data.draw(queues())
        # Requests come from 90 to 100 s: later all of them have waited long.
        now_s = data.draw(st.sampled_from((100.0, 140.0, 200.0)))
        policy.plan(queue, now_s, data.draw(latencies), data.draw(budgets(queue)))

    plan()
    after = loaded()
    assert after == before, {key: n for key, n in after.items() if n != before.get(key)}

failed = []
for name in POLICIES:
    process = multiprocessing.get_context("fork").Process(target=check, args=(name,))
    process.start()
    process.join()
    failed += [name] if process.exitcode else []
assert not failed, failed
"""


def test_nothing_is_compiled_after_the_warm_up_of_any_policy():
    run(_PLAN_AFTER_WARM_UP)


def test_without_a_place_for_compiled_loops_they_are_compiled_anew():
    code = """
import numba.core.caching as caching
import numpy as np
caching.CompileResultCacheImpl._locator_classes = []
from sluice.scheduling.request import kernels
assert kernels.work_s(np.ones(kernels.COEFFICIENTS), 1.0, 2.0) == 3.0
assert kernels.work_s.signatures and not kernels.work_s.stats.cache_hits
"""
    assert "set NUMBA_CACHE_DIR" in run(code)


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="unknown batching policy 'none'"):
        warm_up("none")
