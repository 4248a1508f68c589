"""What lies around the replicas dies: routers, Ray Serve's own parts, and all replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ray import serve
from ray.exceptions import RayError

from tests import injuries
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Trial


def all_killed(trial: Trial) -> Callable[[], bool]:
    """Every replica ends at once."""
    trial.busiest(2)
    victims = trial.fresh()
    parts = [injuries.replica(each) for each in victims]
    for part in parts:
        part.kill()
    return trial.replaced(*victims)


def router_killed(trial: Trial) -> Callable[[], bool]:
    """One of two routers ends, with the connections that it holds."""
    trial.busiest(2)
    victim = injuries.routers(trial.app)[0]
    victim.kill()
    return lambda: victim.pid not in (router.pid for router in injuries.routers(trial.app))


def serve_controller_killed(trial: Trial) -> Callable[[], bool]:
    """What Ray Serve starts and ends replicas with ends; Ray starts it again."""
    victim = injuries.serve_controller()
    victim.kill()

    def knows_all_again() -> bool:
        with suppress(RayError, injuries.MissingError, KeyError):
            if injuries.serve_controller().pid != victim.pid:
                return all(
                    each.status == "RUNNING" for each in serve.status().applications.values()
                )
        return False

    return knows_all_again


SCENARIOS = (
    Scenario("all replicas killed", FLEET, all_killed, may_fail=True, may_refuse=True, quick=False),
    Scenario("one of two routers killed", FLEET, router_killed, may_fail=True, forgets=True),
    Scenario("Serve's controller killed", FLEET, serve_controller_killed, quick=False),
)
