"""Nothing is lost, whatever breaks: the scenarios of the table in their short form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import System, system
from tests.faults.catalogue import SCENARIOS
from tests.faults.replicas import FLEET
from tests.faults.scenario import QUICK, Scenario, run

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    with system(FLEET.fields) as running:
        yield running


@pytest.mark.parametrize(
    "scenario",
    [each for each in SCENARIOS if each.quick and each.setting is FLEET],
    ids=lambda each: each.name,
)
def test_nothing_is_lost(serving: System, scenario: Scenario) -> None:
    row = run(serving, scenario, QUICK)
    print(row)
    assert row.problems == [], row
