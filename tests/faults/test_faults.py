from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import system, wait_until
from tests.faults.__main__ import settings_of
from tests.faults.catalogue import SCENARIOS
from tests.faults.nodes import NODES
from tests.faults.replicas import FLEET
from tests.faults.scenario import QUICK, Scenario, Trial, run
from tests.processes import title_of
from tests.wire import can_cut

pytestmark = pytest.mark.ray

QUICK_ONES = [each for each in SCENARIOS if each.quick]


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    with system(FLEET.fields) as running:
        yield Trial.of(running)


@pytest.mark.parametrize("scenario", QUICK_ONES, ids=lambda each: each.name)
def test_nothing_is_lost(trial: Trial, scenario: Scenario) -> None:
    assert scenario.setting is FLEET, "those that need another system are not quick"
    row = run(trial, scenario, QUICK)
    print(row)
    assert row.problems == [], row


@pytest.mark.release
@pytest.mark.own_ray
@pytest.mark.skipif(not can_cut(), reason="no network can be made here, which needs root")
def test_a_run_on_nodes_that_is_told_to_stop_leaves_nothing() -> None:
    name = next(each.name for each in SCENARIOS if each.setting is NODES)
    command = [sys.executable, "-m", "tests.faults", "--quick", "--scenario", name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        family: list[psutil.Process] = []

        def apart() -> bool:
            family[:] = psutil.Process(run.pid).children(recursive=True)
            return bool(networks_of(run.pid)) and any(map(is_node, family))

        wait_until(apart, "there are nodes", 300)
        folders = {each.environ()["RAY_TMPDIR"] for each in family if is_node(each)}
        run.terminate()
        assert run.wait(timeout=120) == 128 + signal.SIGTERM
    assert networks_of(run.pid) == []
    assert not any(each.is_running() for each in family)
    assert folders and not any(Path(each).exists() for each in folders)


def networks_of(pid: int) -> list[str]:
    """The network namespaces that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"sluice-{pid}-")]


def is_node(process: psutil.Process) -> bool:
    return "--node-name=first" in title_of(process).split()


def test_the_command_runs_every_scenario_on_its_own_system() -> None:
    systems = settings_of(SCENARIOS)
    for scenario in SCENARIOS:
        assert sum(each is scenario.setting for each in systems) == 1, scenario.name
