"""The controller dies or hangs: requests continue, and no reservation stays without a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import ray

from sluice.controller.discovery import stop_controller
from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Trial

FROZEN_S = 5.0
"""As long as a reservation lives, so no queued question may become one, seconds."""


def controller_killed(trial: Trial) -> Callable[[], bool]:
    """Its process ends; Ray starts it again."""
    trial.busiest(2)
    victim = injuries.controller(trial.app)
    victim.kill()
    return lambda: not victim.runs


def controller_gone(trial: Trial) -> Callable[[], bool]:
    """It ends for good: Ray does not start it again, who needs it does."""
    trial.busiest(2)
    before = injuries.controller(trial.app).pid
    assert stop_controller(trial.app)

    def another_is_there() -> bool:
        with suppress(injuries.MissingError, ray.exceptions.RayError):
            return injuries.controller(trial.app).pid != before
        return False

    return another_is_there


def controller_frozen(trial: Trial) -> Callable[[], bool]:
    """It hangs while requests come, and resumes with the questions in its sockets."""
    trial.busiest(2)
    with injuries.controller(trial.app).frozen():
        until_s = time.monotonic() + FROZEN_S
        wait_until(lambda: time.monotonic() >= until_s, "it has stood still for long enough")
    return lambda: True


SCENARIOS = (
    Scenario("controller killed", FLEET, controller_killed, tidy=True, undecided=True),
    Scenario(
        "controller stopped for good",
        FLEET,
        controller_gone,
        tidy=True,
        undecided=True,
        quick=False,
    ),
    Scenario("controller frozen", FLEET, controller_frozen, tidy=True, undecided=True, quick=False),
)
