"""FlowPrefill: Fig. 9 (rates and objectives), 10 (S-EDF), 11 (batching), 14 (one objective), 15
(operators and chunks)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sluice.benchmarks.experiments.base import (
    Cell,
    Experiment,
    Findings,
    Plan,
    Row,
    Value,
    chart,
    pivot,
)
from sluice.benchmarks.experiments.capacity import CAPACITY_WORDS
from sluice.benchmarks.experiments.engines import Contender
from sluice.benchmarks.experiments.loads import Make
from sluice.benchmarks.experiments.prefills import (
    FIGURE,
    MODELS,
    SETTING,
    Kind,
    bounded,
    flow,
    goodput,
    grid,
    mix,
    of_scale,
    single,
    span,
    tightest,
    workloads,
)
from sluice.simulation.preemption import WHOLE

DISTSERVE = Contender("distserve", "fcfs", batch_tokens=8_192)
CP2K = Contender("distserve-cp2k", "edf", {"token_budget": 2_048}, batch_tokens=2_048)
CP8K = Contender("distserve-cp8k", "edf", {"token_budget": 8_192}, batch_tokens=8_192)
CHUNKED = bounded("s_edf, chunks of 1K", granularity="off", chunk_tokens=1_024)
LAYERS = flow("layers", granularity="layer")
FLOW = flow("flowprefill")
BOUNDED = bounded("flowprefill, bounded")
TRIAGE = Contender("deadline_triage", "deadline_triage")

WORDS = {
    "Contenders": "distserve: first come, first served in batches of 8,192 tokens; cp2k, cp8k: "
    "chunks of 2,048 and 8,192 tokens, earliest deadline first; flowprefill: S-EDF with prompts "
    "that are not split, batches below 4,096 tokens and no limit of suspended prefills; layers: "
    "the same, stopped before layers; bounded: with our defaults, 4 suspended, chunks of 8,192, "
    "batches below 1,024; s_edf, chunks of 1K: the same policy without suspension",
    "Capacity": CAPACITY_WORDS,
}


def _makes(plan: Plan, model: str) -> dict[str, Make]:
    return workloads(model, 1.0, plan.traces)


def systems_cells(plan: Plan) -> list[Cell]:
    """Fig. 9: models x systems x rates, and x objectives at one rate; goodputs."""
    kinds: list[Kind] = [DISTSERVE, CP8K, CP2K, CHUNKED, LAYERS, FLOW, BOUNDED, TRIAGE]
    loads = plan.pick(
        [0.6], [0.3, 0.5, 0.7, 0.9, 1.1], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1]
    )
    scales = plan.pick([1.0], [0.5, 1.0, 2.0, 4.0], [0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])
    lasting = span(plan)
    cells = []
    for model in plan.pick(["llama3-8b"], list(MODELS), list(MODELS)):
        for name, make in _makes(plan, model).items():
            own: dict[str, Value] = {"workload": name, "model": model}
            cells += grid({**own, "part": "rates"}, model, make, loads, kinds, lasting)
            cells += [
                Cell(
                    {**own, "part": "goodput", "policy": kind.label},
                    partial(goodput, make, model, kind, lasting),
                )
                for kind in kinds
            ]
        cells += [
            Cell(
                {"model": model, "part": "tightest", "policy": kind.label},
                partial(tightest, of_scale(model), model, 0.6, kind, lasting),
            )
            for kind in kinds
        ]
        for scale in scales:
            labels: dict[str, Value] = {"model": model, "part": "objectives", "scale": scale}
            cells += grid(labels, model, partial(mix, model, scale), [0.6], kinds, lasting)
    return cells


def _part(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["part"] == name]


def systems_findings(rows: Sequence[Row]) -> Findings:
    """Attainment by rate and by objective, goodput."""
    rates, scales = _part(rows, "rates"), _part(rows, "objectives")
    found = _part(rows, "goodput")
    down = ["workload", "model"]
    return Findings(
        [
            pivot("Fig. 9: goodput at 90 %, requests/s", found, down, "policy", "goodput", 2),
            pivot(
                "Fig. 9, first row: TTFT attainment by load",
                rates,
                [*down, "policy"],
                "load",
                FIGURE,
            ),
            pivot(
                "Fig. 9, second row: TTFT attainment at load 0.6 by SLO scale",
                scales,
                ["model", "policy"],
                "scale",
                FIGURE,
            ),
            pivot(
                "Fig. 9, second row: lowest SLO scale at which 90 % attain, load 0.6",
                _part(rows, "tightest"),
                ["model"],
                "policy",
                "tightest",
                2,
            ),
        ],
        [chart("TTFT attainment, mean over models", rates, "policy", "load", FIGURE, "attainment")],
    )


def parts_cells(plan: Plan) -> list[Cell]:
    """Fig. 10, 11, 14 and 15 on the 8b setup."""
    model = "llama3-8b"
    loads = plan.pick(
        [0.8], [0.5, 0.7, 0.9, 1.1, 1.3], [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3, 1.5]
    )
    order: list[Kind] = [
        flow("s_edf"),
        flow("d_edf", foresight="deadline"),
        flow("edf", foresight="none"),
    ]
    batches: list[Kind] = [
        flow(f"G = {tokens}" if tokens else "no batching", batch_tokens=tokens)
        for tokens in (0, 512, 1_024, 2_048, 4_096, 8_192)
    ]
    chunks: list[Kind] = [
        flow(f"chunks of {tokens}" if tokens < WHOLE else "not split", chunk_tokens=tokens)
        for tokens in (2_048, 4_096, 8_192, 16_384, WHOLE)
    ]
    one: list[Kind] = [CP2K, FLOW, BOUNDED, CHUNKED]
    lasting = span(plan)
    cells = []
    for name, make in _makes(plan, model).items():
        for part, kinds in (("order", order), ("batching", batches), ("chunks", chunks)):
            labels: dict[str, Value] = {"workload": name, "part": part}
            cells += grid(labels, model, make, loads, kinds, lasting)
    cells += [
        Cell(
            {"workload": "generated", "part": "tightest", "policy": kind.label},
            partial(tightest, of_scale(model), model, 0.8, kind, lasting),
        )
        for kind in order
    ]
    for part, kinds in (("short", batches), ("single", one)):
        labels = {"workload": "one objective", "part": part}
        cells += grid(labels, model, single, loads, kinds, lasting)
    return cells


def parts_findings(rows: Sequence[Row]) -> Findings:
    """Attainment and throughput by load."""
    titles = {
        "order": "Fig. 10: order of prefills",
        "batching": "Fig. 11: batching",
        "short": "Fig. 11 with the short prompts of Fig. 14",
        "single": "Fig. 14: one objective",
        "chunks": "Fig. 15: operators and chunks",
    }
    shown = ["workload", "policy"]
    tables = [
        pivot(f"{title}, {words}", _part(rows, part), shown, "load", figure, digits)
        for part, title in titles.items()
        for figure, words, digits in (
            (FIGURE, "TTFT attainment", 3),
            ("throughput", "requests/s until the last one ends", 2),
        )
    ]
    tables.insert(
        1,
        pivot(
            "Fig. 10: lowest SLO scale at which 90 % attain, load 0.8",
            _part(rows, "tightest"),
            ["workload"],
            "policy",
            "tightest",
            2,
        ),
    )
    charts = [
        chart(title, _part(rows, part), "policy", "load", FIGURE, "TTFT attainment")
        for part, title in titles.items()
    ]
    return Findings(tables, charts)


SYSTEMS = Experiment(
    name="flowprefill_systems",
    source="FlowPrefill Fig. 9",
    question="How much more load does preemption at operators with S-EDF serve than chunked "
    "prefill?",
    setting={**SETTING, **WORDS},
    seeds=5,
    cells=systems_cells,
    findings=systems_findings,
)

PARTS = Experiment(
    name="flowprefill_parts",
    source="FlowPrefill Fig. 10, 11, 14 and 15",
    question="What do S-EDF, batching and chunks add, and does preemption cost anything?",
    setting={**SETTING, **WORDS},
    seeds=5,
    cells=parts_cells,
    findings=parts_findings,
)
