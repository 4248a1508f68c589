"""The default policy against every single-paper policy, on all workloads, loads and constants."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.benchmarks.experiments.base import (
    Cell,
    Experiment,
    Findings,
    Plan,
    Row,
    chart,
    difference,
    estimate,
    grouped,
)
from sluice.benchmarks.experiments.engines import SETUPS, Contender, Setup
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    LOAD_WORDS,
    SAMPLE,
    Make,
    Span,
    least_tpot_s,
    load_cells,
    profiled_budget,
    recorded,
)
from sluice.scheduling.batching import POLICIES
from sluice.simulation.planning.plots import Table

DEFAULT = "deadline_triage"
CELL = ("workload", "setup", "load")

METRICS = {
    "attainment_mean": "SLO, mean TPOT",
    "attainment_running_max": "SLO, running max TPOT",
    "tdg": "TDG ratio, envelope",
}
"""The figures that policies are compared by, each a share of 1."""

QUICK_WORKLOADS = ("proserve sharegpt", "fairbatching azure")


STATIC = ("sarathi", "sarathi_priority", "edf", "sjf")
"""Policies under a static token budget, which is profiled for each workload and setup."""


def contenders(make: Make, setup: Setup) -> list[Contender]:
    """Every registered policy with its default options, and FairBatching-PAB."""
    budget = profiled_budget(setup, least_tpot_s(make(setup, 1.0, SAMPLE, 0)))
    listed = [
        Contender(name, name, {"token_budget": budget} if name in STATIC else {})
        for name in POLICIES
    ]
    listed.append(Contender("fairbatching_pab", "fairbatching", rejecting=True))
    return listed


def cells(plan: Plan) -> list[Cell]:
    """Workloads x setups x loads x policies."""
    makes = dict(GENERATED)
    if plan.scale == "quick":
        makes = {name: makes[name] for name in QUICK_WORKLOADS}
    makes |= recorded(plan.traces)
    setups = plan.pick(["8b"], ["8b", "70b-short"], list(SETUPS))
    loads = plan.pick([1.1], [0.9, 1.3], [0.6, 0.8, 1.0, 1.2, 1.5, 2.0])
    span = plan.pick(Span(3.0, 10, 20), Span(45.0, 150, 500), Span(180.0, 300, 4_000))
    grid = []
    for workload, make in makes.items():
        for setup in (SETUPS[name] for name in setups):
            labels = {"workload": workload, "setup": setup.name}
            grid += load_cells(labels, make, setup, loads, contenders(make, setup), span)
    return grid


def findings(rows: Sequence[Row]) -> Findings:
    """Means, the comparison with the best single policy, and where the default is worst."""
    return Findings(
        (_overall(rows), _headline(rows), _by_workload(rows), _worst(rows)),
        [
            chart(f"{words}: mean over workloads and setups", rows, "policy", "load", figure, words)
            for figure, words in METRICS.items()
        ],
    )


def best_single(rows: Sequence[Row], figure: str) -> str:
    """The policy, other than the default, with the highest mean of a figure over ``rows``."""
    means = {
        str(policy): estimate(own, figure).mean
        for (policy,), own in grouped(rows, "policy").items()
        if policy != DEFAULT
    }
    return max(means, key=lambda policy: means[policy])


def of_policy(rows: Sequence[Row], policy: str) -> list[Row]:
    """The rows of one policy."""
    return [row for row in rows if row["policy"] == policy]


def _overall(rows: Sequence[Row]) -> Table:
    lines = []
    for (policy,), own in grouped(rows, "policy").items():
        shown = [estimate(own, figure).shown(4) for figure in METRICS]
        wait_s = max(float(row["longest_wait_s"]) for row in own)
        lines.append((str(policy), *shown, f"{wait_s:.0f}"))
    return Table(
        "All cells: mean over workloads, setups and loads",
        ("policy", *METRICS.values(), "longest wait for a first token, s"),
        lines,
        "FairBatching-PAB refuses requests at arrival. A refused request counts as missed; its "
        "wait ends when the engine has no other work.",
    )


def _headline(rows: Sequence[Row]) -> Table:
    lines = []
    cells_of = grouped(rows, *CELL)
    for figure, words in METRICS.items():
        best = best_single(rows, figure)
        ours = 1 - estimate(of_policy(rows, DEFAULT), figure).mean
        theirs = 1 - estimate(of_policy(rows, best), figure).mean
        change = f"{(ours / theirs - 1) * 100:+.0f} %" if theirs > 0 else "-"
        gaps = [_gap(own, figure) for own in cells_of.values()]
        fixed = [
            difference(of_policy(own, DEFAULT), of_policy(own, best), figure).mean
            for own in cells_of.values()
        ]
        below = sum(gap < -0.01 for gap in gaps)
        lines.append(
            (
                words,
                best,
                f"{ours * 100:.2f} %",
                f"{theirs * 100:.2f} %",
                change,
                f"{min(fixed) * 100:+.2f}",
                f"{min(gaps) * 100:+.2f}",
                f"{below} of {len(gaps)}",
            )
        )
    return Table(
        "The default policy against the best single policy",
        (
            "figure",
            "best single policy",
            "misses, default",
            "misses, best single",
            "change",
            "worst cell against it, points",
            "worst against the cell's best",
            "cells > 1 point below their best",
        ),
        lines,
        "Best single: highest mean over all cells. Best of a cell: highest there, after the fact, "
        "over all other policies; a maximum of noisy means favours them.",
    )


def _gap(own: Sequence[Row], figure: str) -> float:
    """The default minus the best other policy of one cell."""
    best = best_single(own, figure)
    return difference(of_policy(own, DEFAULT), of_policy(own, best), figure).mean


def _by_workload(rows: Sequence[Row]) -> Table:
    lines = []
    for (workload, setup), own in grouped(rows, "workload", "setup").items():
        line = [f"{workload}, {setup}"]
        for figure in METRICS:
            best = best_single(own, figure)
            value = estimate(of_policy(own, DEFAULT), figure)
            gap = difference(of_policy(own, DEFAULT), of_policy(own, best), figure)
            line.append(f"{value.mean:.3f} ({gap.shown(3)} {best})")
        lines.append(line)
    return Table(
        "By workload and setup, mean over loads: the default (its lead over the best other)",
        ("workload, setup", *METRICS.values()),
        lines,
    )


def _worst(rows: Sequence[Row]) -> Table:
    gaps = []
    for labels, own in grouped(rows, *CELL).items():
        for figure, words in METRICS.items():
            best = best_single(own, figure)
            gap = difference(of_policy(own, DEFAULT), of_policy(own, best), figure)
            value = estimate(of_policy(own, DEFAULT), figure).shown(3)
            gaps.append((gap.mean, [*map(str, labels), words, value, best, gap.shown(4)]))
    gaps.sort(key=lambda entry: entry[0])
    return Table(
        "Where the default is furthest below the best of the cell",
        (*CELL, "figure", "default", "best of the cell", "difference"),
        [line for _, line in gaps[:12]],
    )


EXPERIMENT = Experiment(
    name="default_policy",
    source="ours; the workloads and objectives are those of the five papers",
    question="Does the default policy lose to any single paper's policy anywhere, and how much "
    "does it gain in the mean?",
    setting={
        "TPOT": "mean since the first token, and its strict running maximum; TDG by the envelope",
        "Arrivals": f"generated, or recorded and thinned or stretched as named; {LOAD_WORDS}",
        "Objectives and priorities": "each workload's own, see simulation/workloads/settings.py; "
        "recorded: TTFT 0.8 s, TPOT 80 ms, priorities 2 and 1 with equal chance; with prompts of "
        "4,000 tokens or more on average TTFT 3 times the idle engine's, at least 0.8 s",
        "Latency": "setups of benchmarks/experiments/engines.py; 3 % noise, 5 % head-room, online "
        "correction",
        "Output lengths": "learnt per task class while running, for every policy alike",
        "Policies": "default options; a static token budget is profiled for the least TPOT "
        "objective; one engine",
    },
    seeds=3,
    cells=cells,
    findings=findings,
)
