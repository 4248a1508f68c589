"""ProServe on several nodes: Fig. 11 (disaggregated), 12 (co-located) and 19 (32 instances)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
    DEFAULT,
    LOAD_WORDS,
    Layout,
    System,
    cluster_cells,
    colocated,
    disaggregated,
    local_policies,
)
from sluice.benchmarks.experiments.default_policy import DEFAULT as LOCAL
from sluice.benchmarks.experiments.engines import SETUPS
from sluice.benchmarks.experiments.loads import Make, Span
from sluice.benchmarks.experiments.proserve import SETTING as ONE_NODE
from sluice.benchmarks.experiments.proserve import of_dataset
from sluice.simulation.workloads.settings import PROSERVE_DATASETS

MIN_LOAD, GO_ROUTING = "min_load", "go_routing"

SETTING = {
    **ONE_NODE,
    "Arrivals": f"{ONE_NODE['Arrivals']}; {LOAD_WORDS}",
    "Min-load": "fewest requests: waiting, running and in transit",
}


def _systems(make: Make, setup: str, pairs: Sequence[tuple[str, str]]) -> list[System]:
    names = [local for local, _ in pairs]
    known = {local.label: local for local in local_policies(names, make, SETUPS[setup])}
    return [
        System(router, known[local]._replace(label=f"{local} + {router}"))
        for local, router in pairs
    ]


def _cells(
    plan: Plan,
    setup: str,
    datasets: Sequence[str],
    layout: Layout,
    pairs: Sequence[tuple[str, str]],
) -> list[Cell]:
    span = plan.pick(Span(1.0, 4, 6), Span(20.0, 40, 150), Span(180.0, 200, 3_000))
    loads = plan.pick([1.1], [0.9, 1.2, 1.5], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5])
    grid = []
    for dataset in datasets:
        make = of_dataset(dataset)
        systems = _systems(make, setup, pairs)
        labels: dict[str, Value] = {"dataset": dataset}
        grid += cluster_cells(labels, make, SETUPS[setup], layout, loads, systems, span)
    return grid


def disaggregated_cells(plan: Plan) -> list[Cell]:
    """Data sets x loads x systems on prefill and decode replicas."""
    pairs = [
        (local, router)
        for local in ("slidebatching", "fcfs", LOCAL)
        for router in dict.fromkeys((GO_ROUTING, MIN_LOAD, DEFAULT))
    ]
    size = plan.pick(4, 8, 8)
    datasets = plan.pick(PROSERVE_DATASETS[:1], ("sharegpt", "azure"), PROSERVE_DATASETS)
    return _cells(plan, "8b", datasets, disaggregated(size), pairs)


def colocated_cells(plan: Plan) -> list[Cell]:
    """Data sets x loads x systems on co-located replicas."""
    pairs = [
        (local, router)
        for local in ("slidebatching", "sarathi_priority", LOCAL)
        for router in dict.fromkeys((GO_ROUTING, MIN_LOAD, DEFAULT))
    ]
    return _cells(
        plan,
        "8b",
        plan.pick(("qwen",), ("qwen", "azure"), ("qwen", "azure")),
        colocated(plan.pick(3, 6, 8)),
        pairs,
    )


def large_cells(plan: Plan) -> list[Cell]:
    """Loads x systems on 32 replicas."""
    baselines = ("fcfs", "weighted_vtc", "sarathi", "sarathi_priority", "fairbatching")
    pairs = [
        *((local, MIN_LOAD) for local in baselines),
        ("slidebatching", GO_ROUTING),
        (LOCAL, DEFAULT),
    ]
    datasets = plan.pick(("azure",), ("azure",), ("azure", "qwen"))
    return _cells(plan, "70b", datasets, colocated(plan.pick(4, 32, 32)), pairs)


def _findings(title: str, figures: Mapping[str, str], rows: Sequence[Row]) -> Findings:
    missed = [{**row, "missed": 1 - float(row["tdg"])} for row in rows]
    tables = [
        pivot(f"{title}: {words}", missed, ["dataset", "policy"], "load", figure)
        for figure, words in figures.items()
    ]
    first, words = next(iter(figures.items()))
    means = f"{title}: {words}, mean over data sets"
    if len(grouped(rows, "dataset")) > 1:
        tables.insert(0, pivot(means, missed, ["policy"], "load", first))
    return Findings(tables, [chart(means, missed, "policy", "load", first, words)])


DISAGGREGATED = Experiment(
    name="proserve_disaggregated",
    source="ProServe Fig. 11",
    question="What does GoRouting add where prefill and decode are on separate replicas?",
    setting={
        **SETTING,
        "TPOT": "not judged: TDG of first tokens alone, as in the paper",
        "Latency": "setup 8b of benchmarks/experiments/engines.py in place of Qwen2-7B on Ascend "
        "910B; nothing ran on an accelerator",
        "Replicas": "8, two of which only decode; the paper does not say how many",
    },
    seeds=2,
    cells=disaggregated_cells,
    findings=partial(
        _findings, "Fig. 11", {"tdg_first": "TDG ratio of first tokens", "tdg": "TDG ratio"}
    ),
)

COLOCATED = Experiment(
    name="proserve_colocated",
    source="ProServe Fig. 12",
    question="What does GoRouting add on co-located replicas?",
    setting={
        **SETTING,
        "Latency": "setup 8b of benchmarks/experiments/engines.py in place of Qwen2-7B on Ascend "
        "910B; nothing ran on an accelerator",
        "Replicas": "6; the paper does not say how many",
    },
    seeds=2,
    cells=colocated_cells,
    findings=partial(
        _findings,
        "Fig. 12",
        {"missed": "missed TDG ratio", "attainment_mean": "SLO attainment, mean TPOT"},
    ),
)

LARGE = Experiment(
    name="proserve_large",
    source="ProServe Fig. 19",
    question="Does the ordering hold on 32 instances?",
    setting={
        **SETTING,
        "Latency": "setup 70b of benchmarks/experiments/engines.py in place of Qwen3-32B on "
        "Ascend 910B; nothing ran on an accelerator",
        "Data": "azure in place of the paper's own traces, which are not public",
        "Routers": "min-load for the baselines, GoRouting for ProServe, our default for ours; the "
        "paper does not name the baselines' router",
    },
    seeds=2,
    cells=large_cells,
    findings=partial(
        _findings,
        "Fig. 19",
        {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio"},
    ),
)
