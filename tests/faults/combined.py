"""Two parts fail at once on a machine that is busy with something else: each request has an end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice.router.dispatch.stall_detector import SILENCE_S
from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.edge import router_killed
from tests.faults.load import Load
from tests.faults.replicas import FLEET, killed, killed_in_mid_stream
from tests.faults.scenario import Scenario, Trial

FROZEN_S = 10.0
"""How long the controller stands still, seconds."""

HOGS = 16
"""Processes that use all the time they get."""


@contextmanager
def busy_machine() -> Iterator[None]:
    """Other programs want the processors, too, until the block ends."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(HOGS)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()


def controller_frozen_and_replica_killed(trial: Trial) -> Callable[[], bool]:
    """Nobody decides, and Serve chooses while it has not noticed yet that a replica is gone."""
    victim = trial.busiest(2, "decodes")
    with injuries.controller(trial.app).frozen(), busy_machine():
        injuries.replica(victim).kill()
        until_s = time.monotonic() + FROZEN_S
        wait_until(lambda: time.monotonic() >= until_s, "it has stood still for long enough")
    return trial.replaced(victim)


def router_and_replica_killed(trial: Trial) -> Callable[[], bool]:
    """Half of the connections and a third of the engines end at once."""
    with busy_machine():
        replaced = killed(trial)
        router = router_killed(trial)
        until_s = time.monotonic() + FROZEN_S
        wait_until(lambda: time.monotonic() >= until_s, "the machine was busy for long enough")
    return lambda: replaced() and router()


def router_frozen_and_replica_killed(trial: Trial) -> Callable[[], bool]:
    """A router stands still until Serve has ended it."""
    replaced = killed_in_mid_stream(trial)
    victim = injuries.routers(trial.app)[0]
    trial.undo.callback(victim.thaw)
    victim.freeze()
    return lambda: replaced() and not victim.runs


_STREAMS = Load(output_tokens=(60, 120))

SCENARIOS = (
    Scenario(
        "controller frozen, replica killed, CPUs busy",
        FLEET,
        controller_frozen_and_replica_killed,
        _STREAMS,
        may_fail=True,
        may_refuse=True,
        ends_s=SILENCE_S + 30,
        quick=False,
    ),
    Scenario(
        "router and replica killed, CPUs busy",
        FLEET,
        router_and_replica_killed,
        _STREAMS,
        may_fail=True,
        may_refuse=True,
        forgets=True,
        ends_s=SILENCE_S + 30,
        quick=False,
    ),
    Scenario(
        "router frozen for good, replica killed",
        FLEET,
        router_frozen_and_replica_killed,
        _STREAMS,
        may_fail=True,
        may_refuse=True,
        forgets=True,
        ends_s=SILENCE_S + 30,
        quick=False,
    ),
)
