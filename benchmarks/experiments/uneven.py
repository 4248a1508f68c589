"""Routers in non-ideal clusters: stale reports, heterogeneous replicas, a slow replica."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, pivot
from sluice.benchmarks.experiments.clusters import (
    DEFAULT,
    METRICS,
    Layout,
    System,
    against_rivals,
    cluster_cells,
    colocated,
)
from sluice.benchmarks.experiments.default_policy import DEFAULT as LOCAL
from sluice.benchmarks.experiments.engines import SETUPS, Contender
from sluice.benchmarks.experiments.loads import GENERATED, Span
from sluice.benchmarks.experiments.routers import GENERATED_NORMAL, QUICK_ROUTERS, SETTING
from sluice.scheduling.routing import POLICIES as ROUTERS
from sluice.simulation.config import Slowdown

CELL = ("workload", "cluster", "load")
REPLICAS = 8

AGES: dict[str, dict[str, float]] = {
    "25 ms, 2 ms late": {},
    "50 ms late": {"report_delay_s": 0.05},
    "200 ms late": {"report_delay_s": 0.2},
    "1 s late": {"report_delay_s": 1.0},
    "every 200 ms": {"report_interval_s": 0.2},
    "every 1 s": {"report_interval_s": 1.0},
    "half lost": {"report_loss": 0.5},
    "half lost, 200 ms late": {"report_loss": 0.5, "report_delay_s": 0.2},
}
"""By name: how the reports differ from production's."""


def _cells(plan: Plan, layouts: Sequence[Layout]) -> list[Cell]:
    routers = plan.pick(QUICK_ROUTERS, tuple(ROUTERS), tuple(ROUTERS))
    loads = plan.pick([1.1], [1.1], [0.7, 0.9, 1.05, 1.2, 1.5])
    span = plan.pick(Span(1.0, 5, 8), Span(15.0, 40, 150), Span(120.0, 100, 2_000))
    systems = [System(router, Contender(LOCAL, LOCAL)) for router in routers]
    grid = []
    for workload in plan.pick(GENERATED_NORMAL[:1], GENERATED_NORMAL, tuple(GENERATED)):
        for layout in layouts:
            labels = {"workload": workload, "cluster": layout.name}
            make = GENERATED[workload]
            grid += cluster_cells(labels, make, SETUPS["8b"], layout, loads, systems, span)
    return grid


def age_cells(plan: Plan) -> list[Cell]:
    """Workloads x ages of the reports x loads x routers."""
    names = plan.pick(("25 ms, 2 ms late", "1 s late"), tuple(AGES), tuple(AGES))
    return _cells(plan, [colocated(REPLICAS, **AGES[name])._replace(name=name) for name in names])


def mixed_cells(plan: Plan) -> list[Cell]:
    """Workloads x shares of fast replicas x loads x routers."""
    counts = plan.pick((2,), (2, 4), (1, 2, 4, 6))
    layouts = [
        colocated(REPLICAS)._replace(
            name=f"{fast} fast, {REPLICAS - fast} others", nodes=(SETUPS["8b-fast"],) * fast
        )
        for fast in counts
    ]
    return _cells(plan, layouts)


def slow_cells(plan: Plan) -> list[Cell]:
    """Workloads x slowdowns of one replica x loads x routers."""
    from_s = plan.pick(0.2, 3.0, 10.0)
    layouts = [
        colocated(REPLICAS)._replace(
            name=f"one {factor:g} times slower", incidents=(Slowdown(from_s, 0, factor),)
        )
        for factor in plan.pick((3.0,), (1.5, 3.0), (1.5, 2.0, 3.0, 4.0))
    ]
    return _cells(plan, layouts)


def findings(rows: Sequence[Row]) -> Findings:
    """Every router by cluster, and the default against each."""
    tables = [
        pivot(f"{words}, mean over workloads and loads", rows, ["router"], "cluster", figure)
        for figure, words in METRICS.items()
    ]
    return Findings([*tables, against_rivals(rows, CELL)])


_COMMON = {name: words for name, words in SETTING.items() if name != "Reports"} | {
    "Local policy": LOCAL,
    "Replicas": f"{REPLICAS}, co-located",
}

STALE = Experiment(
    name="stale_mirror",
    source=f"ours; the default router is {DEFAULT}",
    question="What do late and lost reports cost each router?",
    setting={
        **_COMMON,
        "Reports": "as named: interval, delay, share lost; the rest as in production",
    },
    seeds=2,
    cells=age_cells,
    findings=findings,
)

HETEROGENEOUS = Experiment(
    name="heterogeneous",
    source=f"ours; the default router is {DEFAULT}",
    question="Which router uses fast and slow replicas in proportion?",
    setting={
        **_COMMON,
        "Latency": "setups 8b-fast (5 ms and 25 us a token) and 8b (9 ms and 80 us); each replica "
        "reports its own corrected profile; load 1 is the sum of each replica's load 1",
    },
    seeds=2,
    cells=mixed_cells,
    findings=findings,
)

SLOW = Experiment(
    name="slow_node",
    source=f"ours; the default router is {DEFAULT}",
    question="Which router notices that a replica has become slow?",
    setting={
        **_COMMON,
        "Slow replica": "every step takes longer from 3 s on (10 s in full scale); its planner "
        "learns this from its steps and reports it; loads are relative to the cluster before",
    },
    seeds=2,
    cells=slow_cells,
    findings=findings,
)
