"""Real vLLM engines on processors. Their text is not known beforehand; its length is."""

from __future__ import annotations

from collections.abc import Callable

from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.replicas import FLEET, killed_in_mid_stream
from tests.faults.scenario import Scenario, Setting, Trial

ENGINES = Setting(
    {
        "name": "vllm-faults",
        "engine": {
            "model": "local",
            "vllm_args": {"max-model-len": 2048, "kv-cache-memory-bytes": 64 << 20},
        },
        "replica": {"count": 2, "num_cpus": 0.1},
        "router": FLEET.fields["router"],
    },
    exact=False,
)
"""Two replicas with the small model that `sluice serve` makes."""


def engine_frozen(trial: Trial) -> Callable[[], bool]:
    """The engine's process hangs until a stream resumes elsewhere, while its replica answers."""
    victim = trial.busiest(2, "decodes")
    before = trial.counted()["resumed"]
    with injuries.replica(victim).engine().frozen():
        wait_until(lambda: victim not in trial.fresh(), "it is noticed")
        wait_until(lambda: trial.counted()["resumed"] > before, "a stream goes on", every_s=0.2)
    return lambda: injuries.replica(victim).runs


def engine_frozen_for_good(trial: Trial) -> Callable[[], bool]:
    """The engine's process hangs; Serve replaces the replica, and the process ends with it."""
    victim = trial.busiest(2, "decodes")
    engine = injuries.replica(victim).engine()
    trial.undo.callback(engine.kill)
    engine.freeze()
    return lambda: victim not in trial.fresh() and not engine.runs


STREAMS = Load(rate=1.5, prompt_tokens=(20, 100), output_tokens=(100, 200), plain=5)

SCENARIOS = (
    Scenario(
        "vLLM: replica killed in mid-stream",
        ENGINES,
        killed_in_mid_stream,
        STREAMS,
        resumes=True,
        quick=False,
    ),
    Scenario(
        "vLLM: engine frozen and thawed",
        ENGINES,
        engine_frozen,
        STREAMS,
        resumes=True,
        quick=False,
    ),
    Scenario(
        "vLLM: engine frozen for good",
        ENGINES,
        engine_frozen_for_good,
        STREAMS,
        resumes=True,
        quick=False,
    ),
)
