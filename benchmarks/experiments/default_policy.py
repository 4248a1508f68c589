"""The default policy against every single-paper policy, and ageing."""

from __future__ import annotations

from sluice.benchmarks.experiments import grid, loads
from sluice.benchmarks.experiments.loads import Span, Sweep, recorded, workloads
from sluice.benchmarks.experiments.policies import LOCAL
from sluice.benchmarks.experiments.systems import DEFAULT, SETUPS, Contender
from sluice.benchmarks.report import Table

PAB = Contender("fairbatching_pab", "fairbatching", rejecting=True)
FIGURES = {
    "attainment_mean": "SLO, mean TPOT",
    "attainment_running_max": "SLO, running max TPOT",
    "tdg": "TDG ratio, envelope",
}
AGAINST = grid.Rivals("policy", DEFAULT.policy)
CELL = ("workload", "setup", "load")


def headline(rows: grid.Rows) -> Table:
    """The default against the policy with the highest mean, and against the best of each cell."""
    lines = []
    cells = grid.grouped(rows, *CELL).values()
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


def worst(rows: grid.Rows) -> Table:
    """The cells in which the default is furthest behind."""
    gaps = []
    for labels, own in grid.grouped(rows, *CELL).items():
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


def overall(rows: grid.Rows) -> list[str]:
    """The figures of one policy."""
    wait_s = max(float(row["longest_wait_s"]) for row in rows)
    return [*(grid.estimate(rows, figure).shown(4) for figure in FIGURES), f"{wait_s:.0f}"]


EXPERIMENT = grid.Experiment(
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
        grid.Lines(
            "All cells: mean over workloads, setups and loads",
            ("policy",),
            (*FIGURES.values(), "longest wait for a first token, s"),
            overall,
            "FairBatching-PAB refuses requests at arrival. A refused request counts as missed; its "
            "wait ends when the engine has no other work.",
        ),
        *(headline, worst),
    ),
)

_KINDS = (
    Contender("no ageing", DEFAULT.policy, {"patience_s": 86_400.0}),
    *(Contender(f"share {x:g}", DEFAULT.policy, {"aged_share": x}) for x in (0.01, 0.05)),
)
_BY = ("workload", "policy"), "seconds"

AGEING = grid.Experiment(
    "ageing",
    "ours",
    "What does the share of time for aged requests cost under lasting overload, and how much "
    "better does a short run look than a long one?",
    seeds=4,
    setting="Load 1.3. Ageing: after 30 s; shares of a batch's time.",
    grids=[
        Sweep(
            workloads=workloads(("proserve sharegpt", "proserve azure")),
            kinds=_KINDS,
            loads=(1.3,),
            span=Span(seconds, 2, 1_000_000),
            labels={"seconds": seconds},
        )
        for seconds in (60.0, 300.0)
    ],
    tables=[
        grid.Pivot("SLO attainment, mean TPOT, by seconds of arrivals", "attainment_mean", *_BY),
        grid.Pivot("longest wait for a first token, s", "longest_wait_s", *_BY, 0),
    ],
)
