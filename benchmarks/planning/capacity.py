"""What ``sluice simulate`` measures: recorded traffic on a simulated fleet of replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sluice.benchmarks.planning.traffic import SharedClass, Traffic
from sluice.scheduling import batching, routing
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.roles import Role
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.metrics import (
    Flags,
    TPOTMetric,
    attained,
    judged_tpot_s,
    stages,
    worst_by_request,
)
from sluice.simulation.truth import Belief, Truth
from sluice.simulation.wrapped import Wrapped

NOISE = 0.03
"""Standard deviation of the logarithm of a step's time around the profile."""

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")

Figures = dict[str, float]


class OutOfTimeError(RuntimeError):
    """A run was stopped, as the time for the search was up."""


class PlannedFleet(NamedTuple):
    """How it is served: every replica alike, behind one router.

    Attributes:
        model: step times, which planners believe in and correct online; real ones have noise.
        engine: limits of a replica.
        cluster: how the router learns of replicas, and how long KV takes from one to another; the
            numbers of replicas are set by the run.
        policy, policy_options: the replicas' batch policy.
        routing, routing_options: the routing policy.
        headroom: of the planners, a factor on the step times that they believe in.
    """

    model: LatencyModel
    engine: EngineConfig
    cluster: ClusterConfig
    policy: str
    policy_options: Mapping[str, Any]
    routing: str
    routing_options: Mapping[str, Any]
    headroom: float


class Sizes(NamedTuple):
    """Replicas that do both phases of a request, that prefill, and that decode."""

    both: int = 0
    prefillers: int = 0
    decoders: int = 0


class Run(NamedTuple):
    """One simulated run.

    Attributes:
        traffic, fleet: the requests, and the replicas that serve them.
        metric: which TPOT is judged; ``None``: by the anchor of each class.
        sizes: how many replicas.
        seed: of all that is drawn.
        part: which part of the traffic is played.
        stop_at_s: on the host's monotonic clock; a run that lasts longer is given up.
    """

    traffic: Traffic
    fleet: PlannedFleet
    metric: TPOTMetric | None
    sizes: Sizes
    seed: int
    part: int
    stop_at_s: float


class Judged(NamedTuple):
    """The judged requests of a run: whether each attained, whether it failed, its TTFT and its TPOT
    in seconds, and its service class. And of the whole run, margins of a window included, the
    seconds that replicas were busy and up, and preemptions."""

    met: Flags
    failed: Flags
    ttft_s: Floats
    tpot_s: Floats
    names: NDArray[np.str_]
    busy_s: float
    up_s: float
    preemptions: int


class Measured(NamedTuple):
    """The figures of all runs of a seed, of all judged requests and of those of each service class.

    Each has ``requests``, ``attainment`` and :data:`LATENCIES`, of the requests that have the
    figure; all together also ``failed`` (requests that ended without all their output),
    ``utilisation`` (share of the replicas' time in steps) and ``preemptions``.
    """

    whole: Figures
    classes: dict[str, Figures]

    @classmethod
    def of(cls, runs: Sequence[Judged], classes: Sequence[SharedClass]) -> Self:
        """The figures of ``runs``, of each of ``classes``.

        Raises:
            ValueError: no request was judged.
        """
        met, failed, ttft_s, tpot_s, names = (
            np.concatenate(each) for each in zip(*(run[:5] for run in runs), strict=True)
        )
        if not len(met):
            raise ValueError("no request of the trace comes in any of the windows")
        busy_s, up_s, preemptions = (
            sum(each) for each in zip(*(run[5:] for run in runs), strict=True)
        )
        whole = _figures(met, ttft_s, tpot_s, np.ones(len(met), np.bool_))
        whole["utilisation"] = busy_s / up_s if up_s > 0 else nan
        whole["failed"] = float(failed.sum())
        whole["preemptions"] = float(preemptions)
        chosen = {name: names == name for name in (each.slo.service_class for each in classes)}
        by_class = {name: _figures(met, ttft_s, tpot_s, own) for name, own in chosen.items()}
        return cls(whole, by_class)


class _Timed(Wrapped):
    """Plans as ``inner`` does, until the time is up."""

    def __init__(self, inner: BatchPolicy, stop_at_s: float) -> None:
        super().__init__(inner)
        self._stop_at_s = stop_at_s

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        if time.monotonic() >= self._stop_at_s:
            raise OutOfTimeError("the time limit was reached")
        return super().plan(queue, now_s, latency, budget)


def play(run: Run) -> Judged:
    """Simulate ``run``.

    Raises:
        OutOfTimeError: it lasted longer than it may.
        StuckError: a replica could run nothing, as when one request needs more KV than there is.
    """
    played, fleet = run.traffic.played(run.seed, run.part), run.fleet
    both, prefillers, decoders = run.sizes
    counts = {"replicas": both, "prefillers": prefillers, "decoders": decoders}

    def batch(role: Role) -> BatchPolicy:
        policy = batching.make_policy(fleet.policy, fleet.policy_options, role=role)
        return _Timed(policy, run.stop_at_s)

    routing_options = dict(fleet.routing_options)
    if "seed" in routing.POLICIES[fleet.routing].Options.model_fields:
        routing_options.setdefault("seed", run.seed)
    result = simulate_cluster(
        played.workload,
        batch,
        routing.make_policy(fleet.routing, routing_options),
        Truth(fleet.model, NOISE),
        Belief(fleet.model.with_headroom(fleet.headroom)),
        fleet.engine,
        fleet.cluster.model_copy(update=counts),
        seed=played.seed,
    )
    requests, chosen = result.requests, played.judged()
    measured = stages(requests)
    tpot_s = worst_by_request(requests, measured, judged_tpot_s(requests, measured, run.metric))
    return Judged(
        attained(requests, measured, run.metric)[chosen],
        np.array([key in requests.failures for key in chosen.tolist()], np.bool_),
        measured.ttft_s[requests.first_stage[:-1]][chosen],
        tpot_s[chosen],
        np.array([requests.slos[key].service_class for key in chosen.tolist()], np.str_),
        result.busy_s,
        result.up_s,
        result.preemptions,
    )


def _figures(met: Flags, ttft_s: Floats, tpot_s: Floats, chosen: Flags) -> Figures:
    """Of the ``chosen`` requests; nan where none of them has the figure."""
    count = int(chosen.sum())
    found = {"requests": float(count), "attainment": float(met[chosen].mean()) if count else nan}
    latencies = []
    for values in (ttft_s[chosen], tpot_s[chosen]):
        known = values[~np.isnan(values)]
        quantiles = np.quantile(known, (0.5, 0.99)) if len(known) else np.full(2, nan)
        latencies += (1e3 * quantiles).tolist()
    return found | dict(zip(LATENCIES, latencies, strict=True))
