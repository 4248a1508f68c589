"""The default policy against every single-paper policy; length of a run, and ageing."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.benchmarks.experiments import grid, loads
from sluice.benchmarks.experiments.grid import (
    Axes,
    Experiment,
    Lines,
    Pivot,
    Product,
    Rivals,
    Rows,
    Scaled,
    first,
    grouped,
    pivots,
)
from sluice.benchmarks.experiments.loads import Make, Span, Sweep, recorded, workloads
from sluice.benchmarks.experiments.policies import LOCAL
from sluice.benchmarks.experiments.systems import DEFAULT, SETUPS, Contender
from sluice.benchmarks.report import Table

PAB = Contender("fairbatching_pab", "fairbatching", rejecting=True)
FIGURES = {
    "attainment_mean": "SLO, mean TPOT",
    "attainment_running_max": "SLO, running max TPOT",
    "tdg": "TDG ratio, envelope",
}
AGAINST = Rivals("policy", DEFAULT.policy, FIGURES)
CELL = ("workload", "setup", "load")


def headline(rows: Rows) -> Table:
    """The default against the policy with the highest mean, and against the best of each cell."""
    lines = []
    cells = grouped(rows, *CELL).values()
    for figure, words in FIGURES.items():
        best = AGAINST.best(rows, figure)
        ours, theirs = (1 - AGAINST.mean(rows, name, figure) for name in (DEFAULT.policy, best))
        change = f"{(ours / theirs - 1) * 100:+.0f} %" if theirs > 0 else "-"
        fixed = [AGAINST.lead(own, best, figure).mean for own in cells]
        gaps = [AGAINST.lead_over_best(own, figure) for own in cells]
        below = [gap for gap in gaps if gap.mean < -0.01]
        sure = sum(gap.mean + gap.half_width < -0.01 for gap in below)
        line = [words, best, f"{ours * 100:.2f} %", f"{theirs * 100:.2f} %", change]
        line += [f"{min(fixed) * 100:+.2f}", f"{min(gap.mean for gap in gaps) * 100:+.2f}"]
        lines.append((*line, f"{len(below)} of {len(gaps)}", str(sure)))
    return Table(
        "The default policy against the best single policy",
        (
            *("figure", "best single policy", "misses, default", "misses, best single", "change"),
            *("worst cell against it, points", "worst against the cell's best"),
            *("cells > 1 point below their best", "of these surely"),
        ),
        lines,
        "Best single: highest mean over all cells. Best of a cell: highest there on the other "
        "seeds; one seed alone favours it. Surely: by the whole range over seeds.",
    )


def by_workload(rows: Rows) -> Table:
    """The default, and its lead over the best other, by workload and setup."""
    lines = []
    for (workload, setup), own in grouped(rows, "workload", "setup").items():
        line = [f"{workload}, {setup}"]
        for figure in FIGURES:
            best = AGAINST.best(own, figure)
            gap = AGAINST.lead(own, best, figure).shown()
            line.append(f"{AGAINST.mean(own, DEFAULT.policy, figure):.3f} ({gap} {best})")
        lines.append(line)
    return Table(
        "By workload and setup, mean over loads: the default (its lead over the best other)",
        ("workload, setup", *FIGURES.values()),
        lines,
    )


def worst(rows: Rows) -> Table:
    """The cells in which the default is furthest behind."""
    gaps = []
    for labels, own in grouped(rows, *CELL).items():
        for figure, words in FIGURES.items():
            best, gap = AGAINST.best(own, figure), AGAINST.lead_over_best(own, figure)
            value = grid.estimate(AGAINST.of(own, DEFAULT.policy), figure).shown()
            gaps.append((gap.mean, [*map(str, labels), words, value, best, gap.shown(4)]))
    gaps.sort(key=lambda entry: entry[0])
    return Table(
        "Where the default is furthest below the best of the cell",
        (*CELL, "figure", "default", "best of the cell", "difference"),
        [line for _, line in gaps[:12]],
    )


def overall(rows: Rows) -> list[str]:
    """The figures of one policy."""
    wait_s = max(float(row["longest_wait_s"]) for row in rows)
    return [*(grid.estimate(rows, figure).shown(4) for figure in FIGURES), f"{wait_s:.0f}"]


EXPERIMENT = Experiment(
    "default_policy",
    "ours; the workloads and objectives are those of the five papers",
    "Does the default policy lose to any single paper's policy anywhere, and how much does it gain "
    "in the mean?",
    seeds=3,
    setting="One engine, default options. Recorded requests: TTFT 0.8 s, TPOT 80 ms, two "
    "priorities; with long prompts TTFT 3 times the idle engine's. Output lengths are learnt per "
    "task class; a static token budget is profiled for the least TPOT.",
    grids=[
        Sweep(
            workloads=workloads(tuple(loads.GENERATED), traces=recorded),
            setups=(SETUPS["8b"], SETUPS["70b-short"]),
            loads=(0.9, 1.3),
            kinds=(*(Contender(name, name) for name in LOCAL), PAB),
            span=Span(45.0, 150, 500),
        )
    ],
    tables=(
        Lines(
            "All cells: mean over workloads, setups and loads",
            ("policy",),
            (*FIGURES.values(), "longest wait for a first token, s"),
            overall,
            "FairBatching-PAB refuses requests at arrival. A refused request counts as missed; its "
            "wait ends when the engine has no other work.",
        ),
        *(headline, by_workload, worst),
    ),
)

# The length of a run.


def _lasting(
    seed: int, workload: Make, seconds: float, policy: Contender, load: float
) -> Mapping[str, float]:
    setup = SETUPS["8b"]
    rate = load * loads.full_load_rate(workload, setup)
    requests = max(2, round(rate * seconds))
    return loads.measure(policy, seed, loads.Conditions(workload, setup), rate, requests)


def _by_length(
    name: str,
    question: str,
    load: float,
    seconds: Scaled[tuple[float, ...]],
    kinds: tuple[Contender, ...],
) -> Experiment:
    makes = {name: loads.GENERATED[name] for name in ("proserve sharegpt", "proserve azure")}
    axes: Axes = {"workload": first(makes), "seconds": seconds, "policy": kinds}
    shares = {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio, envelope"}
    by = ("workload", "policy"), "seconds"
    wait = "longest wait for a first token, s, by seconds of arrivals"
    return Experiment(
        *(name, "ours", question),
        seeds=4,
        setting=f"Load {load:g}. Ageing: after 30 s; shares of a batch's time.",
        grids=[Product(_lasting, axes, {"load": load})],
        tables=[
            *pivots(shares, *by, title="{}, by seconds of arrivals"),
            Pivot(wait, "longest_wait_s", *by, 0),
        ],
    )


_RIVALS = (Contender("fcfs", "fcfs"), Contender("slidebatching", "slidebatching"), DEFAULT)
LENGTH = _by_length(
    "run_length",
    "How much better does a short run look than a long one at full load?",
    1.0,
    Scaled((1.0, 3.0), (30.0, 60.0, 300.0)),
    _RIVALS,
)

_NONE = Contender("no ageing", DEFAULT.policy, {"patience_s": 86_400.0})
_SHARES = tuple(
    Contender(f"share {share:g}", DEFAULT.policy, {"aged_share": share}) for share in (0.01, 0.05)
)
AGEING = _by_length(
    "ageing",
    "What does the share of time for aged requests cost under lasting overload?",
    1.3,
    Scaled((1.0, 3.0), (60.0, 300.0)),
    (_NONE, *_SHARES),
)
