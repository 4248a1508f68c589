"""Admission on a cluster: how many requests are guaranteed, how many guarantees are kept, and what
the other requests get."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, Value, pivot
from sluice.benchmarks.experiments.clusters import (
    DEFAULT,
    METRICS,
    System,
    cluster_cells,
    colocated,
)
from sluice.benchmarks.experiments.default_policy import DEFAULT as LOCAL
from sluice.benchmarks.experiments.engines import SETUPS, Contender
from sluice.benchmarks.experiments.loads import GENERATED, Span
from sluice.benchmarks.experiments.routers import GENERATED_NORMAL, SETTING
from sluice.scheduling.admission import POLICIES
from sluice.simulation.config import WhenUnattainable

FIGURES = {
    **METRICS,
    "promised": "share of requests that were guaranteed",
    "kept": "share of the guaranteed requests that met every objective",
    "best_effort_met": "share of the best-effort requests that met every objective",
    "refused": "share of requests that were refused",
    "ttft_over_p50": "first token, observed over predicted, median",
    "ttft_over_p90": "first token, observed over predicted, P90",
}


def cells(plan: Plan) -> list[Cell]:
    """Workloads x loads x admission policies x what happens to requests without a guarantee."""
    outcomes: tuple[WhenUnattainable, ...] = ("best_effort", "reject", "queue")
    systems = [System(DEFAULT, Contender("none", LOCAL))]
    systems += [
        System(DEFAULT, Contender(f"{name}, {outcome}", LOCAL), name, outcome)
        for name in POLICIES
        for outcome in plan.pick(outcomes[:2], outcomes, outcomes)
    ]
    loads = plan.pick([1.3], [0.8, 1.1, 1.5], [0.6, 0.8, 1.0, 1.2, 1.5, 2.0])
    span = plan.pick(Span(1.0, 5, 8), Span(15.0, 40, 150), Span(120.0, 100, 2_000))
    layout = colocated(plan.pick(2, 8, 8))
    grid = []
    for workload in plan.pick(GENERATED_NORMAL[:1], GENERATED_NORMAL, tuple(GENERATED)):
        labels: dict[str, Value] = {"workload": workload}
        make = GENERATED[workload]
        grid += cluster_cells(labels, make, SETUPS["8b"], layout, loads, systems, span)
    return grid


def findings(rows: Sequence[Row]) -> Findings:
    """Every figure by admission and load, mean over workloads."""
    return Findings(
        [pivot(words, rows, ["policy"], "load", figure) for figure, words in FIGURES.items()]
    )


EXPERIMENT = Experiment(
    name="admission",
    source="ours; FairBatching §3.4 (pab), SLOs-Serve §4 (two tiers)",
    question="How many requests are guaranteed, are the guarantees kept, and what do the requests "
    "get that no replica can guarantee?",
    setting={
        **SETTING,
        "Admission": "as named, and what happens to a request that no replica can guarantee: it is "
        "served on the capacity that guaranteed requests leave, refused, or queued at the router "
        "until a replica can guarantee it or its first token is due",
        "Local policy": LOCAL,
        "Replicas": "8, co-located, behind the default router",
    },
    seeds=2,
    cells=cells,
    findings=findings,
)
