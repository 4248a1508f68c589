"""Machine code that is kept follows the source of everything that it was made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
from sluice.scheduling.{name}_outer import outer
print(outer(2.0), sum(outer.stats.cache_hits.values()))
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
