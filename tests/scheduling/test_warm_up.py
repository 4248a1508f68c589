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


# Each says it once in a process, and not for each loop.
@pytest.mark.parametrize(
    ("unwritable", "said"),
    [
        ("caching.CompileResultCacheImpl._locator_classes = []", "/scheduling/request: it and"),
        ("config.CACHE_DIR = '/proc/kept'", "/proc/kept: it is not writable; /"),
        ("caching.IndexDataCacheFile.save = full", "__pycache__: No space left on device"),
    ],
)
def test_where_compiled_loops_cannot_be_kept_a_warning_names_the_folder(unwritable, said):
    code = f"""
import errno, os
import numba.core.caching as caching
import numpy as np
from numba import config
def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
caching.IndexDataCacheFile.load = lambda *_: None
{unwritable}
from sluice.scheduling.request import kernels
pieces = np.ones((1, kernels.COEFFICIENTS))
assert kernels.work_s(pieces[0], 1.0, 2.0) == 3.0
assert kernels.most_work_s(pieces, 1.0, 2.0) == 3.0
"""
    warning = run(code)
    assert said in warning
    assert warning.count("set NUMBA_CACHE_DIR") == 1


def test_numbers_of_other_types_compile_nothing():
    code = """
from typing import NamedTuple
import numpy as np
from sluice.scheduling.request.kernels import Floats, compiled
class Pair(NamedTuple):
    some: float
    more: int
@compiled
def total(number: float, count: int, flag: bool, pair: Pair, both: tuple[float, int]) -> float:
    return number / 2 + count + flag + pair.some / 2 + pair.more + both[0] / 2 + both[1]
assert total(1, np.int32(1), np.bool_(True), Pair(1, 1), (1, 1)) == 5.5
assert total(np.float32(1), 1, 1, Pair(np.int64(1), np.int16(1)), (True, 1)) == 5.5
assert len(total.signatures) == 1
for wrong in ((None, 1), (1.0, 1.5), (1.0, "1")):
    try:
        total(*wrong, True, Pair(1.0, 1), (1.0, 1))
    except TypeError:
        continue
    raise AssertionError(wrong)
assert len(total.signatures) == 1
"""
    run(code)


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="unknown batching policy 'none'"):
        warm_up("none")
