"""Several simulated engines behind a router: the setup and figures of all cluster experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments.base import Cell, Row, Value, difference, estimate, grouped
from sluice.benchmarks.experiments.default_policy import STATIC
from sluice.benchmarks.experiments.engines import NOISE, Contender, Run, Setup, figures
from sluice.benchmarks.experiments.loads import (
    SAMPLE,
    Make,
    Span,
    full_load_rate,
    least_tpot_s,
    profiled_budget,
)
from sluice.controller.config import ControllerConfig
from sluice.scheduling import admission as admissions
from sluice.scheduling import batching, routing
from sluice.scheduling.length import OracleLengths, TaskLengths
from sluice.scheduling.objective import SLO, GainWeights
from sluice.scheduling.roles import Role
from sluice.simulation.cluster import REFUSED, Incident, Node, simulate_cluster
from sluice.simulation.config import Autoscaling, ClusterConfig, WhenUnattainable
from sluice.simulation.metrics import TPOTMetric, attained, deadline_gain, stages
from sluice.simulation.planning.plots import Table
from sluice.simulation.run import HEADROOM
from sluice.simulation.truth import Belief, Truth
from sluice.simulation.workload import Workload

DEFAULT = ControllerConfig().policy
"""The router that a controller has by default"""

ADMISSION = ControllerConfig().admission
"""The admission policy that a controller has by default."""

RIVALS = ("pab", "least_tokens", "go_routing")
"""The routers that the default should never be worse than."""

LOAD_WORDS = "the load is that of each replica; with separate prefill and decode, of all together"
MARGIN = 0.01
"""A cell in which the default is lower by more than this counts as lost."""


class Layout(NamedTuple):
    """The replicas of a cluster.

    Attributes:
        name: as shown in tables.
        cluster: how many of each role, and how they report to the router.
        nodes: the setups of the first replicas, where they differ from the experiment's.
        incidents: what happens to replicas during the run.
    """

    name: str
    cluster: ClusterConfig
    nodes: tuple[Setup, ...] = ()
    incidents: tuple[Incident, ...] = ()

    @property
    def size(self) -> int:
        """Replicas at the start."""
        return sum(self.cluster.counts.values())


def colocated(replicas: int, **changes: Any) -> Layout:
    """``replicas`` that prefill and decode, with ``changes`` to the cluster's configuration."""
    return Layout("co-located", ClusterConfig(replicas=replicas, **changes))


def of_roles(name: str, mixed: int = 0, prefillers: int = 0, decoders: int = 0) -> Layout:
    """The given number of replicas of each role."""
    cluster = ClusterConfig(replicas=mixed, prefillers=prefillers, decoders=decoders)
    return Layout(name, cluster)


def disaggregated(replicas: int) -> Layout:
    """``replicas``, a quarter of which only decode: with these workloads the prefill side is then
    the busier one, as in the papers' runs."""
    decoders = max(1, replicas // 4)
    return of_roles("disaggregated", prefillers=replicas - decoders, decoders=decoders)


class System(NamedTuple):
    """A router, and the policy of every replica behind it.

    Attributes:
        router: registered name.
        local: the replicas' policy.
        admission: registered name of the admission policy; ``None``: no request is guaranteed.
        unattainable: what happens to a request whose objective no replica can guarantee.
    """

    router: str
    local: Contender
    admission: str | None = None
    unattainable: WhenUnattainable = "best_effort"


def local_policies(names: Sequence[str], make: Make, setup: Setup) -> list[Contender]:
    """Local policies with their default options; a static token budget is profiled."""
    budget = profiled_budget(setup, least_tpot_s(make(setup, 1.0, SAMPLE, 0)))
    return [
        Contender(name, name, {"token_budget": budget} if name in STATIC else {}) for name in names
    ]


def make_router(name: str, seed: int) -> routing.RoutingPolicy:
    """A router with its default options; a randomized one gets the run's seed."""
    draws = "seed" in routing.POLICIES[name].Options.model_fields
    return routing.make_policy(name, {"seed": seed} if draws else {})


def node_of(setup: Setup) -> Node:
    """A setup with the experiments' noise and head-room."""
    belief = Belief(setup.believed.with_headroom(HEADROOM))
    return Node(Truth(setup.truth, NOISE), belief, setup.engine)


def run(
    workload: Workload,
    system: System,
    setup: Setup,
    layout: Layout,
    seed: int,
    oracle: bool = False,
    autoscaling: Autoscaling | None = None,
) -> Run:
    """One run.

    Args:
        workload: what arrives.
        system: router, local policy and admission policy.
        setup: of the replicas that ``layout`` does not name.
        layout: the replicas.
        seed: of the noise, of lost reports and of randomized routers.
        oracle: see :func:`sluice.benchmarks.experiments.engines.run`.
        autoscaling: changes the numbers of replicas that ``layout`` begins with; ``None``: they
            are fixed.
    """
    local = system.local

    def make_batch(role: Role) -> batching.BatchPolicy:
        return batching.make_policy(local.policy, local.options)

    # Workloads name no service class: all requests are of the usual one.
    when = {SLO().service_class: system.unattainable}
    admission = system.admission
    usual = node_of(setup)
    lengths = (arrival.output_tokens for arrival in workload.arrivals)
    result = simulate_cluster(
        workload,
        make_batch,
        make_router(system.router, seed),
        usual.truth,
        usual.belief,
        usual.engine,
        layout.cluster.model_copy(update={"when_unattainable": when}),
        layout.incidents,
        seed,
        OracleLengths(lengths, 0.0, seed) if oracle else TaskLengths(),
        admission=admissions.make_policy(admission) if admission is not None else None,
        nodes=[node_of(own) for own in layout.nodes],
        autoscaling=autoscaling,
    )
    failures = result.requests.failures
    return Run(result, frozenset(key for key, why in failures.items() if why == REFUSED))


def cluster_figures(done: Run) -> dict[str, float]:
    """The figures of one engine (:func:`sluice.benchmarks.experiments.engines.figures`), the TDG
    ratio of first tokens alone, the requests in time per second of a replica, the KV transfers per
    request, and the figures of admission.

    ``promised``, ``best_effort``: shares of all requests; ``kept``, ``best_effort_met``: of these,
    the shares that attained; ``ttft_over_p50``, ``ttft_over_p90``: quantiles of the TTFT over the
    TTFT predicted at admission. nan where there are none.
    """
    requests = done.result.requests
    measured = stages(requests)
    first = deadline_gain(requests, measured, GainWeights(first=1.0, later=0.0))
    found = {**figures(done), "tdg_first": first.ratio, "moved": float(done.result.moved)}
    met = attained(requests, measured, TPOTMetric.MEAN)
    found["goodput"] = float(met.sum()) / done.result.up_s
    found["split"] = done.result.split / len(requests)
    ttft_s = measured.ttft_s[requests.first_stage[:-1]]
    promised = ~np.isnan(requests.promised_s)
    for name, kept, tier in (
        ("promised", "kept", promised),
        ("best_effort", "best_effort_met", requests.best_effort),
    ):
        found[name] = float(tier.mean())
        found[kept] = float(met[tier].mean()) if tier.any() else nan
    over = (ttft_s / requests.promised_s)[promised & ~np.isnan(ttft_s)]
    for percent in (50, 90):
        found[f"ttft_over_p{percent}"] = float(np.percentile(over, percent)) if len(over) else nan
    return found


def measure(
    make: Make,
    setup: Setup,
    rate: float,
    requests: int,
    system: System,
    layout: Layout,
    seed: int,
) -> Mapping[str, float]:
    """The figures of one run of a cell."""
    workload = make(setup, rate, requests, seed)
    return cluster_figures(run(workload, system, setup, layout, seed))


def cluster_rate(make: Make, setup: Setup, layout: Layout) -> float:
    """Requests per second that are load 1 of all replicas together."""
    others = layout.size - len(layout.nodes)
    of_node = {node.name: full_load_rate(make, node) for node in layout.nodes}
    rate = others * full_load_rate(make, setup) if others else 0.0
    return rate + sum(of_node[node.name] for node in layout.nodes)


def cluster_cells(
    labels: Mapping[str, Value],
    make: Make,
    setup: Setup,
    layout: Layout,
    loads: Sequence[float],
    systems: Sequence[System],
    span: Span,
) -> list[Cell]:
    """A cell per load and system, with the labels ``load``, ``router`` and ``policy`` added.

    Args:
        labels: of all cells.
        make: the workload.
        setup: of the replicas that ``layout`` does not name.
        layout: the replicas.
        loads: shares of :func:`cluster_rate`.
        systems: to compare.
        span: of the arrivals; its numbers of requests apply to each replica.
    """
    full = cluster_rate(make, setup, layout)
    cells = []
    for load in loads:
        rate = load * full
        requests = span.requests(rate / layout.size) * layout.size
        for system in systems:
            names = {"router": system.router, "policy": system.local.label}
            measured = partial(measure, make, setup, rate, requests, system, layout)
            cells.append(Cell({**labels, "load": load, **names}, measured))
    return cells


def of_router(rows: Sequence[Row], router: str) -> list[Row]:
    """The rows of one router."""
    return [row for row in rows if row["router"] == router]


METRICS = {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio, envelope"}


def against_rivals(rows: Sequence[Row], cell: Sequence[str]) -> Table:
    """The default router against every other: mean lead, and the cells where it loses.

    Args:
        rows: of all routers.
        cell: labels that, with the router, name a cell.
    """
    lines = []
    ours = of_router(rows, DEFAULT)
    cells = grouped(rows, *cell)
    for figure, words in METRICS.items():
        lines.append((words, f"{DEFAULT} (default)", estimate(ours, figure).shown(4), "", "", ""))
        for (router,), theirs in grouped(rows, "router").items():
            if router == DEFAULT:
                continue
            # Some routers are not measured in every cell.
            names = grouped(theirs, *cell)
            both = [row for name in names for row in of_router(cells[name], DEFAULT)]
            leads = [
                difference(of_router(cells[name], DEFAULT), own, figure).mean
                for name, own in names.items()
            ]
            lines.append(
                (
                    words,
                    str(router),
                    estimate(theirs, figure).shown(4),
                    difference(both, theirs, figure).shown(4),
                    f"{min(leads) * 100:+.2f}",
                    f"{sum(lead < -MARGIN for lead in leads)} of {len(leads)}",
                )
            )
    return Table(
        "The default router against every other, over all cells",
        (
            "figure",
            "router",
            "mean",
            "lead of the default",
            "worst cell, points",
            "default > 1 point below",
        ),
        lines,
        "Leads are paired by seed, over the cells in which the router was measured.",
    )


def against_best(rows: Sequence[Row], cell: Sequence[str], rivals: Sequence[str]) -> Table:
    """By cell: the default, and its lead over the best of ``rivals`` there, after the fact."""
    lines = []
    known = [name for name in rivals if name != DEFAULT and of_router(rows, name)]
    for labels, own in grouped(rows, *cell).items():
        line = [label if isinstance(label, str) else f"{label:g}" for label in labels]
        for figure in METRICS:
            means = {name: estimate(of_router(own, name), figure).mean for name in known}
            best = max(known, key=lambda name: means[name])
            lead = difference(of_router(own, DEFAULT), of_router(own, best), figure)
            value = estimate(of_router(own, DEFAULT), figure).mean
            line.append(f"{value:.3f} ({lead.mean:+.3f} {best})")
        lines.append(line)
    return Table(
        f"By cell: {DEFAULT} (its lead over the best of {', '.join(known)})",
        (*cell, *METRICS.values()),
        lines,
    )
