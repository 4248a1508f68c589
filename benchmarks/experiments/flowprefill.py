"""FlowPrefill: Fig. 9 (rates and objectives), 10 (S-EDF), 11 (batching), 14 (one objective)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, Value, chart, pivot
from benchmarks.experiments.capacity import CAPACITY_WORDS, greatest_loads
from benchmarks.experiments.engines import SETUPS, Contender, Setup, figures, run
from benchmarks.experiments.loads import Make, Span, full_load_rate, load_cells
from benchmarks.workloads.settings import flowprefill, flowprefill_single
from scheduling.latency import LinearLatency
from simulation.config import EngineConfig
from simulation.workload import Workload

FIGURE = "attainment_mean"
GRAIN_TOKENS = 64
"""Prefill tokens between two points of preemption: 5 ms of the 8b setup. The paper's operators
block for less than 4.5 ms."""

CHECK_S = 0.0002
"""Time of such a point."""

MODELS = {"llama3-8b": "8b", "llama3-70b": "70b"}

SETTING = {
    "TPOT": "none: only the first token is judged, on an instance that only prefills",
    "Arrivals": "generated, Poisson (the paper replays the Qwen trace); load 1 is the rate whose "
    "mean prefill work fills the engine's time",
    "Objectives and priorities": "FlowPrefill Tables 1 and 2: TTFT by task; one priority",
    "Latency": "setups 8b and 70b of benchmarks/experiments/engines.py; nothing ran on an "
    "accelerator",
    "Operator-level preemption": f"modelled as chunks of {GRAIN_TOKENS} tokens without a chunk's "
    f"cost: a chunk has {CHECK_S * 1e3:g} ms for the check in place of a step's fixed time, and "
    "does not read its context again; the fixed time is paid once per mean prompt instead, as time "
    "per token",
    "Batching (Fig. 11)": "in chunks of up to 4,096 tokens with a step's fixed time: in the model "
    "of operators above a batch would save nothing",
    "Baselines": "DistServe: first come, first served in batches of 8,192 tokens. CP2K, CP8K: "
    "chunks of 2,048 and 8,192 tokens, earliest deadline first",
    "Capacity": CAPACITY_WORDS,
}

Kind = tuple[Contender, bool]
"""A contender, and whether it preempts at operators."""


def _flow(label: str, policy: str = "s_edf", **options: object) -> Kind:
    return Contender(label, policy, {"chunk_tokens": GRAIN_TOKENS, **options}), True


DISTSERVE: Kind = (Contender("distserve", "fcfs", batch_tokens=8_192), False)
CP2K: Kind = (
    Contender("distserve-cp2k", "edf", {"token_budget": 2_048}, batch_tokens=2_048),
    False,
)
CP8K: Kind = (
    Contender("distserve-cp8k", "edf", {"token_budget": 8_192}, batch_tokens=8_192),
    False,
)
CHUNKED: Kind = (Contender("s_edf, chunks of 1K", "s_edf", {"chunk_tokens": 1_024}), False)
OURS: Kind = (Contender("deadline_triage", "deadline_triage"), False)


def _make(
    model: str, scale: float, setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    return flowprefill(model, rate, requests, seed, scale)


def _single(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return flowprefill_single("llama3-8b", rate, seed, requests)


def _setups(model: str) -> tuple[Setup, Setup]:
    """The setup, and the same with preemption at operators."""
    chunked = SETUPS[MODELS[model]]
    config = EngineConfig(kv_blocks=32_768)
    chunked = chunked._replace(engine=config, believed=chunked.truth)
    prompt = flowprefill(model, 1.0, 2_000, 0).mean_prompt_tokens
    fixed_s, token_s, _, square_s = chunked.truth.coefficients
    smooth = LinearLatency(a=CHECK_S, b=token_s + fixed_s / prompt, c=0.0, d=square_s)
    return chunked, chunked._replace(truth=smooth, believed=smooth)


def _span(plan: Plan) -> Span:
    return plan.pick(Span(3.0, 10, 20), Span(120.0, 150, 500), Span(300.0, 500, 3_000))


def _grid(
    labels: Mapping[str, Value],
    model: str,
    make: Make,
    loads: Sequence[float],
    kinds: Sequence[Kind],
    span: Span,
) -> list[Cell]:
    chunked, smooth = _setups(model)
    # Both run at the rates of the engine without preemption.
    full = full_load_rate(make, chunked) / full_load_rate(make, smooth)
    cells = []
    for contender, preempts in kinds:
        if preempts:
            made = load_cells(
                labels, make, smooth, [load * full for load in loads], [contender], span
            )
            cells += [
                cell._replace(labels={**cell.labels, "load": load})
                for cell, load in zip(made, loads, strict=True)
            ]
        else:
            cells += load_cells(labels, make, chunked, loads, [contender], span)
    return cells


def goodput(make: Make, model: str, kind: Kind, span: Span, seed: int) -> Mapping[str, float]:
    """The greatest rate at which 90 % attain."""
    chunked, smooth = _setups(model)
    contender, preempts = kind
    full = full_load_rate(make, chunked)

    def attainment(load: float) -> float:
        workload = make(chunked, load * full, span.requests(load * full), seed)
        served = run(workload, contender, smooth if preempts else chunked, seed)
        return figures(served)[FIGURE]

    return {"goodput": greatest_loads(attainment, (0.9,))[0.9] * full}


def systems_cells(plan: Plan) -> list[Cell]:
    """Fig. 9: models x systems x rates, and x objectives at one rate; goodputs."""
    kinds = [DISTSERVE, CP8K, CP2K, CHUNKED, _flow("flowprefill"), OURS]
    loads = plan.pick(
        [0.6], [0.3, 0.5, 0.7, 0.9, 1.1], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1]
    )
    scales = plan.pick([1.0], [0.5, 1.0, 2.0, 4.0], [0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])
    grid = []
    for model in plan.pick(["llama3-8b"], list(MODELS), list(MODELS)):
        span = _span(plan)
        rates: dict[str, Value] = {"model": model, "part": "rates", "scale": 1.0}
        grid += _grid(rates, model, partial(_make, model, 1.0), loads, kinds, span)
        for scale in scales:
            labels: dict[str, Value] = {"model": model, "part": "objectives", "scale": scale}
            grid += _grid(labels, model, partial(_make, model, scale), [0.6], kinds, span)
        grid += [
            Cell(
                {"model": model, "part": "goodput", "policy": kind[0].label},
                partial(goodput, partial(_make, model, 1.0), model, kind, span),
            )
            for kind in kinds
        ]
    return grid


def _part(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["part"] == name]


def systems_findings(rows: Sequence[Row]) -> Findings:
    """Attainment by rate and by objective, goodput."""
    rates, scales = _part(rows, "rates"), _part(rows, "objectives")
    found = _part(rows, "goodput")
    down = ["model", "policy"]
    return Findings(
        [
            pivot("Fig. 9: goodput at 90 %, requests/s", found, ["model"], "policy", "goodput", 2),
            pivot("Fig. 9, first row: TTFT attainment by load", rates, down, "load", FIGURE),
            pivot(
                "Fig. 9, second row: TTFT attainment at load 0.6 by the factor on the objectives",
                scales,
                down,
                "scale",
                FIGURE,
            ),
        ],
        [chart("TTFT attainment, mean over models", rates, "policy", "load", FIGURE, "attainment")],
    )


def parts_cells(plan: Plan) -> list[Cell]:
    """Fig. 10, 11 and 14 on the 8b setup."""
    model = "llama3-8b"
    loads = plan.pick(
        [0.8], [0.5, 0.7, 0.9, 1.1, 1.3], [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3, 1.5]
    )
    order = [
        _flow("s_edf"),
        _flow("d_edf", "d_edf"),
        _flow("edf", "d_edf", late="in_order"),
        OURS,
    ]
    batches: list[Kind] = [
        (
            Contender(
                f"G = {tokens}" if tokens else "no batching",
                "s_edf",
                {"chunk_tokens": 4_096, "batch_tokens": tokens},
            ),
            False,
        )
        for tokens in (0, 1_024, 2_048, 4_096, 8_192)
    ]
    single = [CP2K, _flow("flowprefill"), CHUNKED]
    mix = partial(_make, model, 1.0)
    span = _span(plan)
    return [
        *_grid({"part": "order"}, model, mix, loads, order, span),
        *_grid({"part": "batching"}, model, mix, loads, batches, span),
        *_grid({"part": "single"}, model, _single, loads, single, span),
    ]


def parts_findings(rows: Sequence[Row]) -> Findings:
    """Attainment and throughput by load."""
    titles = {
        "order": "Fig. 10: order of prefills",
        "batching": "Fig. 11: batching",
        "single": "Fig. 14: one objective",
    }
    tables = [
        pivot(f"{title}, {words}", _part(rows, part), ["policy"], "load", figure, digits)
        for part, title in titles.items()
        for figure, words, digits in (
            (FIGURE, "TTFT attainment", 3),
            ("throughput", "requests/s until the last has ended", 2),
        )
    ]
    charts = [
        chart(title, _part(rows, part), "policy", "load", FIGURE, "TTFT attainment")
        for part, title in titles.items()
    ]
    return Findings(tables, charts)


SYSTEMS = Experiment(
    name="flowprefill_systems",
    source="FlowPrefill Fig. 9",
    question="How much more does preemption at operators with S-EDF serve than chunked prefill?",
    setting=SETTING,
    seeds=5,
    cells=systems_cells,
    findings=systems_findings,
)

PARTS = Experiment(
    name="flowprefill_parts",
    source="FlowPrefill Fig. 10, 11 and 14",
    question="What do S-EDF and batching add, and does preemption cost anything?",
    setting=SETTING,
    seeds=5,
    cells=parts_cells,
    findings=parts_findings,
)
