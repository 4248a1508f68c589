"""ProServe on one node: Fig. 10 (policies), 13 (priorities), 15 (ablation), 18 (weights); and on
several: Fig. 11 (disaggregated), 12 (co-located), 19 (32 instances)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sluice.benchmarks.experiments.grid import Experiment, Planned, Scaled
from sluice.benchmarks.experiments.loads import (
    CLUSTER_WORDS,
    LOAD_WORDS,
    Make,
    Span,
    Sweep,
    Workloads,
    generated,
    latency_words,
)
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    Layout,
    Setup,
    System,
    colocated,
    disaggregated,
)
from sluice.benchmarks.experiments.tables import (
    Pivot,
    Rows,
    Where,
    estimate,
    grouped,
    having,
    pivots,
)
from sluice.simulation.planning.plots import Table
from sluice.simulation.workloads.settings import PROSERVE_DATASETS, PROSERVE_SLO, proserve

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope, first and later tokens weighted by "
    "the workload's mean prompt and output length",
    "Arrivals": f"generated, Poisson (the paper stretches recorded times); {LOAD_WORDS}",
    "Objectives and priorities": f"TTFT {PROSERVE_SLO.ttft_s:g} s, TPOT {PROSERVE_SLO.tpot_s:g} s; "
    "two priorities with equal chance, weights 2 and 1 unless stated",
    "Latency": latency_words(
        "setups 8b and 70b", ", in place of Qwen2-7B and Qwen3-32B on Ascend 910B"
    ),
    "Sarathi": "token budget profiled per setup: tokens of a batch within the TPOT objective",
}
SLIDE = Contender("slidebatching", "slidebatching")
SPAN = Scaled(Span(3.0, 10, 20), Span(60.0, 200, 600))
DATASETS = partial(generated, proserve)
TWO = Scaled(("sharegpt",), ("sharegpt", "azure"))
TDG, ATTAINED = "tdg", "attainment_mean"
BY_POLICY = ("dataset", "policy")


def _plain(*names: str) -> list[Contender]:
    return [Contender(name, name) for name in names]


_LARGE: Where = {
    "setup": "70b",
    "dataset": ("sharegpt", "azure"),
    "policy": ("sarathi", "sarathi_priority", "slidebatching", "deadline_triage"),
}

POLICIES = Experiment(
    name="proserve_policies",
    source="ProServe Fig. 10 and 13",
    question="Does SlideBatching gain more than the other policies, and what do priorities attain?",
    setting=SETTING,
    seeds=3,
    grids=[
        Sweep(
            named=("dataset",),
            workloads=Workloads(DATASETS, Scaled(PROSERVE_DATASETS[:1], PROSERVE_DATASETS)),
            setups=(SETUPS["8b"], SETUPS["70b"]),
            loads=Scaled((1.1,), (0.8, 1.0, 1.2, 1.5)),
            kinds=(
                *_plain("fcfs", "weighted_vtc", "sarathi", "sarathi_priority", "fairbatching"),
                *(SLIDE, DEFAULT),
            ),
            span=SPAN,
        )
    ],
    tables=(
        Pivot("Fig. 10: TDG ratio, mean over data sets", TDG, ("setup", "policy")),
        Pivot("Fig. 10: SLO attainment, mean over data sets", ATTAINED, ("setup", "policy")),
        Pivot(
            "Fig. 10 by data set: SLO attainment, mean over loads and setups",
            *(ATTAINED, ("dataset",), "policy"),
        ),
        *pivots(
            {"attainment_priority_2": "high", "attainment_priority_1": "low"},
            title="Fig. 13: SLO attainment, {} priority, setup 70b, sharegpt and azure",
            where=_LARGE,
        ),
    ),
)


def _normalised(rows: Rows) -> Table:
    loads = [load for (load,) in grouped(rows, "load")]
    lines = []
    for (dataset, policy), own in grouped(rows, "dataset", "policy").items():
        line = [str(dataset), str(policy)]
        for load in loads:
            cell = having(own, {"load": load})
            whole = having(rows, {"dataset": dataset, "load": load, "policy": SLIDE.label})
            missed, least = (1 - estimate(part, TDG).mean for part in (cell, whole))
            line.append(f"{missed / least:.2f} x" if least > 1e-9 else f"{missed:.4f} (of 0)")
        lines.append(line)
    return Table(
        "Fig. 15: missed TDG over that of SlideBatching",
        ("dataset", "policy", *map(str, loads)),
        lines,
        "Ratios of the means over seeds. `late ones count` is Algorithm 1 to the letter.",
    )


ABLATION = Experiment(
    name="proserve_ablation",
    source="ProServe Fig. 15",
    question="What does each part of SlideBatching add?",
    setting={**SETTING, "Setup": "8b alone"},
    seeds=5,
    grids=[
        Sweep(
            named=("dataset",),
            workloads=Workloads(DATASETS, TWO),
            loads=Scaled((1.1,), (0.8, 1.1, 1.5)),
            kinds=(
                SLIDE,
                Contender("only deadline", "slidebatching", {"order": "deadline"}),
                Contender("only density", "slidebatching", {"order": "density"}),
                Contender("without estimator", "slidebatching", {"latency_aware": False}),
                Contender("late ones count", "slidebatching", {"late": "include"}),
            ),
            span=SPAN,
        )
    ],
    tables=(
        _normalised,
        Pivot("TDG ratio", TDG, BY_POLICY, digits=4),
        Pivot("SLO attainment", ATTAINED, BY_POLICY),
    ),
)


def _weighted(high: float) -> Make:
    return generated(proserve, "sharegpt", priorities=(int(high), 1))


def by_priority(rows: Rows) -> Rows:
    """Attainment of each priority by name; with a weight of 1 there is one priority."""
    return [
        {
            **row,
            "high": row.get(f"attainment_priority_{row['weight']:g}", row[ATTAINED]),
            "low": row.get("attainment_priority_1", row[ATTAINED]),
        }
        for row in rows
    ]


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
    grids=[
        Sweep(
            named=("weight",),
            workloads=Workloads(_weighted, Scaled((1.0, 10.0), (1.0, 2.0, 5.0, 10.0))),
            loads=Scaled((1.3,), (1.1, 1.5)),
            kinds=(SLIDE, *_plain("sarathi_priority"), DEFAULT),
            span=SPAN,
        )
    ],
    derive=by_priority,
    tables=pivots(
        {ATTAINED: "overall", "high": "high priority", "low": "low priority"},
        *(("load", "policy"), "weight"),
        title="Fig. 18: SLO attainment, {}",
    ),
)

# On several nodes.

MIN_LOAD, GO_ROUTING = "min_load", "go_routing"


def _behind(local: str, *routers: str) -> list[System]:
    """A local policy behind each of some routers."""
    return [System(router, Contender(f"{local} + {router}", local)) for router in routers]


def _pairs(*locals_: str) -> list[System]:
    routers = dict.fromkeys((GO_ROUTING, MIN_LOAD, ROUTER))
    return [system for local in (*locals_, DEFAULT.policy) for system in _behind(local, *routers)]


def missed(rows: Rows) -> Rows:
    """The missed TDG ratio of each row."""
    return [{**row, "missed": 1 - float(row[TDG])} for row in rows]


def _on_cluster(
    name: str,
    title: str,
    question: str,
    setting: Mapping[str, str],
    figures: Mapping[str, str],
    datasets: Scaled[tuple[str, ...]],
    layouts: Scaled[tuple[Layout]],
    kinds: Sequence[System],
    setups: Planned[Sequence[Setup]] = (SETUPS["8b"],),
) -> Experiment:
    first, words = next(iter(figures.items()))
    means = Pivot(f"{title}: {words}, mean over data sets", first)
    return Experiment(
        name=name,
        source=f"ProServe {title}",
        question=question,
        setting={
            **SETTING,
            "Arrivals": f"{SETTING['Arrivals']}; {CLUSTER_WORDS}",
            "Min-load": "fewest requests: waiting, running and in transit",
            **setting,
        },
        seeds=2,
        grids=[
            Sweep(
                named=("dataset",),
                workloads=Workloads(DATASETS, datasets),
                setups=setups,
                layouts=layouts,
                loads=Scaled((1.1,), (0.9, 1.2, 1.5)),
                kinds=kinds,
                span=Scaled(Span(1.0, 4, 6), Span(20.0, 40, 150)),
            )
        ],
        derive=missed,
        tables=[
            *([means] if len(datasets.normal) > 1 else []),
            *pivots(figures, BY_POLICY, title=f"{title}: {{}}"),
        ],
    )


DISAGGREGATED = _on_cluster(
    "proserve_disaggregated",
    "Fig. 11",
    "What does GoRouting add where prefill and decode are on separate replicas?",
    {
        "TPOT": "not judged: TDG of first tokens alone, as in the paper",
        "Replicas": "8, two of which only decode; the paper does not say how many",
    },
    {"tdg_first": "TDG ratio of first tokens", TDG: "TDG ratio"},
    TWO,
    Scaled((disaggregated(4),), (disaggregated(8),)),
    _pairs("slidebatching", "fcfs"),
)

COLOCATED = _on_cluster(
    "proserve_colocated",
    "Fig. 12",
    "What does GoRouting add on co-located replicas?",
    {"Replicas": "6; the paper does not say how many"},
    {"missed": "missed TDG ratio", ATTAINED: "SLO attainment, mean TPOT"},
    Scaled(("qwen",), ("qwen", "azure")),
    Scaled((colocated(3),), (colocated(6),)),
    _pairs("slidebatching", "sarathi_priority"),
)

LARGE = _on_cluster(
    "proserve_large",
    "Fig. 19",
    "Does the ordering hold on 32 instances?",
    {
        "Latency": latency_words("setup 70b", " in place of Qwen3-32B on Ascend 910B"),
        "Data": "azure in place of the paper's own traces, which are not public",
        "Routers": "min-load for the baselines, GoRouting for ProServe, our default for ours; the "
        "paper does not name the baselines' router",
    },
    {ATTAINED: "SLO attainment, mean TPOT", TDG: "TDG ratio"},
    Scaled(("azure",), ("azure",)),
    Scaled((colocated(4),), (colocated(32),)),
    [
        *(
            system
            for local in ("fcfs", "weighted_vtc", "sarathi", "sarathi_priority", "fairbatching")
            for system in _behind(local, MIN_LOAD)
        ),
        *(*_behind("slidebatching", GO_ROUTING), *_behind(DEFAULT.policy, ROUTER)),
    ],
    setups=(SETUPS["70b"],),
)
