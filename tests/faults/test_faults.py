"""Nothing is lost, whatever breaks: a replica, the controller or a router dies, or a replica hangs.

``make test-release`` runs every scenario of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import system
from tests.faults.__main__ import settings_of
from tests.faults.catalogue import SCENARIOS
from tests.faults.replicas import FLEET
from tests.faults.scenario import QUICK, Scenario, Trial, run

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


def test_the_command_runs_every_scenario_on_its_own_system() -> None:
    systems = settings_of(SCENARIOS)
    for scenario in SCENARIOS:
        assert sum(each is scenario.setting for each in systems) == 1, scenario.name
