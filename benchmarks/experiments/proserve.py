"""ProServe on one node (Fig. 6, 7, 10, 13, 15 to 18)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from sluice.benchmarks.experiments import grid, loads, systems
from sluice.benchmarks.experiments.loads import QUICK, Make, Span, Sweep, generated, workloads
from sluice.benchmarks.experiments.systems import DEFAULT, SETUPS, Contender
from sluice.benchmarks.report import Table
from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.batching.slidebatching import SlideBatching
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.queue import QueueView
from sluice.simulation.metrics import stages, token_gain
from sluice.simulation.settings import PROSERVE_DATASETS, proserve

SLIDE = Contender("slidebatching", "slidebatching")
SPAN = Span(60.0, 200, 600)
TDG, ATTAINED = "tdg", "attainment_mean"
BY_POLICY = ("dataset", "policy")
TWO = ("sharegpt", "azure")

SETTING = (
    "TTFT 0.8 s, TPOT 0.08 s; two priorities with equal chance, weights 2 and 1 unless stated. "
    "Sarathi's token budget: tokens of a batch within the TPOT objective. "
)


def _plain(*names: str) -> list[Contender]:
    return [Contender(name, name) for name in names]


def _datasets(
    kinds: Sequence[Contender],
    names: tuple[str, ...],
    loads: tuple[float, ...],
    setups: Sequence[str] = ("8b",),
) -> Sweep:
    return Sweep(
        named=("dataset",),
        workloads=workloads(names, partial(generated, proserve)),
        setups=[SETUPS[name] for name in setups],
        loads=loads,
        kinds=kinds,
        span=SPAN,
    )


POLICIES = grid.Experiment(
    "proserve_policies",
    "ProServe Fig. 10 and 13",
    "Does SlideBatching gain more than the other policies, and what do priorities attain?",
    seeds=3,
    setting=SETTING,
    grids=[
        _datasets(
            [*_plain("fcfs", "sarathi", "sarathi_priority", "fairbatching"), SLIDE, DEFAULT],
            PROSERVE_DATASETS,
            (0.8, 1.0, 1.2, 1.5),
            ("8b", "70b"),
        )
    ],
    tables=[
        *grid.pivots(
            {TDG: "TDG ratio", ATTAINED: "SLO attainment"},
            ("setup", "policy"),
            title="Fig. 10: {}, mean over data sets",
        ),
        *grid.pivots(
            {"attainment_priority_2": "high", "attainment_priority_1": "low"},
            title="Fig. 13: SLO attainment, {} priority, setup 70b, sharegpt and azure",
            where={
                "setup": "70b",
                "dataset": TWO,
                "policy": ("sarathi", "sarathi_priority", "slidebatching", "deadline_triage"),
            },
        ),
    ],
)


def fig_15(rows: grid.Rows) -> Table:
    """The missed TDG of each variant over that of SlideBatching."""
    cells = grid.grouped(rows, *BY_POLICY, "load")
    missed = {at: 1 - grid.mean(own, TDG) for at, own in cells.items()}
    loads = [load for (load,) in grid.grouped(rows, "load")]
    lines = []
    for dataset, policy in grid.grouped(rows, *BY_POLICY):
        pairs = [[missed[dataset, name, load] for name in (policy, SLIDE.label)] for load in loads]
        shown = [f"{a / b:.2f} x" if b > 1e-9 else f"{a:.4f} (of 0)" for a, b in pairs]
        lines.append((str(dataset), str(policy), *shown))
    return Table(
        "Fig. 15: missed TDG over that of SlideBatching",
        (*BY_POLICY, *map(str, loads)),
        lines,
        "Ratios of the means over seeds. `late ones count` is Algorithm 1 to the letter; `phi_c` "
        "has Eq. 9 in place of Eq. 8.",
    )


ABLATION = grid.Experiment(
    "proserve_ablation",
    "ProServe Fig. 15",
    "What does each part of SlideBatching add?",
    seeds=5,
    setting=SETTING,
    grids=[
        _datasets(
            [
                SLIDE,
                Contender("only deadline", "slidebatching", {"order": "deadline"}),
                Contender("only density", "slidebatching", {"order": "density"}),
                Contender("without estimator", "slidebatching", {"latency_aware": False}),
                Contender("late ones count", "slidebatching", {"late": "include"}),
                Contender("phi_c", "slidebatching", {"boundary": "phi_c"}),
            ],
            TWO,
            (0.8, 1.1, 1.5),
        )
    ],
    tables=[
        fig_15,
        grid.Pivot("SLO attainment", ATTAINED, BY_POLICY),
    ],
)


def _weighted(high: float) -> Make:
    return generated(proserve, "sharegpt", priorities=(int(high), 1))


def by_priority(rows: grid.Rows) -> grid.Rows:
    """Attainment of each priority by name; with a weight of 1 there is one priority."""
    return [
        {
            **row,
            "high": row.get(f"attainment_priority_{row['weight']:g}", row[ATTAINED]),
            "low": row.get("attainment_priority_1", row[ATTAINED]),
        }
        for row in rows
    ]


WEIGHTS = grid.Experiment(
    "proserve_weights",
    "ProServe Fig. 18",
    "What do larger weights of the high priority change?",
    seeds=5,
    setting=f"{SETTING}Weights up to 10, the most that a request may state.",
    grids=[
        Sweep(
            named=("weight",),
            workloads=workloads((1.0, 2.0, 5.0, 10.0), _weighted),
            loads=(1.1, 1.5),
            kinds=(SLIDE, *_plain("sarathi_priority"), DEFAULT),
            span=SPAN,
        )
    ],
    derive=by_priority,
    tables=grid.pivots(
        {ATTAINED: "overall", "high": "high priority", "low": "low priority"},
        *(("load", "policy"), "weight"),
        title="Fig. 18: SLO attainment, {}",
    ),
)

BUDGETS = (250, 750, 1_500, 2_500)
TOKEN_BUDGETS = grid.Experiment(
    "proserve_token_budgets",
    "ProServe Fig. 7",
    "Which token budget does a static order need, by load?",
    seeds=5,
    setting=SETTING,
    grids=[
        Sweep(
            named=("dataset",),
            workloads=workloads(TWO[1:], partial(generated, proserve)),
            loads=(1.0, 1.3),
            kinds=[
                *(Contender(name, name, {"token_budget": tokens}) for name in ("edf", "sjf")),
                Contender("fcfs", "fcfs", batch_tokens=tokens),
            ],
            span=SPAN,
            labels={"token budget": tokens},
        )
        for tokens in BUDGETS
    ],
    tables=[grid.Pivot("Fig. 7: SLO attainment", ATTAINED, ("load", "policy"), "token budget")],
)


PARTS = 10
"""Parts of a time line."""


def time_line(seed: int, policy: Contender, load: float, span: Span) -> dict[str, float]:
    """By part of the time: urgent and normal requests (SlideBatching), those past their next
    deadline, and TDG per second over the greatest possible."""
    make, setup = generated(proserve, "azure"), SETUPS["8b"]
    rate = load * loads.full_load_rate(make, setup)
    workload = make(setup, rate, span.requests(rate), seed)
    budgeted = loads.fitted(policy, partial(loads.budget_of, make, setup))
    slide = systems.local_policy(SLIDE, workload)
    assert isinstance(budgeted, Contender) and isinstance(slide, SlideBatching)
    counted: list[tuple[float, int, int, int]] = []

    def note(_: BatchPlan, queue: QueueView, now_s: float, latency: LatencyModel) -> None:
        split = slide.partition(queue.table, now_s, latency)
        urgent, late = int(split.urgent.sum()), int((split.due_s < now_s).sum())
        counted.append((now_s, urgent, len(split.urgent) - urgent, late))

    requests = systems.run(workload, budgeted, setup, seed, note=note).result.requests
    gained = token_gain(requests, stages(requests))
    part_s = workload.arrivals[-1].arrival_s / PARTS
    seen = np.array(counted)
    parts = (seen[:, 0] // part_s).astype(int)
    counts = np.maximum(np.bincount(parts, minlength=PARTS)[:PARTS], 1)
    found = {
        figure: np.bincount(parts, seen[:, place], PARTS)[:PARTS] / counts
        for place, figure in enumerate(("urgent", "normal", "late"), start=1)
    }
    left = ~np.isnan(requests.emitted_s)
    when = (requests.emitted_s[left] // part_s).astype(int)
    gain = np.bincount(when, gained.gain[left], PARTS)[:PARTS]
    found["gain"] = gain / (gained.ideal.sum() / PARTS)
    return {f"{name} {part}": float(x) for name, of in found.items() for part, x in enumerate(of)}


def by_part(rows: grid.Rows) -> grid.Rows:
    """A row for each part of a time line."""
    figures = ("urgent", "normal", "late", "gain")
    labels = ("policy", "load", "seed")
    return [
        {**{name: row[name] for name in labels}, "part": part + 1}
        | {name: row[f"{name} {part}"] for name in figures}
        for row in rows
        for part in range(PARTS)
    ]


TIMED, HIGH = (*_plain("fcfs", "sjf", "sarathi", "edf"), SLIDE), 1.3
TIME_LINES = grid.Experiment(
    "proserve_time_lines",
    "ProServe Fig. 6, 16 and 17",
    "How do urgent and late requests, and the gain per second, develop?",
    seeds=5,
    setting=f"{SETTING}Azure lengths; a tenth of the arrivals' time per part, means over its "
    "batches. Urgent: by SlideBatching's partition, whatever the policy.",
    grids=[
        grid.Product(
            time_line,
            {"policy": TIMED, "load": grid.Scaled((HIGH,), (0.8, 1.0, HIGH))},
            {"span": grid.Scaled(QUICK, SPAN)},
        )
    ],
    derive=by_part,
    tables=[
        *grid.pivots(
            {"urgent": "urgent", "late": "past their deadline"},
            *(("policy",), "part"),
            title=f"Fig. 6: requests that are {{}}, load {HIGH}",
            where={"load": HIGH, "policy": ("edf", "fcfs", "sjf")},
        ),
        grid.Pivot(
            f"Fig. 16: TDG per second over the mean of the greatest there could be, load {HIGH}",
            *("gain", ("policy",), "part"),
            where={"load": HIGH, "policy": ("sarathi", "slidebatching")},
        ),
        *grid.pivots(
            {"urgent": "urgent", "normal": "normal"},
            *(("load",), "part"),
            title="Fig. 17: {} requests of SlideBatching",
            where={"policy": "slidebatching"},
        ),
    ],
)
