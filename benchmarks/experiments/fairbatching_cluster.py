"""FairBatching Fig. 8: balancing by prefill admission budget, on several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    ADMISSION,
    DEFAULT,
    LOAD_WORDS,
    System,
    cluster_cells,
    colocated,
)
from sluice.benchmarks.experiments.default_policy import DEFAULT as LOCAL
from sluice.benchmarks.experiments.engines import SETUPS, Contender
from sluice.benchmarks.experiments.fairbatching import (
    FAIR,
    FCFS,
    FIGURE,
    OURS,
    SARATHI,
    of_dataset,
    peaks,
)
from sluice.benchmarks.experiments.fairbatching import SETTING as ONE_NODE
from sluice.benchmarks.experiments.loads import Span
from sluice.simulation.estimate import Estimate
from sluice.simulation.planning.plots import Table
from sluice.simulation.workloads.settings import FAIRBATCHING

VLLM = "vllm"
"""vLLM's own balancer: waiting requests count four times, running ones once."""


class Line(NamedTuple):
    """A line of the figure.

    Attributes:
        name: as shown in the table.
        policies: labels of its variants; the best one counts.
    """

    name: str
    policies: tuple[str, ...]


def _labelled(name: str, router: str, contender: Contender, admission: str | None = None) -> System:
    return System(router, contender._replace(label=name), admission, "reject")


SYSTEMS = (
    _labelled("vllm + fcfs", VLLM, FCFS),
    *(_labelled(f"vllm + {tuned.label}", VLLM, tuned) for tuned in SARATHI),
    _labelled("vllm + fairbatching", VLLM, FAIR),
    _labelled("pab + fairbatching", "pab", FAIR),
    _labelled("pab + fairbatching, refusing", "pab", FAIR, "pab"),
    _labelled(f"{VLLM} + {LOCAL}", VLLM, OURS),
    _labelled(f"default ({DEFAULT}) + {LOCAL}", DEFAULT, OURS),
    _labelled(f"the same, refusing by {ADMISSION}", DEFAULT, OURS, ADMISSION),
)

BASE = Line("vllm + sarathi, best tuned", tuple(f"vllm + {tuned.label}" for tuned in SARATHI))
LINES = (
    Line("vllm + fcfs", ("vllm + fcfs",)),
    BASE,
    *(Line(system.local.label, (system.local.label,)) for system in SYSTEMS[1 + len(SARATHI) :]),
)


def cells(plan: Plan) -> list[Cell]:
    """Data sets x replicas x loads x systems."""
    span = plan.pick(Span(1.0, 4, 6), Span(15.0, 40, 150), Span(120.0, 100, 2_000))
    loads = plan.pick([0.9], [0.6, 0.8, 1.0, 1.25], [0.5, 0.6, 0.7, 0.8, 0.9, 1.05, 1.25])
    grid = []
    for dataset in plan.pick(("qwen",), tuple(FAIRBATCHING), tuple(FAIRBATCHING)):
        for replicas in plan.pick((2,), (8,), (2, 4, 8)):
            labels: dict[str, Value] = {"dataset": dataset, "replicas": float(replicas)}
            make, layout = of_dataset(dataset), colocated(replicas)
            grid += cluster_cells(labels, make, SETUPS["8b"], layout, loads, SYSTEMS, span)
    return grid


def findings(rows: Sequence[Row]) -> Findings:
    """Fig. 8: peak effective rates."""
    lines = []
    for (dataset, replicas), own in grouped(rows, "dataset", "replicas").items():
        base = Estimate.of(list(peaks(own, BASE.policies).values())).mean
        shown = []
        for _, policies in LINES:
            peak = Estimate.of(list(peaks(own, policies).values()))
            shown.append(f"{peak.shown(2)} ({peak.mean / base:.2f} x)" if base else peak.shown(2))
        lines.append((str(dataset), f"{replicas:g}", *shown))
    table = Table(
        "Fig. 8: peak effective rate of all replicas, requests/s (over vLLM's with Sarathi)",
        ("dataset", "replicas", *(line.name for line in LINES)),
        lines,
        "Peaks over loads, mean over seeds.",
    )
    most = max(float(row["replicas"]) for row in rows)
    large = [row for row in rows if row["replicas"] == most]
    title = f"SLO attainment, running max TPOT, {most:g} replicas, mean over data sets"
    by_load = pivot(title, large, ["policy"], "load", FIGURE)
    return Findings([table, by_load], [chart(title, large, "policy", "load", FIGURE, "attainment")])


EXPERIMENT = Experiment(
    name="fairbatching_cluster",
    source="FairBatching Fig. 8",
    question="What does balancing by the prefill admission budget add to FairBatching?",
    setting={
        **{name: words for name, words in ONE_NODE.items() if name != "FairBatching-PAB"},
        "Arrivals": f"{ONE_NODE['Arrivals']}; {LOAD_WORDS}",
        "Balancing": "vLLM's own weighs a waiting request as four running ones (the paper says "
        "only that it counts active requests)",
        "Admission": "none where not named; `refusing`: a request whose objective no replica can "
        "guarantee is refused, and counts as missed",
    },
    seeds=2,
    cells=cells,
    findings=findings,
)
