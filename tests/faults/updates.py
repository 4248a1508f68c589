"""What an operator does under load: drains, fewer replicas, another version."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import StartError, deploy
from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Trial


def drained(trial: Trial) -> Callable[[], bool]:
    """A replica is drained, and taken back when it has finished what it had."""
    victim = trial.busiest(2)
    injuries.drain(victim, True, trial.app)
    try:
        wait_until(lambda: _is_idle(trial, victim), "it finishes what it has", show=trial.snapshot)
    finally:
        injuries.drain(victim, False, trial.app)
    return lambda: True


def scaled_down(trial: Trial) -> Callable[[], bool]:
    """Two of three replicas are taken away, and brought back when they have gone."""
    wanted = len(trial.fresh())
    trial.busiest(2)
    injuries.scale(1, trial.app)
    try:
        wait_until(
            lambda: len(injuries.replica_ids(trial.app)) == 1, "two end", show=trial.snapshot
        )
    finally:
        injuries.scale(wanted, trial.app)
    return lambda: True


def updated(trial: Trial) -> Callable[[], bool]:
    """The application is deployed again: every replica and every router is replaced."""
    before = set(injuries.replica_ids(trial.app))
    routers = {each.pid for each in injuries.routers(trial.app)}
    deploy(trial.config, threading.Event(), print)

    def replaced() -> bool:
        return not before & set(injuries.replica_ids(trial.app)) and not routers & {
            each.pid for each in injuries.routers(trial.app)
        }

    return replaced


def wrong_deployed(trial: Trial) -> Callable[[], bool]:
    """A configuration whose model does not exist is refused with its path; the old one serves."""
    missing = "/nowhere/there-is-no-such-model"
    fields = trial.config.model_dump(mode="json", exclude_unset=True)
    engine = {"kind": "vllm", "model": missing, "served_model_name": trial.model}
    wrong = SluiceConfig.model_validate({**fields, "engine": engine})
    with pytest.raises(StartError, match=missing):
        deploy(wrong, threading.Event(), print)
    wait_until(trial.ask, "the running version serves")
    deploy(trial.config, threading.Event(), print)
    return lambda: True


def _is_idle(trial: Trial, replica_id: str) -> bool:
    rows = [row for row in trial.snapshot()["replicas"] if row["replica_id"] == replica_id]
    return bool(rows) and not any(row["waiting"] + row["running"] for row in rows)


SCENARIOS = (
    Scenario(
        "replica drained and taken back", FLEET, drained, tidy=True, planned=True, quick=False
    ),
    Scenario(
        "three replicas, then one, then three",
        FLEET,
        scaled_down,
        Load(rate=4.0),
        tidy=True,
        planned=True,
        quick=False,
    ),
    Scenario(
        "replicas and routers replaced by an update",
        FLEET,
        updated,
        Load(rate=4.0),
        tidy=True,
        planned=True,
        longer_s=30.0,
        quick=False,
    ),
    Scenario(
        "a wrong configuration deployed",
        FLEET,
        wrong_deployed,
        Load(rate=4.0),
        planned=True,
        longer_s=60.0,
        quick=False,
    ),
)
