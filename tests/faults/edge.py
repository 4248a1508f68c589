"""What lies around the replicas dies: routers, HAProxy, Ray Serve's own parts, and all replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ray import serve
from ray.exceptions import RayError

from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.replicas import FLEET, killed_in_mid_stream
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


def haproxy_killed(trial: Trial) -> Callable[[], bool]:
    """HAProxy ends, and with it every connection."""
    trial.busiest(2)
    victim = injuries.haproxy()
    victim.kill()
    return lambda: not victim.runs


def haproxy_manager_killed(trial: Trial) -> Callable[[], bool]:
    """The actor that looks after HAProxy ends, and HAProxy with it."""
    trial.busiest(2)
    victim = injuries.haproxy_manager()
    victim.kill()
    return lambda: not victim.runs


def tls_parts_killed(trial: Trial) -> Callable[[], bool]:
    """The replica with most streams ends, and then HAProxy, once one of them has gone on
    elsewhere."""
    before = trial.counted()["resumed"]
    replaced = killed_in_mid_stream(trial)
    wait_until(lambda: trial.counted()["resumed"] > before, "a stream goes on", every_s=0.2)
    proxy = haproxy_killed(trial)
    return lambda: replaced() and proxy()


_STREAMS = Load(output_tokens=(40, 100), plain=0)

SCENARIOS = (
    Scenario("all replicas killed", FLEET, all_killed, may_fail=True, may_refuse=True, quick=False),
    Scenario("one of two routers killed", FLEET, router_killed, may_fail=True, forgets=True),
    Scenario("Serve's controller killed", FLEET, serve_controller_killed, quick=False),
    Scenario(
        "HAProxy killed",
        FLEET,
        haproxy_killed,
        _STREAMS,
        may_fail=True,
        may_refuse=True,
        quick=False,
    ),
    Scenario(
        "HAProxy and its manager killed",
        FLEET,
        haproxy_manager_killed,
        _STREAMS,
        may_fail=True,
        may_refuse=True,
        quick=False,
    ),
    Scenario(
        "TLS: replica killed, then HAProxy",
        FLEET,
        tls_parts_killed,
        _STREAMS,
        resumes=True,
        may_fail=True,
        may_refuse=True,
        longer_s=3.0,
        quick=False,
        tls=True,
    ),
)
