"""Nothing is lost, whatever breaks: the scenarios of the table in their short form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import system
from tests.faults.__main__ import settings_of
from tests.faults.catalogue import SCENARIOS
from tests.faults.replicas import FLEET
from tests.faults.scenario import QUICK, Scenario, Setting, Trial, run

pytestmark = pytest.mark.ray

ON_THE_FLEET = [each for each in SCENARIOS if each.quick and each.setting is FLEET]
OF_THEIR_OWN = [
    each
    for each in SCENARIOS
    if each.quick and each.setting is not FLEET and type(each.setting) is Setting
]
ELSEWHERE = [each for each in SCENARIOS if each.quick and type(each.setting) is not Setting]


# These come first: the fleet of the others, which stays from then on, listens on the same path.
@pytest.mark.parametrize("scenario", OF_THEIR_OWN, ids=lambda each: each.name)
def test_nothing_is_lost_in_another_fleet(scenario: Scenario) -> None:
    with system(scenario.setting.fields) as running:
        check(Trial.of(running), scenario)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    with system(FLEET.fields) as running:
        yield Trial.of(running)


@pytest.mark.parametrize("scenario", ON_THE_FLEET, ids=lambda each: each.name)
def test_nothing_is_lost(trial: Trial, scenario: Scenario) -> None:
    check(trial, scenario)


@pytest.mark.own_ray
@pytest.mark.parametrize("scenario", ELSEWHERE, ids=lambda each: each.name)
def test_nothing_is_lost_elsewhere(scenario: Scenario) -> None:
    """On a Ray in another environment, which is started for it: that takes longer than the scenario
    does."""
    if why := scenario.missing():
        pytest.skip(why)
    with scenario.setting.open() as own:
        check(own, scenario)


def check(trial: Trial, scenario: Scenario) -> None:
    row = run(trial, scenario, QUICK)
    print(row)
    assert row.problems == [], row


def test_the_command_runs_every_scenario_on_its_own_system() -> None:
    systems = settings_of(SCENARIOS)
    for scenario in SCENARIOS:
        assert sum(each is scenario.setting for each in systems) == 1, scenario.name
