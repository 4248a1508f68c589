"""Replicas that die and replicas that stand still."""

from __future__ import annotations

from collections.abc import Callable

from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.kinds import CLASSES
from tests.faults.load import Load
from tests.faults.scenario import Scenario, Setting, Trial

FLEET = Setting(
    {
        "name": "faults",
        "engine": {
            "kind": "simulated",
            "model": "sim",
            "simulated": {"step_s": 0.03, "token_s": 0.0005, "context_token_s": 0.0},
        },
        "replica": {"count": 3, "num_cpus": 0.1},
        "router": {
            "replicas": 2,
            "classes": {name: entry.model_dump(mode="json") for name, entry in CLASSES.items()},
        },
    }
)
"""Three replicas and two routers, all else as it is by default."""


def killed(trial: Trial) -> Callable[[], bool]:
    """The process of the replica with most requests ends."""
    victim = trial.busiest(2)
    injuries.replica(victim).kill()
    return trial.replaced(victim)


def killed_in_mid_stream(trial: Trial) -> Callable[[], bool]:
    """The same, of the replica with most requests that have begun to answer."""
    victim = trial.busiest(2, "decodes")
    injuries.replica(victim).kill()
    return trial.replaced(victim)


def frozen(trial: Trial) -> Callable[[], bool]:
    """The replica with most streams stands still until one of them goes on elsewhere."""
    victim = trial.busiest(2, "decodes")
    before = trial.counted()["resumed"]
    with injuries.replica(victim).frozen():
        wait_until(lambda: victim not in trial.fresh(), "it is noticed")
        wait_until(lambda: trial.counted()["resumed"] > before, "a stream goes on", every_s=0.2)
    return lambda: injuries.replica(victim).runs


def frozen_for_good(trial: Trial) -> Callable[[], bool]:
    """It stands still until Serve has replaced it."""
    victim = trial.busiest(2, "decodes")
    part = injuries.replica(victim)
    trial.undo.callback(part.thaw)
    part.freeze()
    return lambda: not part.runs


def two_killed(trial: Trial) -> Callable[[], bool]:
    """Two of three end at once."""
    victim = trial.busiest(2)
    other = next(each for each in trial.fresh() if each != victim)
    parts = [injuries.replica(each) for each in (victim, other)]
    for part in parts:
        part.kill()
    return trial.replaced(victim, other)


_STREAMS = Load(output_tokens=(60, 120), plain=0)
_PREFILLS = Load(prompt_tokens=(500, 900), output_tokens=(2, 8))

SCENARIOS = (
    Scenario("replica killed before first tokens", FLEET, killed, _PREFILLS, quick=False),
    Scenario("replica killed in mid-stream", FLEET, killed_in_mid_stream, _STREAMS, resumes=True),
    Scenario("two of three replicas killed", FLEET, two_killed, quick=False),
    Scenario("replica frozen and thawed", FLEET, frozen, _STREAMS, resumes=True),
    Scenario("replica frozen for good", FLEET, frozen_for_good, _STREAMS, quick=False),
)
