"""Replicas that die and replicas that stand still."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import injuries
from benchmarks.replay_load import CLASSES
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
            "classes": {name: entry.model_dump() for name, entry in CLASSES.items()},
        },
    }
)
"""Three replicas and two routers, all else as it is by default."""


def killed(trial: Trial) -> Callable[[], bool]:
    """The process of the replica with most requests ends."""
    victim = trial.busiest(2)
    injuries.replica(victim).kill()
    return trial.replaced(victim)


def two_killed(trial: Trial) -> Callable[[], bool]:
    """Two of three end at once."""
    victim = trial.busiest(2)
    other = next(each for each in trial.fresh() if each != victim)
    parts = [injuries.replica(each) for each in (victim, other)]
    for part in parts:
        part.kill()
    return trial.replaced(victim, other)


SCENARIOS = (
    Scenario(
        "replica killed in mid-stream",
        FLEET,
        killed,
        Load(output_tokens=(60, 120)),
        resumes=True,
    ),
    Scenario(
        "replica killed before first tokens",
        FLEET,
        killed,
        Load(prompt_tokens=(1000, 1500), output_tokens=(2, 8)),
    ),
    Scenario("two of three replicas killed", FLEET, two_killed, resumes=True),
)
