"""Every router with several policies on 4 to 32 replicas, also with late reports, or admission."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sluice.benchmarks.experiments import grid, systems
from sluice.benchmarks.experiments.loads import QUICK, Span, Sweep, recorded_stretched, workloads
from sluice.benchmarks.experiments.policies import LOCAL as LOCAL_POLICIES
from sluice.benchmarks.experiments.policies import ROUTERS
from sluice.benchmarks.experiments.systems import ADMISSION as ADMISSION_POLICY
from sluice.benchmarks.experiments.systems import ROUTER, Contender, Layout, System, colocated
from sluice.benchmarks.report import Table
from sluice.scheduling.admission import POLICIES as ADMISSIONS
from sluice.simulation.config import Resize, Slowdown, WhenUnattainable
from sluice.simulation.replica import Incident

LOCAL = systems.DEFAULT.policy
RIVALS = ("pab", "least_tokens", "go_routing")
"""The routers that the default should never be worse than."""

FIGURES = {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio, envelope"}
AGAINST = grid.Rivals("router", ROUTER)
MARGIN = 0.01
"""A cell in which the default is lower by more than this counts as lost."""

SETTING = (
    "Reports every 25 ms, known 2 ms later; a router's own decisions count at once. Every request "
    "is placed and served. "
)
TWO = ("proserve azure", "slos-serve mixed")
FOUR = ("proserve sharegpt", "proserve azure", "proserve bursty", "slos-serve mixed")
SPAN = grid.Scaled(QUICK, Span(15.0, 40, 150), Span(120.0, 100, 2_000))
ALL = grid.Scaled(
    tuple(dict.fromkeys(("round_robin", "least_tokens", "pab", ROUTER))), tuple(ROUTERS)
)


def against_rivals(rows: grid.Rows, cell: Sequence[str]) -> Table:
    """The default router against every other, over the cells that the labels ``cell`` name."""
    lines: list[Sequence[str]] = []
    cells = grid.grouped(rows, *cell)
    for figure, words in FIGURES.items():
        ours = grid.estimate(AGAINST.of(rows, ROUTER), figure).shown(4)
        lines.append((words, f"{ROUTER} (default)", ours, "", "", ""))
        for (router,), theirs in grid.grouped(rows, "router").items():
            # Some routers are not measured in every cell.
            names = grid.grouped(theirs, *cell)
            both = [row for name in names for row in AGAINST.of(cells[name], ROUTER)]
            leads = [AGAINST.lead(cells[name], str(router), figure).mean for name in names]
            means = grid.estimate(theirs, figure), grid.difference(both, theirs, figure)
            below = f"{sum(lead < -MARGIN for lead in leads)} of {len(leads)}"
            worst = f"{min(leads) * 100:+.2f}"
            if router != ROUTER:
                lines.append((words, str(router), *(each.shown(4) for each in means), worst, below))
    return Table(
        "The default router against every other, over all cells",
        (
            *("figure", "router", "mean", "lead of the default", "worst cell, points"),
            "default > 1 point below",
        ),
        lines,
        "Leads are paired by seed, over the cells in which the router was measured.",
    )


# Sizes and roles.

CELL = ("workload", "layout", "replicas", "load", "policy")
BY_SIZE: Sequence[Callable[[grid.Rows], Table]] = (
    *grid.pivots(
        FIGURES, ("policy", "router"), "replicas", title="{}, mean over workloads and loads"
    ),
    lambda rows: against_rivals(rows, CELL),
)


def _sized(
    layouts: grid.Planned[Sequence[Layout]],
    policies: grid.Scaled[tuple[str, ...]],
    routers: grid.Planned[Sequence[str]] = ALL,
) -> Sweep:
    return Sweep(
        workloads=workloads(grid.Scaled(TWO, TWO, FOUR), traces=recorded_stretched),
        layouts=layouts,
        loads=grid.Scaled((1.2,), (0.9, 1.2), (0.7, 0.9, 1.05, 1.2, 1.5)),
        kinds=lambda plan: [
            System(router, Contender(local, local))
            for local in policies(plan)
            for router in plan.of(routers)
        ],
        span=SPAN,
    )


_SMALL = (colocated(4), colocated(8))
_LARGE = (colocated(32),)
_OTHERS = ("slidebatching", "fcfs")

COLOCATED = grid.Experiment(
    "routers",
    "ours; the routers are those of the five papers and the usual baselines",
    "Which router has the highest SLO attainment, and does the default lose anywhere?",
    setting=SETTING,
    grids=[
        _sized(
            grid.Scaled(_SMALL[:1], _SMALL, (*_SMALL, *_LARGE)),
            grid.Scaled((LOCAL,), (LOCAL, *_OTHERS), tuple(LOCAL_POLICIES)),
        ),
        _sized(grid.Scaled((), _LARGE, ()), grid.Scaled((LOCAL,), (LOCAL,))),
        # In normal scale, 32 replicas run other policies only with the default and its rivals.
        _sized(
            grid.Scaled((), _LARGE, ()),
            grid.Scaled(_OTHERS, _OTHERS),
            [router for router in ROUTERS if router == ROUTER or router in RIVALS],
        ),
    ],
    tables=BY_SIZE,
)

DISAGGREGATED = grid.Experiment(
    "routers_disaggregated",
    "ours, after ProServe §5.2",
    "The same with prefill and decode on separate replicas?",
    setting=f"{SETTING}A quarter of the replicas only decode.",
    grids=[
        _sized(
            tuple(systems.disaggregated(size) for size in (4, 8, 32)),
            grid.Scaled((LOCAL,), (LOCAL,)),
        )
    ],
    tables=BY_SIZE,
)

# Reports that are late or lost.

AGES: Mapping[str, Mapping[str, float]] = {
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


STALE = grid.Experiment(
    "stale_mirror",
    f"ours; the default router is {ROUTER}",
    "What do late and lost reports cost each router?",
    setting=SETTING,
    grids=[
        Sweep(
            workloads=workloads(TWO),
            layouts=tuple(
                colocated(8, **changes)._replace(name=name) for name, changes in AGES.items()
            ),
            loads=(1.1,),
            kinds=lambda plan: [System(router) for router in ALL(plan)],
            span=SPAN,
        )
    ],
    tables=grid.pivots(FIGURES, ("router",), "layout", title="{}, mean over workloads and loads"),
)

# Several controllers.


def _in_cells(size: int) -> list[Layout]:
    return [
        colocated(size, cells=cells)._replace(name=f"{size} replicas, cells: {cells}")
        for cells in (1, 2, 4, 8)
    ]


CELLS = grid.Experiment(
    "controller_cells",
    "ours",
    "What does it cost that several controllers share the replicas, and each decides on its own?",
    seeds=3,
    setting=f"Admission {ADMISSION_POLICY}; what cannot be promised is served as best effort.",
    grids=[
        Sweep(
            workloads=workloads(grid.Scaled(TWO, TWO[:1], TWO)),
            layouts=grid.Scaled(_in_cells(4), _in_cells(64), (*_in_cells(64), *_in_cells(128))),
            loads=(0.8, 0.95, 1.1),
            kinds=[System(ROUTER, Contender(LOCAL, LOCAL), ADMISSION_POLICY)],
            span=Span(10.0, 20, 50),
        )
    ],
    tables=grid.pivots(
        {**FIGURES, "promised": "share of requests that were guaranteed"},
        ("workload", "layout"),
        "load",
    ),
)

# Streams that move.


def _moving(from_s: float) -> list[Layout]:
    cases: Mapping[str, tuple[Incident, ...]] = {
        "two drained": (Resize(from_s, -2),),
        "one 8 times slower": (Slowdown(from_s, 0, 8.0),),
    }
    return [
        colocated(8, migrate=moves)._replace(name=f"{case}, {words}", incidents=incidents)
        for case, incidents in cases.items()
        for moves, words in ((False, "streams stay"), (True, "streams move"))
    ]


MIGRATION = grid.Experiment(
    "migration",
    "ours; running requests move as in Llumnix (OSDI 2024)",
    "How long does a drain take, and how many guarantees are kept, if running streams may move?",
    seeds=2,
    setting=f"Admission {ADMISSION_POLICY}; what cannot be promised is served as best effort. Two "
    "replicas are drained, or the steps of one take 8 times as long, from 5.5 s on. Streams move "
    "each second; 1 ms and 5 us a token for the KV.",
    grids=[
        Sweep(
            workloads=workloads((FOUR[0], FOUR[3])),
            layouts=grid.Scaled(_moving(0.2), _moving(5.5)),
            loads=(0.7,),
            kinds=(System(ROUTER, Contender(LOCAL, LOCAL), ADMISSION_POLICY),),
            span=SPAN,
        )
    ],
    tables=grid.pivots(
        {
            "drain_s": "time of a drain, s",
            "kept": "share of the guaranteed requests that met every objective",
            "migrated": "streams that moved",
        },
        ("workload",),
        "layout",
    ),
)

# Admission.


def _admitted(*outcomes: WhenUnattainable) -> list[System]:
    admitted = [
        System(ROUTER, Contender(f"{name}, {outcome}", LOCAL), name, outcome)
        for name in ADMISSIONS
        for outcome in outcomes
    ]
    return [System(ROUTER, Contender("none", LOCAL)), *admitted]


ADMISSION = grid.Experiment(
    "admission",
    "ours; FairBatching §3.4 (pab), SLOs-Serve §4 (two tiers)",
    "How many requests are guaranteed, are the guarantees kept, and what do the requests get that "
    "no replica can guarantee?",
    setting="8 replicas behind the default router. What no replica can promise is served on the "
    "capacity that promised requests leave, refused, or queued until a replica can promise it or "
    "its first token is due.",
    grids=[
        Sweep(
            workloads=workloads(TWO),
            layouts=(colocated(8),),
            loads=(0.8, 1.1, 1.5),
            kinds=_admitted("best_effort", "reject", "queue"),
            span=SPAN,
        )
    ],
    tables=grid.pivots(
        {
            **FIGURES,
            "promised": "share of requests that were guaranteed",
            "kept": "share of the guaranteed requests that met every objective",
            "best_effort_met": "share of the best-effort requests that met every objective",
            "refused": "share of requests that were refused",
            "ttft_over_p50": "first token, observed over predicted, median",
            "ttft_over_p90": "first token, observed over predicted, P90",
        }
    ),
)
