"""How many batches a minute the simulator runs, on one core."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from sluice.benchmarks.experiments.grid import Experiment, Product, Scaled, pivots
from sluice.benchmarks.experiments.policies import LOCAL, ROUTERS
from sluice.scheduling.latency.model import LinearLatency
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import stages
from sluice.simulation.run import Result, simulate
from sluice.simulation.settings import proserve
from sluice.simulation.workload import Workload, window

TRUTH = Truth(LinearLatency(a=0.008, b=0.000_04, c=0.000_000_1, d=0.000_000_001), noise=0.03)
LOADS = {"7/s": (7.0, 1, 1), "10/s": (10.0, 1, 1), "4 x 7/s": (28.0, 4, 1)}
"""Requests per second, engines behind a router, controllers; up to about a hundred are alive."""

LARGE = {"128 x 2/s": (256.0, 128, 1)}


def speed(
    seed: int, policy: str, load: tuple[float, int, int], requests: int
) -> Mapping[str, float]:
    """The speed of a run by its thread's processor time; live requests by Little's law."""
    rate, replicas, cells = load

    def run(workload: Workload) -> Result:
        if replicas == 1:
            return simulate(workload, LOCAL.make(policy), TRUTH)
        cluster = ClusterConfig(replicas=replicas, cells=cells)
        make, router = (lambda role: LOCAL.make(policy)), ROUTERS.make("pab")
        return simulate_cluster(workload, make, router, TRUTH, cluster=cluster)

    workload = proserve("sharegpt", rate, requests, seed)
    run(window(workload, 0.0, 5.0))  # compiles its loops
    started_s = time.process_time()
    result = run(workload)
    seconds, batches = time.process_time() - started_s, sum(result.steps)
    lived_s = float(np.nansum(stages(result.requests).e2e_s))
    simulated_s = result.end_s - result.requests.arrivals[0].arrival_s
    return {
        "mean_live": lived_s / simulated_s,
        "batches_per_minute": 60 * batches / seconds,
        "hours_per_day": 24 * seconds / simulated_s,
    }


EXPERIMENT = Experiment(
    "simulator_speed",
    "ours",
    "How many batches a minute does the simulator run?",
    seeds=1,
    setting="2,000 requests of ProServe's ShareGPT lengths, 1,000 for 128 engines.",
    grids=[
        Product(
            speed,
            {"policy": Scaled(("deadline_triage",), tuple(LOCAL)), "load": LOADS},
            {"requests": Scaled(200, 2_000)},
        ),
        Product(
            speed, {"policy": Scaled((), ("deadline_triage",)), "load": LARGE}, {"requests": 1_000}
        ),
    ],
    tables=pivots(
        {
            "batches_per_minute": "Batches per minute",
            "mean_live": "Live requests, mean over time",
            "hours_per_day": "Hours of one core for a simulated day",
        },
        digits=1,
    ),
)
