"""The benchmarks of single parts: decisions, plans, and how far a reader walks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from sluice.benchmarks.micro.causes import INJECTED, confusion
from sluice.benchmarks.micro.decision import Inside, contenders
from sluice.benchmarks.micro.decision_fleet import CHANGED, QUEUED, FleetMessages, figures
from sluice.benchmarks.micro.walk import Walk, walked
from sluice.controller.config import ControllerConfig
from sluice.deploy.cli import main
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import POLICIES
from tests.controller.fleet import ObservedController
from tests.own_ray import shared_ray

DEFAULT = ControllerConfig().policy
LASTING = contenders((DEFAULT,))[DEFAULT]
"""Whose reports stay fresh while loops are compiled."""


def run(*options: str) -> dict[str, dict[str, dict[str, float]]]:
    result = CliRunner().invoke(main, ["bench", "decision", "--json", *options])
    assert result.exit_code == 0, result.output
    found: dict[str, dict[str, dict[str, float]]] = json.loads(result.stdout)
    return found


def test_every_policy_is_measured_where_none_is_named() -> None:
    assert set(POLICIES) <= set(contenders(()))


@contextmanager
def shared() -> Iterator[None]:
    """The Ray that tests share, in place of one of its own."""
    shared_ray.start()
    yield


@pytest.mark.release
@pytest.mark.ray
def test_decisions_are_timed_inside_and_in_a_real_actor_while_its_fleet_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.benchmarks.micro.decision_actor.own_ray", shared)
    monkeypatch.setattr("sluice.benchmarks.micro.decision.SIZES", (8, 4))
    monkeypatch.setattr("sluice.benchmarks.micro.decision.ACTOR_REPLICAS", 8)
    found = run("--policy", "most_gain", "--decisions", "100", "--seconds", "0.2")
    assert list(found) == ["floor", "most_gain"]
    for cells in found.values():
        assert list(cells) == ["8", "4"]
        for cell in cells.values():
            assert 0 < cell["p50_ms"] <= cell["p99_ms"]
            assert cell["per_second"] > 0
            assert isinstance(cell["scrape"], dict)
            assert cell["scrape"]["p50_ms"] > 0
        connection = cells["8"]["connection"]
        assert isinstance(connection, dict)
        assert connection["memory_mib"] > 10
        for way in ("alone", "with_reports", "batched", "both", "actor_calls"):
            assert connection[way]["per_second"] > 0
        reports = [connection[way]["reports_per_s"] for way in ("with_reports", "both")]
        assert min(reports) > 0 and connection["batched"]["reports_per_s"] == 0


async def test_the_controller_believes_the_fleet() -> None:
    controller = ObservedController(LASTING)
    messages = FleetMessages(3)
    epoch = 0
    for index in range(3):
        epoch = (await controller.hello(messages.hello(index))).epoch
    for _ in range(2):
        assert not (await controller.report(messages.delta(1, epoch, (7,)))).resync
    replicas = (await controller.snapshot())["replicas"]
    assert [each["condition"] for each in replicas] == ["fresh"] * 3
    assert all(each["waiting"] + each["running"] == QUEUED for each in replicas)
    # Some are more behind than others, or every choice would be as good as another.
    assert len({each["waiting"] for each in replicas}) > 1
    assert 0 < CHANGED < QUEUED


async def test_what_is_measured_leaves_no_reservation_behind() -> None:
    fleet = await Inside(LASTING, 4).hello()
    decisions, answers, reports = await fleet.line(50, reports=False)
    assert (len(decisions), len(answers), reports) == (50, 50, [])
    decisions, answers, reports = await fleet.line(50, reports=True)
    assert reports
    # An answer takes at least as long as its decision.
    assert all(a >= d - 1 for d, a in zip(decisions, answers, strict=True))
    await fleet.report()
    assert await fleet.reservations() == 0


def test_figures_are_quantiles_in_milliseconds_and_a_rate() -> None:
    found = figures([1_000_000] * 99 + [3_000_000])
    assert found["p50_ms"] == 1.0
    assert 1.0 < found["p99_ms"] < 3.0
    assert found["per_second"] == round(100 / 0.102)
    assert figures([1_000_000] * 10, elapsed_s=2.0)["per_second"] == 5


def test_delays_are_blamed_on_what_was_injected_and_parts_sum_to_the_lateness() -> None:
    rows = confusion(2)
    assert [(row["injected"], row["right"]) for row in rows] == [(each, 1.0) for each in INJECTED]
    assert max(row["off_ms"] for row in rows) < 1


def test_a_walk_counts_calls_files_moves_and_returns() -> None:
    assert Walk.of([]) == Walk(0, 0, 0, 0)
    assert Walk.of(["a", "a", "b", "a", "c", "b"]) == Walk(6, 3, 5, 2)


def test_only_calls_of_own_functions_count() -> None:
    slo = SLO(ttft_s=1.0)
    with walked() as path:
        json.dumps({"a": 1})
        slo.with_times([1.0, None, None])
    assert path and {name.rsplit("/", 1)[-1] for name in path} == {"objective.py"}


def test_the_command_takes_every_walk() -> None:
    result = CliRunner().invoke(main, ["bench", "walk", "--json"])
    assert result.exit_code == 0, result.output
    walks = json.loads(result.stdout)["walks"]
    assert len(walks) == 3
    for walk in walks.values():
        assert walk["calls"] >= walk["files"] > 1
        assert walk["returns"] == walk["moves"] - walk["files"]
