"""ProServe on one node: Fig. 10 and 13 (policies, priorities), 15 (ablation), 18 (weights)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sluice.benchmarks.experiments.base import (
    Cell,
    Experiment,
    Findings,
    Plan,
    Row,
    chart,
    estimate,
    grouped,
    pivot,
)
from sluice.benchmarks.experiments.engines import SETUPS, Contender, Setup
from sluice.benchmarks.experiments.loads import LOAD_WORDS, Make, Span, load_cells, profiled_budget
from sluice.simulation.planning.plots import Table
from sluice.simulation.workload import Workload
from sluice.simulation.workloads.settings import PROSERVE_DATASETS, PROSERVE_SLO, proserve

OURS = Contender("deadline_triage", "deadline_triage")
SLIDE = Contender("slidebatching", "slidebatching")

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope, first and later tokens weighted by "
    "the workload's mean prompt and output length",
    "Arrivals": f"generated, Poisson (the paper stretches recorded times); {LOAD_WORDS}",
    "Objectives and priorities": f"TTFT {PROSERVE_SLO.ttft_s:g} s, TPOT {PROSERVE_SLO.tpot_s:g} s; "
    "two priorities with equal chance, weights 2 and 1 unless stated",
    "Latency": "setups 8b and 70b of benchmarks/experiments/engines.py, in place of Qwen2-7B and "
    "Qwen3-32B on Ascend 910B; nothing ran on an accelerator",
    "Sarathi": "token budget profiled per setup: tokens of a batch within the TPOT objective",
}


def _span(plan: Plan) -> Span:
    return plan.pick(Span(3.0, 10, 20), Span(60.0, 200, 600), Span(300.0, 600, 5_000))


def _make(dataset: str, high: int, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return proserve(dataset, rate, requests, seed, (high, 1))


def _sarathi(policy: str, setup: Setup) -> Contender:
    budget = profiled_budget(setup, PROSERVE_SLO.tpot_s or 0.0)
    return Contender(policy, policy, {"token_budget": budget})


def of_dataset(name: str, high: int = 2) -> Make:
    """A data set with a weight of its high priority."""
    return partial(_make, name, high)


def policy_cells(plan: Plan) -> list[Cell]:
    """Data sets x setups x loads x policies."""
    datasets = plan.pick(PROSERVE_DATASETS[:1], PROSERVE_DATASETS, PROSERVE_DATASETS)
    loads = plan.pick([1.1], [0.8, 1.0, 1.2, 1.5], [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2])
    grid = []
    for dataset in datasets:
        for setup in (SETUPS["8b"], SETUPS["70b"]):
            contenders = [
                Contender("fcfs", "fcfs"),
                Contender("weighted_vtc", "weighted_vtc"),
                _sarathi("sarathi", setup),
                _sarathi("sarathi_priority", setup),
                Contender("fairbatching", "fairbatching"),
                SLIDE,
                OURS,
            ]
            labels = {"dataset": dataset, "setup": setup.name}
            make = of_dataset(dataset)
            grid += load_cells(labels, make, setup, loads, contenders, _span(plan))
    return grid


def policy_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 10: TDG and attainment by load; Fig. 13: the same by priority on the 70b setup."""
    tables = [
        pivot(f"{words}, mean over data sets", own, ["setup", "policy"], "load", figure)
        for figure, words in (
            ("tdg", "Fig. 10: TDG ratio"),
            ("attainment_mean", "Fig. 10: SLO attainment"),
        )
        for own in [rows]
    ]
    tables.append(_by_dataset(rows))
    large = [
        row
        for row in rows
        if row["setup"] == "70b"
        and row["policy"] in ("sarathi", "sarathi_priority", "slidebatching", "deadline_triage")
        and row["dataset"] in ("sharegpt", "azure")
    ]
    for level, name in ((2, "high"), (1, "low")):
        words = f"Fig. 13: SLO attainment, {name} priority, setup 70b, sharegpt and azure"
        figure = f"attainment_priority_{level}"
        tables.append(pivot(words, large, ["policy"], "load", figure))
    charts = [
        chart(f"{words}, mean over data sets and setups", rows, "policy", "load", figure, words)
        for figure, words in (("tdg", "TDG ratio"), ("attainment_mean", "SLO attainment"))
    ]
    return Findings(tables, charts)


def _by_dataset(rows: Sequence[Row]) -> Table:
    return pivot(
        "Fig. 10 by data set: SLO attainment, mean over loads and setups",
        rows,
        ["dataset"],
        "policy",
        "attainment_mean",
    )


def ablation_cells(plan: Plan) -> list[Cell]:
    """The variants of §5.4 on two data sets at three loads."""
    setup = SETUPS["8b"]
    contenders = [
        SLIDE,
        Contender("only deadline", "slidebatching", {"order": "deadline"}),
        Contender("only density", "slidebatching", {"order": "density"}),
        Contender("without estimator", "slidebatching", {"latency_aware": False}),
        Contender("late ones count", "slidebatching", {"late": "include"}),
    ]
    loads = plan.pick([1.1], [0.8, 1.1, 1.5], [0.7, 0.9, 1.1, 1.3, 1.6])
    grid = []
    for dataset in plan.pick(["sharegpt"], ["sharegpt", "azure"], PROSERVE_DATASETS):
        make = of_dataset(dataset)
        grid += load_cells({"dataset": dataset}, make, setup, loads, contenders, _span(plan))
    return grid


def ablation_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 15: missed TDG, over that of the whole policy."""
    return Findings(
        [
            _normalised(rows),
            pivot("TDG ratio", rows, ["dataset", "policy"], "load", "tdg", 4),
            pivot("SLO attainment", rows, ["dataset", "policy"], "load", "attainment_mean"),
        ],
        [chart("TDG ratio of SlideBatching's variants", rows, "policy", "load", "tdg", "TDG")],
    )


def _normalised(rows: Sequence[Row]) -> Table:
    loads = [load for (load,) in grouped(rows, "load")]
    lines = []
    for (dataset, policy), own in grouped(rows, "dataset", "policy").items():
        line = [str(dataset), str(policy)]
        for load in loads:
            cell = [row for row in own if row["load"] == load]
            whole = [
                row
                for row in rows
                if (row["dataset"], row["load"], row["policy"]) == (dataset, load, SLIDE.label)
            ]
            missed, least = (1 - estimate(part, "tdg").mean for part in (cell, whole))
            line.append(f"{missed / least:.2f} x" if least > 1e-9 else f"{missed:.4f} (of 0)")
        lines.append(line)
    return Table(
        "Fig. 15: missed TDG over that of SlideBatching",
        ("dataset", "policy", *map(str, loads)),
        lines,
        "Ratios of the means over seeds. `late ones count` is Algorithm 1 to the letter.",
    )


def weight_cells(plan: Plan) -> list[Cell]:
    """Weights of the high priority at two loads."""
    setup = SETUPS["8b"]
    contenders = [SLIDE, _sarathi("sarathi_priority", setup), OURS]
    loads = plan.pick([1.3], [1.1, 1.5], [0.9, 1.1, 1.3, 1.6])
    grid = []
    for high in plan.pick([1, 10], [1, 2, 5, 10], [1, 2, 3, 5, 7, 10]):
        labels = {"weight": float(high)}
        make = of_dataset("sharegpt", high)
        grid += load_cells(labels, make, setup, loads, contenders, _span(plan))
    return grid


def weight_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 18: attainment over all and by priority; with a weight of 1 there is one priority."""
    split = [
        {
            **row,
            "high": row.get(f"attainment_priority_{row['weight']:g}", row["attainment_mean"]),
            "low": row.get("attainment_priority_1", row["attainment_mean"]),
        }
        for row in rows
    ]
    figures = {"attainment_mean": "overall", "high": "high priority", "low": "low priority"}
    tables = [
        pivot(f"Fig. 18: SLO attainment, {name}", split, ["load", "policy"], "weight", figure)
        for figure, name in figures.items()
    ]
    words = "Fig. 18: SLO attainment, high priority"
    return Findings(tables, [chart(words, split, "policy", "weight", "high", "SLO attainment")])


POLICIES = Experiment(
    name="proserve_policies",
    source="ProServe Fig. 10 and 13",
    question="Does SlideBatching gain more than the other policies, and what do priorities attain?",
    setting=SETTING,
    seeds=3,
    cells=policy_cells,
    findings=policy_findings,
)

ABLATION = Experiment(
    name="proserve_ablation",
    source="ProServe Fig. 15",
    question="What does each part of SlideBatching add?",
    setting={**SETTING, "Setup": "8b alone"},
    seeds=5,
    cells=ablation_cells,
    findings=ablation_findings,
)

WEIGHTS = Experiment(
    name="proserve_weights",
    source="ProServe Fig. 18",
    question="What do larger weights of the high priority change?",
    setting={
        **SETTING,
        "Setup": "8b alone, sharegpt",
        "Weights": "up to 10, the most that a request may state; the paper goes to 100",
    },
    seeds=5,
    cells=weight_cells,
    findings=weight_findings,
)
