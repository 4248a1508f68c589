"""Compiled loops: their machine code is kept while no source that they come from has changed, and
warming up reaches every one of them with every type."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.scheduling import admission, routing
from sluice.scheduling.admission import moore_hodgson
from sluice.scheduling.fleet import report as fleet_report
from sluice.scheduling.fleet import rows as fleet_rows
from sluice.scheduling.placement.warm_up import warm_up_placement
from tests.compiled_loops import run

ROOT = Path(__file__).resolve().parents[2]
MAX_ARGUMENTS = 8


def test_a_compiled_function_takes_few_arguments() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": len(node.args.args)
        for package in ("scheduling", "simulation")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each) == "compiled" for each in node.decorator_list)
    }
    assert len(counts) > 100
    assert [name for name, count in counts.items() if count > MAX_ARGUMENTS] == []


BASE = "WEIGHT = 3.0\n"
INNER = """\
from sluice.scheduling.request.kernels import compiled
from sluice.scheduling.{name}_base import WEIGHT


@compiled
def inner(value):
    return WEIGHT * value
"""
OUTER = """\
from sluice.scheduling.request.kernels import compiled
from sluice.scheduling.{name}_inner import inner


@compiled
def outer(value):
    return inner(value) + 1.0
"""
CALL = """\
import sys
import sluice.scheduling
sluice.scheduling.__path__.append(sys.argv[1])
from sluice.scheduling import {name}_outer as loops
print(loops.outer(2.0), sum(loops.outer.stats.cache_hits.values()))
"""


def test_a_loop_is_compiled_again_after_a_change_of_what_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"changing_{name}.py").write_text(text.format(name="changing"))

    def called() -> tuple[float, int]:
        """What the outer loop returns in a new process, and whether it was on disk."""
        command = [sys.executable, "-B", "-c", CALL.format(name="changing"), str(tmp_path)]
        value, hits = subprocess.check_output(command, text=True).split()
        return float(value), int(hits)

    write(base=BASE, inner=INNER, outer=OUTER)
    assert [called(), called()] == [(7.0, 0), (7.0, 1)]
    # A function that it calls, with a source of the same length, and then a constant of that one.
    write(inner=INNER.replace("*", "+"))
    assert [called(), called()] == [(6.0, 0), (6.0, 1)]
    write(base=BASE.replace("3", "4"))
    assert [called(), called()] == [(7.0, 0), (7.0, 1)]


def test_a_process_loads_numba_once_it_calls_a_compiled_function_and_then_all_modules_have_it():
    run("""
import sys
import sluice.controller.observability.observer
import sluice.deploy.supervisor
import sluice.router.app
from sluice.controller.config import ControllerConfig
from sluice.scheduling.request import kernels
ControllerConfig()
assert "numba" not in sys.modules
assert kernels.next_due_s(0.0, 1.0, 2.0, 0.1, float('inf'), 0.0, 0.0, 0) == 3.0
from numba.core.registry import CPUDispatcher
names = [name for name in sys.modules if name.startswith("sluice.")]
found = [value for name in names for value in vars(sys.modules[name]).values()]
assert not any(isinstance(each, kernels._Deferred) for each in found)
assert sum(isinstance(each, CPUDispatcher) for each in found) > 100
""")


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


@pytest.mark.parametrize("name", routing.POLICIES)
def test_every_routing_policy_warms_up(name: str) -> None:
    warm_up_placement(lambda: routing.make_policy(name), lambda: None)


def test_no_loop_of_the_default_is_left_to_compile() -> None:
    warm_up_placement(
        lambda: routing.make_policy("pab"), lambda: admission.make_policy("moore_hodgson")
    )
    # Those that Python calls; the loops inside them are in their machine code.
    called = (fleet_report.fold, fleet_report.add_reservation, fleet_rows.work_on)
    for loop in (*called, moore_hodgson.promises):
        assert loop.signatures, loop  # type: ignore[attr-defined]
