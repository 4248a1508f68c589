"""``sluice bench walk``: what is a call, a move and a return, and that each walk is taken."""

from __future__ import annotations

import json

from click.testing import CliRunner

from sluice.benchmarks.micro.walk import PACKAGES, Walk, walked
from sluice.deploy.cli import main
from sluice.scheduling.request.objective import SLO


def test_a_walk_counts_calls_files_moves_and_returns() -> None:
    assert Walk.of([]) == Walk(0, 0, 0, 0)
    assert Walk.of(["a", "a", "b", "a", "c", "b"]) == Walk(6, 3, 5, 2)


def test_only_calls_of_own_functions_count() -> None:
    slo = SLO(ttft_s=1.0)
    with walked() as path:
        json.dumps({"a": 1})
        slo.with_times([1.0, None, None])
    assert path and {name.rsplit("/", 1)[-1] for name in path} == {"objective.py"}


def test_the_command_takes_every_walk_and_counts_every_package() -> None:
    result = CliRunner().invoke(main, ["bench", "walk", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["walks"]) == 3
    for walk in found["walks"].values():
        assert walk["calls"] >= walk["files"] > 1
        assert walk["returns"] == walk["moves"] - walk["files"]
    assert set(PACKAGES) < set(found["lines"])
    assert found["lines"]["all"]["lines"] == sum(found["lines"][p]["lines"] for p in PACKAGES)
    assert found["configuration fields"] > 0 and found["policy options"] > 0
