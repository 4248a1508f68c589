"""``sluice bench`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.benchmarks.experiments import EXPERIMENTS
from sluice.benchmarks.experiments.policies import LOCAL
from sluice.benchmarks.micro.planning import DEFAULT
from sluice.deploy.cli import main

QUICK = ["--scale", "quick", "--seeds", "1", "--jobs", "1"]
SMALL = "proserve_ablation"


def test_list_names_every_experiment() -> None:
    result = CliRunner().invoke(main, ["bench", "list"])
    assert result.exit_code == 0, result.output
    for name in EXPERIMENTS:
        assert name in result.output.replace("\n", "")


def test_times_are_by_policy_and_size() -> None:
    result = CliRunner().invoke(
        main, ["bench", "planning", "--json", "--repeats", "1", "--seeds", "1"]
    )
    assert result.exit_code == 0, result.output
    times = json.loads(result.output)
    assert list(times) == [*LOCAL, f"{DEFAULT}, sessions"]
    for by_size in times.values():
        assert set(by_size) == {"32", "128", "512"}
        for row in by_size.values():
            assert set(row) == {"median_ms", "p99_ms"}
            assert 0 < row["median_ms"] <= row["p99_ms"]


def test_an_experiment_prints_tables() -> None:
    result = CliRunner().invoke(main, ["bench", SMALL, *QUICK])
    assert result.exit_code == 0, result.output
    assert "only density" in result.output


def test_json_alone_goes_to_standard_output() -> None:
    result = CliRunner().invoke(main, ["bench", SMALL, *QUICK, "--first-seed", "3", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "--first-seed 3" in found["command"]
    rows = found["rows"]
    assert {row["seed"] for row in rows} == {3}
    assert {row["policy"] for row in rows} >= {"slidebatching", "only deadline"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([SMALL, "--seeds", "0"], "1<=x<=1000"),
        ([SMALL, "--jobs", "0"], "1<=x<=256"),
        ([SMALL, "--scale", "huge"], "'quick', 'normal', 'full'"),
        ([SMALL, "--traces", "nowhere"], "nowhere"),
        (["no_such"], "no_such"),
    ],
)
def test_refuses_by_name(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_a_bad_trace_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    result = CliRunner().invoke(
        main, ["bench", "default_policy", *QUICK, "--traces", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "bad.csv" in result.output
    assert "ContextTokens" in result.output


def test_help_states_the_setting() -> None:
    result = CliRunner().invoke(main, ["bench", "fairbatching_peak", "--help"])
    assert "running maximum" in result.output.replace("\n", " ")
