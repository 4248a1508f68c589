"""How many batches a minute the simulator runs, on one core.

Run with ``python -m sluice.benchmarks.micro.simulator_speed [--json]``. The workload is ProServe's
ShareGPT setting (lengths of SLOs-Serve Table 4, Poisson arrivals, TTFT 0.8 s, TPOT 80 ms), on an
engine about as fast as one A100 with an 8B model, at rates that keep some tens of requests and
about a hundred alive; and on four of them behind a router. A run is timed from the workload to the
last token, in CPU seconds of its one thread; the compiled loops are warmed by a short run before.
``mean_live`` is the mean number of live requests over time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import click
import numpy as np

from sluice.benchmarks.live.report import table
from sluice.benchmarks.options import as_json, choices_option, number_option, seed, show
from sluice.scheduling import batching, routing
from sluice.scheduling.latency.model import LinearLatency
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig
from sluice.simulation.metrics import stages
from sluice.simulation.run import Result, simulate
from sluice.simulation.truth import Truth
from sluice.simulation.workload import Workload, window
from sluice.simulation.workloads.settings import proserve

LATENCY = LinearLatency(a=0.008, b=0.000_04, c=0.000_000_1, d=0.000_000_001)
TRUTH = Truth(LATENCY, noise=0.03)
RATES = (7.0, 10.0)
"""Requests per second and engine; behind the router the first."""

REPLICAS = 4


def measured(run: Callable[[], Result]) -> dict[str, float]:
    """The speed of a run. Live requests are counted by Little's law."""
    started = time.process_time()
    result = run()
    seconds = time.process_time() - started
    lived_s = float(np.nansum(stages(result.requests).e2e_s))
    batches = sum(result.steps)
    return {
        "mean_live": round(lived_s / (result.end_s - result.requests.arrivals[0].arrival_s), 1),
        "batches": batches,
        "batches_per_minute": round(60 * batches / seconds),
        "us_per_batch": round(1e6 * seconds / batches, 1),
    }


def speeds(policy: str, requests: int, seed: int) -> dict[str, dict[str, float]]:
    """The speed of a policy by load."""

    def alone(workload: Workload) -> Result:
        return simulate(workload, batching.make_policy(policy), TRUTH)

    found = {}
    for rate in RATES:
        workload = proserve("sharegpt", rate, requests, seed)
        alone(window(workload, 0.0, 5.0))
        found[f"{rate:g}/s"] = measured(partial(alone, workload))
    together = proserve("sharegpt", RATES[0] * REPLICAS, requests, seed)
    found[f"{REPLICAS} x {RATES[0]:g}/s"] = measured(
        lambda: simulate_cluster(
            together,
            lambda role: batching.make_policy(policy),
            routing.make_policy("pab"),
            TRUTH,
            cluster=ClusterConfig(replicas=REPLICAS),
        )
    )
    return found


@click.command()
@as_json
@number_option("--requests", default=2_000, least=10, most=100_000)
@choices_option("--policy", "policies", of=batching.POLICIES, words="Default: all.")
@seed
def main(as_json: bool, requests: int, policies: tuple[str, ...], seed: int) -> None:
    """Measure the simulator: one engine per policy and rate, and a cluster of four."""
    names = policies or sorted(batching.POLICIES)
    results = {policy: speeds(policy, requests, seed) for policy in names}
    rows = [
        {"policy": policy, "load": load, **row}
        for policy, loads in results.items()
        for load, row in loads.items()
    ]
    title = f"simulated batches per minute, {requests} requests, seed {seed}"
    show(results, [table(rows, *rows[0], title=title)], as_json)


if __name__ == "__main__":
    main()
