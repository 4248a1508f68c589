"""The effect of a run's length: attainment near the knee, and the cost of ageing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sluice.benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, chart, pivot
from sluice.benchmarks.experiments.engines import SETUPS, Contender
from sluice.benchmarks.experiments.loads import GENERATED, LOAD_WORDS, full_load_rate, measure

OURS = Contender("deadline_triage", "deadline_triage")
DAY_S = 86_400.0
AGEING_LOAD = 1.3

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope",
    "Arrivals": f"generated, Poisson; {LOAD_WORDS}",
    "Objectives and priorities": "each workload's own, see simulation/workloads/settings.py",
    "Latency": "setup 8b of benchmarks/experiments/engines.py",
}


def _cells(
    workloads: Sequence[str],
    lengths_s: Sequence[float],
    load: float,
    contenders: Sequence[Contender],
) -> list[Cell]:
    setup = SETUPS["8b"]
    grid = []
    for workload in workloads:
        make = GENERATED[workload]
        rate = load * full_load_rate(make, setup)
        for seconds in lengths_s:
            for contender in contenders:
                requests = max(2, round(rate * seconds))
                run = partial(measure, make, setup, rate, requests, contender, False)
                labels = {"workload": workload, "policy": contender.label}
                grid.append(Cell({**labels, "seconds": seconds}, run))
    return grid


def length_cells(plan: Plan) -> list[Cell]:
    """Run lengths x policies at full load."""
    lengths_s = plan.pick([1.0, 3.0], [30.0, 60.0, 300.0], [30.0, 60.0, 300.0, 1_200.0])
    workloads = plan.pick(1, 2, 2)
    contenders = [Contender("fcfs", "fcfs"), Contender("slidebatching", "slidebatching"), OURS]
    names = ("proserve sharegpt", "proserve azure")[:workloads]
    return _cells(names, lengths_s, 1.0, contenders)


def ageing_cells(plan: Plan) -> list[Cell]:
    """Shares for aged requests x run lengths under lasting overload; with a starvation bound of a
    day no request ages."""
    contenders = [
        Contender("no ageing", "deadline_triage", {"patience_s": DAY_S}),
        *(
            Contender(f"share {share:g}", "deadline_triage", {"aged_share": share})
            for share in plan.pick((0.01,), (0.01, 0.05), (0.01, 0.02, 0.05, 0.1))
        ),
    ]
    lengths_s = plan.pick([1.0, 3.0], [60.0, 300.0], [60.0, 300.0, 1_200.0])
    names = ("proserve sharegpt", "proserve azure")[: plan.pick(1, 2, 2)]
    return _cells(names, lengths_s, AGEING_LOAD, contenders)


def findings(rows: Sequence[Row]) -> Findings:
    """Attainment, TDG and the longest wait by the run's length."""
    figures = {
        "attainment_mean": ("SLO attainment, mean TPOT", 3),
        "tdg": ("TDG ratio, envelope", 3),
        "longest_wait_s": ("longest wait for a first token, s", 0),
    }
    tables = [
        pivot(
            f"{words}, by seconds of arrivals", rows, ["workload", "policy"], "seconds", f, digits
        )
        for f, (words, digits) in figures.items()
    ]
    words = figures["attainment_mean"][0]
    title = f"{words}, mean over workloads"
    return Findings(tables, [chart(title, rows, "policy", "seconds", "attainment_mean", words)])


LENGTH = Experiment(
    name="run_length",
    source="ours",
    question="How much better does a short run look than a long one at full load?",
    setting={**SETTING, "Load": "1"},
    seeds=4,
    cells=length_cells,
    findings=findings,
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
    findings=findings,
)
