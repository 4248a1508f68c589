"""Every router with several local policies, on 4 to 32 replicas, co-located and disaggregated."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.benchmarks.experiments.base import (
    Cell,
    Experiment,
    Findings,
    Plan,
    Row,
    Value,
    chart,
    grouped,
    pivot,
)
from sluice.benchmarks.experiments.clusters import (
    DEFAULT,
    LOAD_WORDS,
    METRICS,
    RIVALS,
    Layout,
    System,
    against_best,
    against_rivals,
    cluster_cells,
    colocated,
    disaggregated,
    local_policies,
)
from sluice.benchmarks.experiments.default_policy import DEFAULT as LOCAL
from sluice.benchmarks.experiments.engines import SETUPS
from sluice.benchmarks.experiments.loads import GENERATED, Make, Span, recorded
from sluice.benchmarks.experiments.loads import LOAD_WORDS as ENGINE_LOAD_WORDS
from sluice.scheduling.batching import POLICIES as LOCAL_POLICIES
from sluice.scheduling.routing import POLICIES as ROUTERS

CELL = ("workload", "layout", "replicas", "load", "policy")
QUICK_ROUTERS = tuple(dict.fromkeys(("round_robin", "least_tokens", "pab", DEFAULT)))
GENERATED_NORMAL = ("proserve azure", "slos-serve mixed")
GENERATED_FULL = ("proserve sharegpt", "proserve azure", "proserve bursty", "slos-serve mixed")

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope",
    "Arrivals": f"generated, or recorded and stretched; {ENGINE_LOAD_WORDS}; {LOAD_WORDS}",
    "Objectives and priorities": "each workload's own, as in default_policy",
    "Latency": "setup 8b of benchmarks/experiments/engines.py; 3 % noise, 5 % head-room, online "
    "correction",
    "Reports": "every 25 ms, known 2 ms later; a router's own decisions count at once",
    "Admission": "none: every request is placed and served",
}


def workloads(plan: Plan) -> dict[str, Make]:
    """Generated workloads, and traces stretched to the wanted rate: a cluster's rate is above the
    traces' own, so none is thinned."""
    names = plan.pick(GENERATED_NORMAL[:1], GENERATED_NORMAL, GENERATED_FULL)
    traces = {
        name: make for name, make in recorded(plan.traces).items() if name.endswith("(stretched)")
    }
    return {name: GENERATED[name] for name in names} | traces


def _cells(
    plan: Plan, layouts: Sequence[Layout], policies: Sequence[str], routers: Sequence[str]
) -> list[Cell]:
    setup = SETUPS["8b"]
    loads = plan.pick([1.1], [0.9, 1.2], [0.7, 0.9, 1.05, 1.2, 1.5])
    span = plan.pick(Span(1.0, 5, 8), Span(15.0, 40, 150), Span(120.0, 100, 2_000))
    grid = []
    for workload, make in workloads(plan).items():
        systems = [
            System(router, local)
            for local in local_policies(policies, make, setup)
            for router in routers
        ]
        for layout in layouts:
            labels: dict[str, Value] = {
                "workload": workload,
                "layout": layout.name,
                "replicas": float(layout.size),
            }
            grid += cluster_cells(labels, make, setup, layout, loads, systems, span)
    return grid


def _routers(plan: Plan) -> tuple[str, ...]:
    return plan.pick(QUICK_ROUTERS, tuple(ROUTERS), tuple(ROUTERS))


def colocated_cells(plan: Plan) -> list[Cell]:
    """Workloads x sizes x loads x local policies x routers; in normal scale, 32 replicas run
    non-default policies only with the default router and its rivals."""
    few = [router for router in ROUTERS if router == DEFAULT or router in RIVALS]
    small = [colocated(size) for size in plan.pick((4,), (4, 8), (4, 8, 32))]
    large = [colocated(size) for size in plan.pick((), (32,), ())]
    others = plan.pick((), ("slidebatching", "fcfs"), ())
    policies = plan.pick((LOCAL,), (LOCAL, *others), tuple(LOCAL_POLICIES))
    return [
        *_cells(plan, small, policies, _routers(plan)),
        *_cells(plan, large, (LOCAL,), _routers(plan)),
        *_cells(plan, large, others, few),
    ]


def disaggregated_cells(plan: Plan) -> list[Cell]:
    """The same with replicas of each role."""
    sizes = plan.pick((4,), (4, 8, 32), (4, 8, 32))
    policies = plan.pick((LOCAL,), (LOCAL,), (LOCAL, "slidebatching", "fcfs"))
    return _cells(plan, [disaggregated(size) for size in sizes], policies, _routers(plan))


def findings(rows: Sequence[Row]) -> Findings:
    """Every router by size and local policy; the default against each and against the best."""
    tables = [
        pivot(f"{words}, mean over workloads and loads", rows, ["policy", "router"], "replicas", f)
        for f, words in METRICS.items()
    ]
    tables += [against_rivals(rows, CELL), against_best(rows, CELL, RIVALS)]
    own = grouped(rows, "policy").get((LOCAL,), [])
    charts = [
        chart(f"{words}, {LOCAL}", own, "router", "load", figure, words)
        for figure, words in METRICS.items()
    ]
    return Findings(tables, charts)


COLOCATED = Experiment(
    name="routers",
    source="ours; the routers are those of the five papers and the usual baselines",
    question="Which router has the highest SLO attainment, and does the default lose anywhere?",
    setting=SETTING,
    seeds=2,
    cells=colocated_cells,
    findings=findings,
)

DISAGGREGATED = Experiment(
    name="routers_disaggregated",
    source="ours, after ProServe §5.2",
    question="The same with prefill and decode on separate replicas?",
    setting={**SETTING, "Roles": "a quarter of the replicas only decode"},
    seeds=2,
    cells=disaggregated_cells,
    findings=findings,
)
