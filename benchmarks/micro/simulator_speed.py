"""How many batches a minute the simulator runs, on one core.

Run with ``python -m sluice.benchmarks.micro.simulator_speed [--json]``. The workload is ProServe's
ShareGPT setting (lengths of SLOs-Serve Table 4, Poisson arrivals, TTFT 0.8 s, TPOT 80 ms), on an
engine about as fast as one A100 with an 8B model, at rates that keep some tens of requests and
about a hundred alive. A run is timed whole, from the workload to the last token, in CPU seconds of
its one thread; the compiled loops are warmed by a short run before. ``live`` is the mean number of
live requests over time.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import click
import numpy as np
from rich.table import Table

from sluice.benchmarks.options import as_json, number_option, show
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
REPLICAS = 4


class Speed(NamedTuple):
    """One measured run."""

    live: float
    batches: int
    seconds: float

    @property
    def per_minute(self) -> float:
        """Batches a minute of real time."""
        return 60 * self.batches / self.seconds

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return {
            "mean_live": round(self.live, 1),
            "batches": self.batches,
            "batches_per_minute": round(self.per_minute),
            "us_per_batch": round(1e6 * self.seconds / self.batches, 1),
        }


def measured(result: Result, seconds: float) -> Speed:
    """The speed of a run that took ``seconds``. Live requests are counted by Little's law."""
    lived_s = float(np.nansum(stages(result.requests).e2e_s))
    arrivals = result.requests.arrivals
    lasted_s = result.end_s - arrivals[0].arrival_s
    return Speed(lived_s / lasted_s, sum(result.steps), seconds)


def alone(workload: Workload, policy: str) -> Speed:
    """One engine."""
    simulate(window(workload, 0.0, 5.0), batching.make_policy(policy), TRUTH)
    started = time.process_time()
    result = simulate(workload, batching.make_policy(policy), TRUTH)
    return measured(result, time.process_time() - started)


def clustered(workload: Workload, policy: str, router: str) -> Speed:
    """Engines behind a router; the live requests are those of all."""
    started = time.process_time()
    result = simulate_cluster(
        workload,
        lambda role: batching.make_policy(policy),
        routing.make_policy(router),
        TRUTH,
        cluster=ClusterConfig(replicas=REPLICAS),
    )
    return measured(result, time.process_time() - started)


@click.command()
@as_json
@number_option("--requests", default=2_000, least=10, most=100_000)
@click.option(
    "--rates",
    default=(7.0, 10.0),
    show_default=True,
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    help="Requests per second and engine.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(sorted(batching.POLICIES)),
    help="Default: all.",
)
@click.option(
    "--router", default="pab", show_default=True, type=click.Choice(sorted(routing.POLICIES))
)
@click.option("--seed", default=1, show_default=True, type=int)
def main(
    as_json: bool,
    requests: int,
    rates: tuple[float, ...],
    policies: tuple[str, ...],
    router: str,
    seed: int,
) -> None:
    """Measure the simulator: one engine per policy and rate, and a cluster of four."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for policy in policies or sorted(batching.POLICIES):
        results[policy] = {}
        for rate in rates:
            workload = proserve("sharegpt", rate, requests, seed)
            results[policy][f"{rate:g}/s"] = alone(workload, policy).as_dict()
        workload = proserve("sharegpt", rates[0] * REPLICAS, requests, seed)
        name = f"{REPLICAS} x {rates[0]:g}/s"
        results[policy][name] = clustered(workload, policy, router).as_dict()
    table = Table(title=f"simulated batches per minute, {requests} requests, seed {seed}")
    for heading in ("policy", "load", "live", "batches", "per minute", "us per batch"):
        table.add_column(heading, justify="left" if heading in ("policy", "load") else "right")
    for policy, loads in results.items():
        for load, row in loads.items():
            table.add_row(
                policy,
                load,
                f"{row['mean_live']:.0f}",
                f"{row['batches']:,.0f}",
                f"{row['batches_per_minute']:,.0f}",
                f"{row['us_per_batch']:.0f}",
            )
    show(results, [table], as_json)


if __name__ == "__main__":
    main()
