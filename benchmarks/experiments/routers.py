"""Every router with several local policies, on 4 to 32 replicas, co-located and disaggregated; in
clusters with late reports, fast or slow replicas; and with admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sluice.benchmarks.experiments.grid import (
    Cell,
    Curves,
    Experiment,
    Pivot,
    Plan,
    Rows,
    Value,
    difference,
    estimate,
    grouped,
    having,
    shown,
)
from sluice.benchmarks.experiments.loads import (
    CLUSTER_WORDS,
    GENERATED,
    LOAD_WORDS,
    Make,
    Span,
    contenders,
    recorded,
    sweep,
)
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    Layout,
    System,
    colocated,
    disaggregated,
)
from sluice.scheduling.admission import POLICIES as ADMISSIONS
from sluice.scheduling.batching import POLICIES as LOCAL_POLICIES
from sluice.scheduling.routing import POLICIES as ROUTERS
from sluice.simulation.config import Slowdown, WhenUnattainable
from sluice.simulation.planning.plots import Table

LOCAL = DEFAULT.policy
SETUP = SETUPS["8b"]
RIVALS = ("pab", "least_tokens", "go_routing")
"""The routers that the default should never be worse than."""

QUICK_ROUTERS = tuple(dict.fromkeys(("round_robin", "least_tokens", "pab", ROUTER)))
NORMAL = ("proserve azure", "slos-serve mixed")
FULL = ("proserve sharegpt", "proserve azure", "proserve bursty", "slos-serve mixed")
METRICS = {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio, envelope"}
MARGIN = 0.01
"""A cell in which the default is lower by more than this counts as lost."""

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope",
    "Arrivals": f"generated, or recorded and stretched; {LOAD_WORDS}; {CLUSTER_WORDS}",
    "Objectives and priorities": "each workload's own, as in default_policy",
    "Latency": "setup 8b of benchmarks/experiments/systems.py; 3 % noise, 5 % head-room, online "
    "correction",
    "Reports": "every 25 ms, known 2 ms later; a router's own decisions count at once",
    "Admission": "none: every request is placed and served",
}


def _span(plan: Plan) -> Span:
    return plan.pick(Span(1.0, 5, 8), Span(15.0, 40, 150), Span(120.0, 100, 2_000))


def _routers(plan: Plan) -> tuple[str, ...]:
    return plan.pick(QUICK_ROUTERS, tuple(ROUTERS))


# Sizes and roles.


def workloads(plan: Plan) -> dict[str, Make]:
    """Generated workloads, and traces stretched to the wanted rate: a cluster's rate is above the
    traces' own, so none is thinned."""
    names = plan.pick(NORMAL[:1], NORMAL, FULL)
    traces = {
        name: make for name, make in recorded(plan.traces).items() if name.endswith("(stretched)")
    }
    return {name: GENERATED[name] for name in names} | traces


def _sized(
    plan: Plan, layouts: Sequence[Layout], policies: Sequence[str], routers: Sequence[str]
) -> list[Cell]:
    loads = plan.pick([1.1], [0.9, 1.2], [0.7, 0.9, 1.05, 1.2, 1.5])
    grid = []
    for workload, make in workloads(plan).items():
        kinds = contenders(policies, make, SETUP)
        systems = [System(router, local) for local in kinds for router in routers]
        for layout in layouts:
            labels: dict[str, Value] = {"workload": workload, "layout": layout.name}
            labels["replicas"] = float(layout.size)
            grid += sweep(labels, make, SETUP, loads, systems, _span(plan), layout)
    return grid


def colocated_cells(plan: Plan) -> list[Cell]:
    """Workloads x sizes x loads x local policies x routers; in normal scale, 32 replicas run
    non-default policies only with the default router and its rivals."""
    few = [router for router in ROUTERS if router == ROUTER or router in RIVALS]
    small = [colocated(size) for size in plan.pick((4,), (4, 8), (4, 8, 32))]
    large = [colocated(size) for size in plan.pick((), (32,), ())]
    others = plan.pick((), ("slidebatching", "fcfs"), ())
    policies = plan.pick((LOCAL,), (LOCAL, *others), tuple(LOCAL_POLICIES))
    return [
        *_sized(plan, small, policies, _routers(plan)),
        *_sized(plan, large, (LOCAL,), _routers(plan)),
        *_sized(plan, large, others, few),
    ]


def disaggregated_cells(plan: Plan) -> list[Cell]:
    """The same with replicas of each role."""
    layouts = [disaggregated(size) for size in plan.pick((4,), (4, 8, 32))]
    policies = plan.pick((LOCAL,), (LOCAL,), (LOCAL, "slidebatching", "fcfs"))
    return _sized(plan, layouts, policies, _routers(plan))


def of_router(rows: Rows, router: str) -> Rows:
    """The rows of one router."""
    return having(rows, {"router": router})


def against_rivals(rows: Rows, cell: Sequence[str]) -> Table:
    """The default router against every other: mean lead, and the cells where it loses.

    Args:
        rows: of all routers.
        cell: labels that, with the router, name a cell.
    """
    lines = []
    ours = of_router(rows, ROUTER)
    cells = grouped(rows, *cell)
    for figure, words in METRICS.items():
        lines.append((words, f"{ROUTER} (default)", estimate(ours, figure).shown(4), "", "", ""))
        for (router,), theirs in grouped(rows, "router").items():
            if router == ROUTER:
                continue
            # Some routers are not measured in every cell.
            names = grouped(theirs, *cell)
            both = [row for name in names for row in of_router(cells[name], ROUTER)]
            leads = [
                difference(of_router(cells[name], ROUTER), own, figure).mean
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


def against_best(rows: Rows, cell: Sequence[str], rivals: Sequence[str] = RIVALS) -> Table:
    """By cell: the default, and its lead over the best of ``rivals`` there, after the fact."""
    lines = []
    known = [name for name in rivals if name != ROUTER and of_router(rows, name)]
    for labels, own in grouped(rows, *cell).items():
        line = [*map(shown, labels)]
        for figure in METRICS:
            means = {name: estimate(of_router(own, name), figure).mean for name in known}
            best = max(known, key=lambda name: means[name])
            lead = difference(of_router(own, ROUTER), of_router(own, best), figure)
            value = estimate(of_router(own, ROUTER), figure).mean
            line.append(f"{value:.3f} ({lead.mean:+.3f} {best})")
        lines.append(line)
    return Table(
        f"By cell: {ROUTER} (its lead over the best of {', '.join(known)})",
        (*cell, *METRICS.values()),
        lines,
    )


CELL = ("workload", "layout", "replicas", "load", "policy")
BY_SIZE: Sequence[Callable[[Rows], Table]] = (
    *(
        Pivot(f"{words}, mean over workloads and loads", figure, ("policy", "router"), "replicas")
        for figure, words in METRICS.items()
    ),
    lambda rows: against_rivals(rows, CELL),
    lambda rows: against_best(rows, CELL),
)
BY_LOAD = [
    Curves(f"{words}, {LOCAL}", figure, words, "router", where={"policy": LOCAL})
    for figure, words in METRICS.items()
]

COLOCATED = Experiment(
    name="routers",
    source="ours; the routers are those of the five papers and the usual baselines",
    question="Which router has the highest SLO attainment, and does the default lose anywhere?",
    setting=SETTING,
    seeds=2,
    cells=colocated_cells,
    tables=BY_SIZE,
    charts=BY_LOAD,
)

DISAGGREGATED = Experiment(
    name="routers_disaggregated",
    source="ours, after ProServe §5.2",
    question="The same with prefill and decode on separate replicas?",
    setting={**SETTING, "Roles": "a quarter of the replicas only decode"},
    seeds=2,
    cells=disaggregated_cells,
    tables=BY_SIZE,
    charts=BY_LOAD,
)

# Clusters that are not ideal.

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


def _uneven(plan: Plan, layouts: Sequence[Layout]) -> list[Cell]:
    loads = plan.pick([1.1], [1.1], [0.7, 0.9, 1.05, 1.2, 1.5])
    systems = [System(router) for router in _routers(plan)]
    grid = []
    for workload in plan.pick(NORMAL[:1], NORMAL, tuple(GENERATED)):
        for layout in layouts:
            labels = {"workload": workload, "cluster": layout.name}
            make = GENERATED[workload]
            grid += sweep(labels, make, SETUP, loads, systems, _span(plan), layout)
    return grid


def age_cells(plan: Plan) -> list[Cell]:
    """Workloads x ages of the reports x loads x routers."""
    names = plan.pick(("25 ms, 2 ms late", "1 s late"), tuple(AGES))
    return _uneven(plan, [colocated(REPLICAS, **AGES[name])._replace(name=name) for name in names])


def mixed_cells(plan: Plan) -> list[Cell]:
    """Workloads x shares of fast replicas x loads x routers."""
    layouts = [
        colocated(REPLICAS)._replace(
            name=f"{fast} fast, {REPLICAS - fast} others", nodes=(SETUPS["8b-fast"],) * fast
        )
        for fast in plan.pick((2,), (2, 4), (1, 2, 4, 6))
    ]
    return _uneven(plan, layouts)


def slow_cells(plan: Plan) -> list[Cell]:
    """Workloads x slowdowns of one replica x loads x routers."""
    from_s = plan.pick(0.2, 3.0, 10.0)
    layouts = [
        colocated(REPLICAS)._replace(
            name=f"one {factor:g} times slower", incidents=(Slowdown(from_s, 0, factor),)
        )
        for factor in plan.pick((3.0,), (1.5, 3.0), (1.5, 2.0, 3.0, 4.0))
    ]
    return _uneven(plan, layouts)


BY_CLUSTER: Sequence[Callable[[Rows], Table]] = (
    *(
        Pivot(f"{words}, mean over workloads and loads", figure, ("router",), "cluster")
        for figure, words in METRICS.items()
    ),
    lambda rows: against_rivals(rows, ("workload", "cluster", "load")),
)

UNEVEN = {name: words for name, words in SETTING.items() if name != "Reports"} | {
    "Local policy": LOCAL,
    "Replicas": f"{REPLICAS}, co-located",
}

STALE = Experiment(
    name="stale_mirror",
    source=f"ours; the default router is {ROUTER}",
    question="What do late and lost reports cost each router?",
    setting={
        **UNEVEN,
        "Reports": "as named: interval, delay, share lost; the rest as in production",
    },
    seeds=2,
    cells=age_cells,
    tables=BY_CLUSTER,
)

HETEROGENEOUS = Experiment(
    name="heterogeneous",
    source=f"ours; the default router is {ROUTER}",
    question="Which router uses fast and slow replicas in proportion?",
    setting={
        **UNEVEN,
        "Latency": "setups 8b-fast (5 ms and 25 us a token) and 8b (9 ms and 80 us); each replica "
        "reports its own corrected profile; load 1 is the sum of each replica's load 1",
    },
    seeds=2,
    cells=mixed_cells,
    tables=BY_CLUSTER,
)

SLOW = Experiment(
    name="slow_node",
    source=f"ours; the default router is {ROUTER}",
    question="Which router notices that a replica has become slow?",
    setting={
        **UNEVEN,
        "Slow replica": "every step takes longer from 3 s on (10 s in full scale); its planner "
        "learns this from its steps and reports it; loads are relative to the cluster before",
    },
    seeds=2,
    cells=slow_cells,
    tables=BY_CLUSTER,
)

# Admission.


def admission_cells(plan: Plan) -> list[Cell]:
    """Workloads x loads x admission policies x what happens to requests without a guarantee."""
    outcomes: tuple[WhenUnattainable, ...] = ("best_effort", "reject", "queue")
    systems = [System(ROUTER, Contender("none", LOCAL))]
    systems += [
        System(ROUTER, Contender(f"{name}, {outcome}", LOCAL), name, outcome)
        for name in ADMISSIONS
        for outcome in plan.pick(outcomes[:2], outcomes)
    ]
    loads = plan.pick([1.3], [0.8, 1.1, 1.5], [0.6, 0.8, 1.0, 1.2, 1.5, 2.0])
    layout = colocated(plan.pick(2, 8))
    grid = []
    for workload in plan.pick(NORMAL[:1], NORMAL, tuple(GENERATED)):
        labels = {"workload": workload}
        grid += sweep(labels, GENERATED[workload], SETUP, loads, systems, _span(plan), layout)
    return grid


ADMISSION = Experiment(
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
    cells=admission_cells,
    tables=[
        Pivot(words, figure, ("policy",))
        for figure, words in {
            **METRICS,
            "promised": "share of requests that were guaranteed",
            "kept": "share of the guaranteed requests that met every objective",
            "best_effort_met": "share of the best-effort requests that met every objective",
            "refused": "share of requests that were refused",
            "ttft_over_p50": "first token, observed over predicted, median",
            "ttft_over_p90": "first token, observed over predicted, P90",
        }.items()
    ],
)
