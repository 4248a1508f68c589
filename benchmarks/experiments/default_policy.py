"""The default policy against every single-paper policy; and what the length of a run and ageing
change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
)
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    LOAD_WORDS,
    Span,
    contenders,
    full_load_rate,
    measure,
    recorded,
    sweep,
)
from sluice.benchmarks.experiments.systems import DEFAULT, SETUPS, Contender
from sluice.scheduling.batching import POLICIES
from sluice.simulation.planning.plots import Table

CELL = ("workload", "setup", "load")

METRICS = {
    "attainment_mean": "SLO, mean TPOT",
    "attainment_running_max": "SLO, running max TPOT",
    "tdg": "TDG ratio, envelope",
}
"""The figures that policies are compared by, each a share of 1."""

QUICK_WORKLOADS = ("proserve sharegpt", "fairbatching azure")
PAB = Contender("fairbatching_pab", "fairbatching", rejecting=True)


def cells(plan: Plan) -> list[Cell]:
    """Workloads x setups x loads x every registered policy, and FairBatching-PAB."""
    makes = {name: GENERATED[name] for name in plan.pick(QUICK_WORKLOADS, tuple(GENERATED))}
    makes |= recorded(plan.traces)
    loads = plan.pick([1.1], [0.9, 1.3], [0.6, 0.8, 1.0, 1.2, 1.5, 2.0])
    span = plan.pick(Span(3.0, 10, 20), Span(45.0, 150, 500), Span(180.0, 300, 4_000))
    grid = []
    for workload, make in makes.items():
        for name in plan.pick(["8b"], ["8b", "70b-short"], list(SETUPS)):
            setup = SETUPS[name]
            labels = {"workload": workload, "setup": name}
            kinds = [*contenders(POLICIES, make, setup), PAB]
            grid += sweep(labels, make, setup, loads, kinds, span)
    return grid


def best_single(rows: Rows, figure: str) -> str:
    """The policy, other than the default, with the highest mean of a figure over ``rows``."""
    means = {
        str(policy): estimate(own, figure).mean
        for (policy,), own in grouped(rows, "policy").items()
        if policy != DEFAULT.policy
    }
    return max(means, key=lambda policy: means[policy])


def of_policy(rows: Rows, policy: str) -> Rows:
    """The rows of one policy."""
    return having(rows, {"policy": policy})


def _overall(rows: Rows) -> Table:
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


def _headline(rows: Rows) -> Table:
    lines = []
    cells_of = grouped(rows, *CELL)
    for figure, words in METRICS.items():
        best = best_single(rows, figure)
        ours = 1 - estimate(of_policy(rows, DEFAULT.policy), figure).mean
        theirs = 1 - estimate(of_policy(rows, best), figure).mean
        change = f"{(ours / theirs - 1) * 100:+.0f} %" if theirs > 0 else "-"
        gaps = [_gap(own, figure) for own in cells_of.values()]
        fixed = [
            difference(of_policy(own, DEFAULT.policy), of_policy(own, best), figure).mean
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


def _gap(own: Rows, figure: str) -> float:
    """The default minus the best other policy of one cell."""
    best = best_single(own, figure)
    return difference(of_policy(own, DEFAULT.policy), of_policy(own, best), figure).mean


def _by_workload(rows: Rows) -> Table:
    lines = []
    for (workload, setup), own in grouped(rows, "workload", "setup").items():
        line = [f"{workload}, {setup}"]
        for figure in METRICS:
            best = best_single(own, figure)
            value = estimate(of_policy(own, DEFAULT.policy), figure)
            gap = difference(of_policy(own, DEFAULT.policy), of_policy(own, best), figure)
            line.append(f"{value.mean:.3f} ({gap.shown(3)} {best})")
        lines.append(line)
    return Table(
        "By workload and setup, mean over loads: the default (its lead over the best other)",
        ("workload, setup", *METRICS.values()),
        lines,
    )


def _worst(rows: Rows) -> Table:
    gaps = []
    for labels, own in grouped(rows, *CELL).items():
        for figure, words in METRICS.items():
            best = best_single(own, figure)
            gap = difference(of_policy(own, DEFAULT.policy), of_policy(own, best), figure)
            value = estimate(of_policy(own, DEFAULT.policy), figure).shown(3)
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
        "Latency": "setups of benchmarks/experiments/systems.py; 3 % noise, 5 % head-room, online "
        "correction",
        "Output lengths": "learnt per task class while running, for every policy alike",
        "Policies": "default options; a static token budget is profiled for the least TPOT "
        "objective; one engine",
    },
    seeds=3,
    cells=cells,
    tables=(_overall, _headline, _by_workload, _worst),
    charts=[
        Curves(f"{words}: mean over workloads and setups", figure, words)
        for figure, words in METRICS.items()
    ],
)

DAY_S = 86_400.0
AGEING_LOAD = 1.3
BOTH = ("proserve sharegpt", "proserve azure")


def _runs(
    plan: Plan, lengths_s: Sequence[float], load: float, kinds: Sequence[Contender]
) -> list[Cell]:
    setup = SETUPS["8b"]
    grid = []
    for workload in plan.pick(BOTH[:1], BOTH):
        make = GENERATED[workload]
        rate = load * full_load_rate(make, setup)
        for seconds in lengths_s:
            labels: dict[str, Value] = {"workload": workload, "seconds": seconds}
            run = make, setup, rate, max(2, round(rate * seconds))
            grid += [
                Cell({**labels, **kind.labels}, partial(measure, *run, kind, None, False))
                for kind in kinds
            ]
    return grid


def length_cells(plan: Plan) -> list[Cell]:
    """Run lengths x policies at full load."""
    lengths_s = plan.pick([1.0, 3.0], [30.0, 60.0, 300.0], [30.0, 60.0, 300.0, 1_200.0])
    rivals = [Contender(name, name) for name in ("fcfs", "slidebatching")]
    return _runs(plan, lengths_s, 1.0, [*rivals, DEFAULT])


def ageing_cells(plan: Plan) -> list[Cell]:
    """Shares for aged requests x run lengths under lasting overload; with a starvation bound of a
    day no request ages."""
    shares = plan.pick((0.01,), (0.01, 0.05), (0.01, 0.02, 0.05, 0.1))
    kinds = [
        Contender("no ageing", DEFAULT.policy, {"patience_s": DAY_S}),
        *(Contender(f"share {each:g}", DEFAULT.policy, {"aged_share": each}) for each in shares),
    ]
    lengths_s = plan.pick([1.0, 3.0], [60.0, 300.0], [60.0, 300.0, 1_200.0])
    return _runs(plan, lengths_s, AGEING_LOAD, kinds)


BY_LENGTH = tuple(
    Pivot(f"{words}, by seconds of arrivals", figure, ("workload", "policy"), "seconds", digits)
    for figure, words, digits in (
        ("attainment_mean", "SLO attainment, mean TPOT", 3),
        ("tdg", "TDG ratio, envelope", 3),
        ("longest_wait_s", "longest wait for a first token, s", 0),
    )
)
ATTAINED = "SLO attainment, mean TPOT"
CHARTS = (Curves(f"{ATTAINED}, mean over workloads", "attainment_mean", ATTAINED, x="seconds"),)

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope",
    "Arrivals": f"generated, Poisson; {LOAD_WORDS}",
    "Objectives and priorities": "each workload's own, see simulation/workloads/settings.py",
    "Latency": "setup 8b of benchmarks/experiments/systems.py",
}

LENGTH = Experiment(
    name="run_length",
    source="ours",
    question="How much better does a short run look than a long one at full load?",
    setting={**SETTING, "Load": "1"},
    seeds=4,
    cells=length_cells,
    tables=BY_LENGTH,
    charts=CHARTS,
)

AGEING = Experiment(
    name="ageing",
    source="ours",
    question="What does the share of time for aged requests cost under lasting overload?",
    setting={
        **SETTING,
        "Load": f"{AGEING_LOAD:g}",
        "Ageing": "requests age after 30 s; shares are of a batch's time",
    },
    seeds=4,
    cells=ageing_cells,
    tables=BY_LENGTH,
    charts=CHARTS,
)
