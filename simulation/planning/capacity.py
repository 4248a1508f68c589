"""What ``sluice simulate`` measures: recorded traffic on a simulated fleet of replicas."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.scheduling import batching, routing
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO
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
from sluice.simulation.workload import (
    AS_RECORDED,
    Arrival,
    Workload,
    merged,
    stretched,
    thinned,
    with_objectives,
)
from sluice.simulation.workloads.traces import MAX_REQUESTS, load
from sluice.simulation.wrapped import Wrapped

NOISE = 0.03
"""Standard deviation of the logarithm of a step's time around the profile."""

MOST_TOKENS = 100_000_000
"""Output tokens of a workload; a run keeps the time of each, 8 bytes."""

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")

Figures = dict[str, float]


class OutOfTimeError(RuntimeError):
    """A run was stopped, as the time for the search was up."""


class SharedClass(NamedTuple):
    """A service class: its objective, and its share of the requests relative to the others'."""

    slo: SLO
    share: float


class Traffic(NamedTuple):
    """What arrives: a trace, its rate changed, its requests spread over service classes.

    Attributes:
        path: the trace's file.
        limit: most requests that are read of it.
        rate_scale: factor on the rate, see :func:`scaled`.
        stretch: factor on all arrival times before that.
        classes: every request is drawn into one of them, independently.
    """

    path: Path
    limit: int
    rate_scale: float
    stretch: float
    classes: tuple[SharedClass, ...]

    def workload(self, seed: int) -> Workload:
        """The requests; random values are drawn by ``seed``.

        A request's task class, by which output lengths are predicted, is its service class, as in
        a replica.

        Raises:
            TraceError: the trace cannot be read.
            ValueError: scaling leaves no request or too many, or they have too many tokens.
        """
        made = _trace(self.path, self.limit)
        if self.stretch != 1:
            made = stretched(made, self.stretch)
        made = scaled(made, self.rate_scale, seed)
        if not len(made):
            raise ValueError(f"a rate scale of {self.rate_scale:g} leaves no request of the trace")
        tokens = sum(arrival.output_tokens for arrival in made.arrivals)
        if tokens > MOST_TOKENS:
            raise ValueError(
                f"{len(made)} requests have {tokens} output tokens, more than {MOST_TOKENS}; take "
                "fewer requests"
            )
        rng = random.Random(f"classes {seed}")
        slos = [each.slo for each in self.classes]
        drawn = iter(rng.choices(slos, [each.share for each in self.classes], k=len(made)))
        made = with_objectives(made, lambda _: next(drawn), "Service classes drawn by share.")
        named = tuple(a._replace(task=a.slo.service_class) for a in made.arrivals)
        return replace(made, arrivals=named)


@lru_cache(maxsize=1)
def _trace(path: Path, limit: int) -> Workload:
    return load(path, limit=limit)


def scaled(workload: Workload, factor: float, seed: int) -> Workload:
    """``factor`` times as many requests in the same time, as from ``factor`` times as many users.

    Below 1 requests are thinned out. Above 1 whole copies are added to the workload, and a part of
    a last one. Each copy is rotated in time by a different amount, so that bursts do not coincide;
    copies share no prefixes with each other.

    Raises:
        ValueError: the result has more than
            :data:`~sluice.simulation.workloads.traces.MAX_REQUESTS`.
    """
    if factor == 1 or not len(workload):
        return workload
    if factor < 1:
        return thinned(workload, factor, seed)
    if factor * len(workload) > MAX_REQUESTS:
        raise ValueError(
            f"{factor:g} times {len(workload)} requests are more than {MAX_REQUESTS}; take fewer "
            "of the trace, or a smaller factor"
        )
    rng = random.Random(f"copies {seed}")
    copies = [workload]
    while len(copies) < int(factor):
        copies.append(_turned(workload, rng.random()))
    if rest := factor - int(factor):
        copies.append(thinned(_turned(workload, rng.random()), rest, seed))
    how = f"rate times {factor:g} by copies turned in time (seed {seed})"
    if workload.scaling != AS_RECORDED:
        how = f"{workload.scaling}, then {how}"
    whole = merged(workload.name, copies)
    return replace(whole, scaling=how, description=workload.description)


def _turned(workload: Workload, share: float) -> Workload:
    """Begin at ``share`` of the time; earlier requests follow at the end, a mean gap later."""
    span_s = workload.duration_s * len(workload) / max(len(workload) - 1, 1)
    by_s = share * span_s

    def moved(arrival: Arrival) -> Arrival:
        at_s = arrival.arrival_s - by_s
        return arrival._replace(arrival_s=at_s if at_s >= 0 else at_s + span_s)

    arrivals = sorted(map(moved, workload.arrivals), key=lambda arrival: arrival.arrival_s)
    return replace(workload, arrivals=tuple(arrivals))


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
        stop_at_s: on the host's monotonic clock; a run that lasts longer is given up.
    """

    traffic: Traffic
    fleet: PlannedFleet
    metric: TPOTMetric | None
    sizes: Sizes
    seed: int
    stop_at_s: float


class Measured(NamedTuple):
    """The figures of a run, of all requests and of those of each service class.

    Each has ``requests``, ``attainment`` and :data:`LATENCIES`, of the requests that have the
    figure; all together also ``utilisation`` (share of the replicas' time in steps),
    ``failed`` (requests that ended without all their output) and ``preemptions``.
    """

    whole: Figures
    classes: dict[str, Figures]


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


def measure(run: Run) -> Measured:
    """Simulate ``run``.

    Raises:
        OutOfTimeError: it lasted longer than it may.
        StuckError: a replica could run nothing, as when one request needs more KV than there is.
    """
    workload, fleet = run.traffic.workload(run.seed), run.fleet
    both, prefillers, decoders = run.sizes
    counts = {"replicas": both, "prefillers": prefillers, "decoders": decoders}

    def batch(role: Role) -> BatchPolicy:
        policy = batching.make_policy(fleet.policy, fleet.policy_options, role=role)
        return _Timed(policy, run.stop_at_s)

    routing_options = dict(fleet.routing_options)
    if "seed" in routing.POLICIES[fleet.routing].Options.model_fields:
        routing_options.setdefault("seed", run.seed)
    result = simulate_cluster(
        workload,
        batch,
        routing.make_policy(fleet.routing, routing_options),
        Truth(fleet.model, NOISE),
        Belief(fleet.model.with_headroom(fleet.headroom)),
        fleet.engine,
        fleet.cluster.model_copy(update=counts),
        seed=run.seed,
    )
    requests = result.requests
    measured = stages(requests)
    met = attained(requests, measured, run.metric)
    ttft_s = measured.ttft_s[requests.first_stage[:-1]]
    tpot_s = worst_by_request(requests, measured, judged_tpot_s(requests, measured, run.metric))
    names = np.array([slo.service_class for slo in requests.slos])
    whole = _figures(met, ttft_s, tpot_s, np.ones(len(requests), np.bool_))
    whole["utilisation"] = result.busy_s / result.up_s if result.up_s > 0 else nan
    whole["failed"] = float(len(requests.failures))
    whole["preemptions"] = float(result.preemptions)
    classes = {
        each.slo.service_class: _figures(met, ttft_s, tpot_s, names == each.slo.service_class)
        for each in run.traffic.classes
    }
    return Measured(whole, classes)


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
