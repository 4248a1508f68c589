"""ProServe on one node: Fig. 10 (policies), 13 (priorities), 15 (ablation), 18 (weights); and on
several: Fig. 11 (disaggregated), 12 (co-located), 19 (32 instances)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sluice.benchmarks.experiments.grid import (
    Cell,
    Curves,
    Experiment,
    Pivot,
    Plan,
    Rows,
    estimate,
    grouped,
    having,
)
from sluice.benchmarks.experiments.loads import (
    CLUSTER_WORDS,
    LOAD_WORDS,
    Make,
    Span,
    contenders,
    profiled_budget,
    sweep,
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
from sluice.simulation.planning.plots import Table
from sluice.simulation.workload import Workload
from sluice.simulation.workloads.settings import PROSERVE_DATASETS, PROSERVE_SLO, proserve

SLIDE = Contender("slidebatching", "slidebatching")

SETTING = {
    "TPOT": "mean since the first token; TDG by the envelope, first and later tokens weighted by "
    "the workload's mean prompt and output length",
    "Arrivals": f"generated, Poisson (the paper stretches recorded times); {LOAD_WORDS}",
    "Objectives and priorities": f"TTFT {PROSERVE_SLO.ttft_s:g} s, TPOT {PROSERVE_SLO.tpot_s:g} s; "
    "two priorities with equal chance, weights 2 and 1 unless stated",
    "Latency": "setups 8b and 70b of benchmarks/experiments/systems.py, in place of Qwen2-7B and "
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
    loads = plan.pick([1.1], [0.8, 1.0, 1.2, 1.5], [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2])
    grid = []
    for dataset in plan.pick(PROSERVE_DATASETS[:1], PROSERVE_DATASETS):
        for setup in (SETUPS["8b"], SETUPS["70b"]):
            plain = [Contender(name, name) for name in ("fcfs", "weighted_vtc", "fairbatching")]
            budgeted = [_sarathi(name, setup) for name in ("sarathi", "sarathi_priority")]
            kinds = [*plain[:2], *budgeted, plain[2], SLIDE, DEFAULT]
            labels = {"dataset": dataset, "setup": setup.name}
            grid += sweep(labels, of_dataset(dataset), setup, loads, kinds, _span(plan))
    return grid


def _fig_13(level: int, name: str) -> partial[Table]:
    title = f"Fig. 13: SLO attainment, {name} priority, setup 70b, sharegpt and azure"
    return partial(_large, Pivot(title, f"attainment_priority_{level}", ("policy",)))


def _large(table: Pivot, rows: Rows) -> Table:
    policies = ("sarathi", "sarathi_priority", "slidebatching", "deadline_triage")
    return table(
        [
            row
            for row in having(rows, {"setup": "70b"})
            if row["policy"] in policies and row["dataset"] in ("sharegpt", "azure")
        ]
    )


POLICIES = Experiment(
    name="proserve_policies",
    source="ProServe Fig. 10 and 13",
    question="Does SlideBatching gain more than the other policies, and what do priorities attain?",
    setting=SETTING,
    seeds=3,
    cells=policy_cells,
    tables=(
        Pivot("Fig. 10: TDG ratio, mean over data sets", "tdg", ("setup", "policy")),
        Pivot(
            "Fig. 10: SLO attainment, mean over data sets", "attainment_mean", ("setup", "policy")
        ),
        Pivot(
            "Fig. 10 by data set: SLO attainment, mean over loads and setups",
            *("attainment_mean", ("dataset",), "policy"),
        ),
        _fig_13(2, "high"),
        _fig_13(1, "low"),
    ),
    charts=[
        Curves(f"{words}, mean over data sets and setups", figure, words)
        for figure, words in (("tdg", "TDG ratio"), ("attainment_mean", "SLO attainment"))
    ],
)


def ablation_cells(plan: Plan) -> list[Cell]:
    """The variants of §5.4 on two data sets at three loads."""
    kinds = [
        SLIDE,
        Contender("only deadline", "slidebatching", {"order": "deadline"}),
        Contender("only density", "slidebatching", {"order": "density"}),
        Contender("without estimator", "slidebatching", {"latency_aware": False}),
        Contender("late ones count", "slidebatching", {"late": "include"}),
    ]
    loads = plan.pick([1.1], [0.8, 1.1, 1.5], [0.7, 0.9, 1.1, 1.3, 1.6])
    return [
        cell
        for name in plan.pick(("sharegpt",), ("sharegpt", "azure"), tuple(PROSERVE_DATASETS))
        for cell in sweep(
            {"dataset": name}, of_dataset(name), SETUPS["8b"], loads, kinds, _span(plan)
        )
    ]


def _normalised(rows: Rows) -> Table:
    loads = [load for (load,) in grouped(rows, "load")]
    lines = []
    for (dataset, policy), own in grouped(rows, "dataset", "policy").items():
        line = [str(dataset), str(policy)]
        for load in loads:
            cell = having(own, {"load": load})
            whole = having(rows, {"dataset": dataset, "load": load, "policy": SLIDE.label})
            missed, least = (1 - estimate(part, "tdg").mean for part in (cell, whole))
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
    cells=ablation_cells,
    tables=(
        _normalised,
        Pivot("TDG ratio", "tdg", ("dataset", "policy"), digits=4),
        Pivot("SLO attainment", "attainment_mean", ("dataset", "policy")),
    ),
    charts=[Curves("TDG ratio of SlideBatching's variants", "tdg", "TDG")],
)


def weight_cells(plan: Plan) -> list[Cell]:
    """Weights of the high priority at two loads."""
    setup = SETUPS["8b"]
    kinds = [SLIDE, _sarathi("sarathi_priority", setup), DEFAULT]
    loads = plan.pick([1.3], [1.1, 1.5], [0.9, 1.1, 1.3, 1.6])
    return [
        cell
        for high in plan.pick([1, 10], [1, 2, 5, 10], [1, 2, 3, 5, 7, 10])
        for cell in sweep(
            {"weight": float(high)}, of_dataset("sharegpt", high), setup, loads, kinds, _span(plan)
        )
    ]


def by_priority(rows: Rows) -> Rows:
    """Attainment of each priority by name; with a weight of 1 there is one priority."""
    return [
        {
            **row,
            "high": row.get(f"attainment_priority_{row['weight']:g}", row["attainment_mean"]),
            "low": row.get("attainment_priority_1", row["attainment_mean"]),
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
    cells=weight_cells,
    derive=by_priority,
    tables=[
        Pivot(f"Fig. 18: SLO attainment, {name}", figure, ("load", "policy"), "weight")
        for figure, name in (
            ("attainment_mean", "overall"),
            ("high", "high priority"),
            ("low", "low priority"),
        )
    ],
    charts=[Curves("Fig. 18: SLO attainment, high priority", "high", "SLO attainment", x="weight")],
)

# On several nodes.

MIN_LOAD, GO_ROUTING = "min_load", "go_routing"
CLUSTER_SETTING = {
    **SETTING,
    "Arrivals": f"{SETTING['Arrivals']}; {CLUSTER_WORDS}",
    "Min-load": "fewest requests: waiting, running and in transit",
    "Latency": "setup 8b of benchmarks/experiments/systems.py in place of Qwen2-7B on Ascend "
    "910B; nothing ran on an accelerator",
}


def _on_cluster(
    plan: Plan,
    setup: Setup,
    datasets: Sequence[str],
    layout: Layout,
    pairs: Sequence[tuple[str, str]],
) -> list[Cell]:
    """Data sets x loads x pairs of a local policy and a router."""
    span = plan.pick(Span(1.0, 4, 6), Span(20.0, 40, 150), Span(180.0, 200, 3_000))
    loads = plan.pick([1.1], [0.9, 1.2, 1.5], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5])
    grid = []
    for dataset in datasets:
        make = of_dataset(dataset)
        known = {
            kind.label: kind for kind in contenders([local for local, _ in pairs], make, setup)
        }
        systems = [
            System(router, known[local]._replace(label=f"{local} + {router}"))
            for local, router in pairs
        ]
        grid += sweep({"dataset": dataset}, make, setup, loads, systems, span, layout)
    return grid


def _pairs(*locals_: str) -> list[tuple[str, str]]:
    routers = dict.fromkeys((GO_ROUTING, MIN_LOAD, ROUTER))
    return [(local, router) for local in (*locals_, DEFAULT.policy) for router in routers]


def disaggregated_cells(plan: Plan) -> list[Cell]:
    """Data sets x loads x systems on prefill and decode replicas."""
    datasets = plan.pick(("sharegpt",), ("sharegpt", "azure"), tuple(PROSERVE_DATASETS))
    layout = disaggregated(plan.pick(4, 8))
    return _on_cluster(plan, SETUPS["8b"], datasets, layout, _pairs("slidebatching", "fcfs"))


def colocated_cells(plan: Plan) -> list[Cell]:
    """Data sets x loads x systems on co-located replicas."""
    layout, pairs = colocated(plan.pick(3, 6, 8)), _pairs("slidebatching", "sarathi_priority")
    return _on_cluster(plan, SETUPS["8b"], plan.pick(("qwen",), ("qwen", "azure")), layout, pairs)


def large_cells(plan: Plan) -> list[Cell]:
    """Loads x systems on 32 replicas."""
    baselines = ("fcfs", "weighted_vtc", "sarathi", "sarathi_priority", "fairbatching")
    pairs = [(local, MIN_LOAD) for local in baselines]
    pairs += [("slidebatching", GO_ROUTING), (DEFAULT.policy, ROUTER)]
    datasets = plan.pick(("azure",), ("azure",), ("azure", "qwen"))
    return _on_cluster(plan, SETUPS["70b"], datasets, colocated(plan.pick(4, 32)), pairs)


def missed(rows: Rows) -> Rows:
    """The missed TDG ratio of each row."""
    return [{**row, "missed": 1 - float(row["tdg"])} for row in rows]


def _means(table: Pivot, rows: Rows) -> Table:
    """The mean over data sets, where there are several."""
    return table(rows if len(grouped(rows, "dataset")) > 1 else ())


def _cluster_experiment(
    name: str,
    title: str,
    question: str,
    setting: dict[str, str],
    figures: dict[str, str],
    cells: Callable[[Plan], Sequence[Cell]],
) -> Experiment:
    first, words = next(iter(figures.items()))
    means = f"{title}: {words}, mean over data sets"
    return Experiment(
        name=name,
        source=f"ProServe {title}",
        question=question,
        setting={**CLUSTER_SETTING, **setting},
        seeds=2,
        cells=cells,
        derive=missed,
        tables=(
            partial(_means, Pivot(means, first, ("policy",))),
            *(
                Pivot(f"{title}: {words}", figure, ("dataset", "policy"))
                for figure, words in figures.items()
            ),
        ),
        charts=[Curves(means, first, words)],
    )


DISAGGREGATED = _cluster_experiment(
    "proserve_disaggregated",
    "Fig. 11",
    "What does GoRouting add where prefill and decode are on separate replicas?",
    {
        "TPOT": "not judged: TDG of first tokens alone, as in the paper",
        "Replicas": "8, two of which only decode; the paper does not say how many",
    },
    {"tdg_first": "TDG ratio of first tokens", "tdg": "TDG ratio"},
    disaggregated_cells,
)

COLOCATED = _cluster_experiment(
    "proserve_colocated",
    "Fig. 12",
    "What does GoRouting add on co-located replicas?",
    {"Replicas": "6; the paper does not say how many"},
    {"missed": "missed TDG ratio", "attainment_mean": "SLO attainment, mean TPOT"},
    colocated_cells,
)

LARGE = _cluster_experiment(
    "proserve_large",
    "Fig. 19",
    "Does the ordering hold on 32 instances?",
    {
        "Latency": "setup 70b of benchmarks/experiments/systems.py in place of Qwen3-32B on "
        "Ascend 910B; nothing ran on an accelerator",
        "Data": "azure in place of the paper's own traces, which are not public",
        "Routers": "min-load for the baselines, GoRouting for ProServe, our default for ours; the "
        "paper does not name the baselines' router",
    },
    {"attainment_mean": "SLO attainment, mean TPOT", "tdg": "TDG ratio"},
    large_cells,
)
