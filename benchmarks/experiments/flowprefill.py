"""FlowPrefill on instances that only prefill: Fig. 9 (rates and objectives), 10 (S-EDF), 11
(batching), 14 (one objective), 15 (operators and chunks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from sluice.benchmarks.experiments.capacity import CAPACITY_WORDS
from sluice.benchmarks.experiments.grid import Cell, Curves, Experiment, Pivot, Plan, Value
from sluice.benchmarks.experiments.loads import Make, Span, capacity, recorded, sweep, tightest
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    SETUPS,
    Contender,
    Kind,
    Setup,
    Suspending,
)
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.preemption import WHOLE, PreemptionConfig
from sluice.simulation.workload import Arrival, Workload, with_objectives
from sluice.simulation.workloads.settings import FLOWPREFILL_TTFT_S, flowprefill, flowprefill_single

FIGURE = "attainment_mean"
TTFT = "TTFT attainment"
BY_MODEL, BY_POLICY = ("workload", "model"), ("workload", "policy")

MODELS = {"llama3-8b": "8b", "llama3-70b": "70b"}
"""By model: the setup with its step times."""

LONG_TOKENS = 2_500
"""A recorded prompt without a task of Table 1 counts as search from this length, else as text."""

SETTING = {
    "TPOT": "none: only the first token is judged, on an instance that only prefills",
    "Arrivals": "generated, Poisson (the paper replays the Qwen trace, which `--traces` reads); "
    "load 1 is the rate whose mean prefill work fills the engine's time without the fixed time of "
    "its steps",
    "Objectives and priorities": "FlowPrefill Tables 1 and 2: TTFT by task; one priority",
    "Latency": "setups 8b and 70b of benchmarks/experiments/systems.py, noise of 3 % on each task; "
    "nothing ran on an accelerator",
    "Preemption": "a pass stops before its next operator: per layer qkv_proj, attention (the part "
    "of the time that depends on the context), o_proj, gate_up_proj, down_proj (by their weights). "
    "A suspension costs 1.3 ms and a check 0.32 us, both measured on a CPU",
}


PAPER = PreemptionConfig(depth=None, chunk_tokens=WHOLE, batch_tokens=4_096)
"""As in the paper: prompts are not split, and the number of suspended prefills is unlimited."""


def flow(label: str, **changes: object) -> Suspending:
    """The paper's engine, with changes."""
    return Suspending(label, PAPER.model_copy(update=changes))


def bounded(label: str, **changes: object) -> Suspending:
    """The engine with its default bounds, and changes."""
    return Suspending(label, PreemptionConfig().model_copy(update=changes))


def mix(model: str, scale: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's tasks with a model's objectives times ``scale``."""
    return flowprefill(model, rate, requests, seed, scale)


def single(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's run with one objective."""
    return flowprefill_single("llama3-8b", rate, seed, requests)


def _of_trace(
    make: Make, model: str, scale: float, setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    """Recorded arrivals and prompts as single-turn requests with the paper's objectives."""
    by_task = FLOWPREFILL_TTFT_S[model]

    def objective(each: Arrival) -> SLO:
        by_length = "search" if each.prompt_tokens >= LONG_TOKENS else "text"
        return SLO(ttft_s=scale * by_task.get(each.task, by_task[by_length]))

    words = f"TTFT of FlowPrefill Table 2 for {model} times {scale:g}, by task or by length."
    judged = with_objectives(make(setup, rate, requests, seed), objective, words)
    short = tuple(each._replace(output_tokens=1, block_hashes=()) for each in judged.arrivals)
    return Workload(judged.name, short, judged.block_tokens, judged.scaling, judged.description)


def workloads(model: str, scale: float, traces: Path | None) -> dict[str, Make]:
    """The generated workload and every recorded one, by name."""
    found: dict[str, Make] = {"generated": partial(mix, model, scale)}
    for name, make in recorded(traces).items():
        found[name] = partial(_of_trace, make, model, scale)
    return found


def setup_of(model: str) -> Setup:
    """A prefill-only instance: ample KV, and planners know the real step times."""
    setup = SETUPS[MODELS[model]]
    return setup._replace(engine=EngineConfig(kv_blocks=32_768), believed=setup.truth)


def span(plan: Plan) -> Span:
    """How long runs last."""
    return plan.pick(Span(3.0, 10, 20), Span(120.0, 150, 500), Span(300.0, 500, 3_000))


DISTSERVE = Contender("distserve", "fcfs", batch_tokens=8_192)
CP2K = Contender("distserve-cp2k", "edf", {"token_budget": 2_048}, batch_tokens=2_048)
CP8K = Contender("distserve-cp8k", "edf", {"token_budget": 8_192}, batch_tokens=8_192)
CHUNKED = bounded("s_edf, chunks of 1K", granularity="off", chunk_tokens=1_024)
LAYERS = flow("layers", granularity="layer")
FLOW = flow("flowprefill")
BOUNDED = bounded("flowprefill, bounded")

WORDS = {
    "Contenders": "distserve: first come, first served in batches of 8,192 tokens; cp2k, cp8k: "
    "chunks of 2,048 and 8,192 tokens, earliest deadline first; flowprefill: S-EDF with prompts "
    "that are not split, batches below 4,096 tokens and no limit of suspended prefills; layers: "
    "the same, stopped before layers; bounded: with our defaults, 4 suspended, chunks of 8,192, "
    "batches below 1,024; s_edf, chunks of 1K: the same policy without suspension",
    "Capacity": CAPACITY_WORDS,
}


def systems_cells(plan: Plan) -> list[Cell]:
    """Fig. 9: models x systems x rates, and x objectives at one rate; goodputs."""
    kinds: list[Kind] = [DISTSERVE, CP8K, CP2K, CHUNKED, LAYERS, FLOW, BOUNDED, DEFAULT]
    loads = plan.pick(
        [0.6], [0.3, 0.5, 0.7, 0.9, 1.1], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1]
    )
    scales = plan.pick([1.0], [0.5, 1.0, 2.0, 4.0], [0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])
    lasting = span(plan)
    cells = []
    for model in plan.pick(["llama3-8b"], list(MODELS)):
        setup = setup_of(model)
        for name, make in workloads(model, 1.0, plan.traces).items():
            own: dict[str, Value] = {"workload": name, "model": model}
            cells += sweep({**own, "part": "rates"}, make, setup, loads, kinds, lasting)
            cells += [
                Cell(
                    {**own, "part": "goodput", **kind.labels},
                    partial(capacity, make, setup, kind, lasting, FIGURE),
                )
                for kind in kinds
            ]
        cells += _tightest({"model": model}, model, 0.6, kinds, lasting)
        for scale in scales:
            labels: dict[str, Value] = {"model": model, "part": "objectives", "scale": scale}
            cells += sweep(labels, partial(mix, model, scale), setup, [0.6], kinds, lasting)
    return cells


def _tightest(
    labels: Mapping[str, Value], model: str, load: float, kinds: Sequence[Kind], lasting: Span
) -> list[Cell]:
    make = partial(_mix_of, model)
    return [
        Cell(
            {**labels, "part": "tightest", **kind.labels},
            partial(tightest, make, setup_of(model), load, kind, lasting),
        )
        for kind in kinds
    ]


def _mix_of(model: str, scale: float) -> Make:
    return partial(mix, model, scale)


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
    for name, make in workloads(model, 1.0, plan.traces).items():
        for part, kinds in (("order", order), ("batching", batches), ("chunks", chunks)):
            labels = {"workload": name, "part": part}
            cells += sweep(labels, make, setup_of(model), loads, kinds, lasting)
    cells += _tightest({"workload": "generated"}, model, 0.8, order, lasting)
    for part, kinds in (("short", batches), ("single", one)):
        labels = {"workload": "one objective", "part": part}
        cells += sweep(labels, single, setup_of(model), loads, kinds, lasting)
    return cells


PARTS_TITLES = {
    "order": "Fig. 10: order of prefills",
    "batching": "Fig. 11: batching",
    "short": "Fig. 11 with the short prompts of Fig. 14",
    "single": "Fig. 14: one objective",
    "chunks": "Fig. 15: operators and chunks",
}


def _parts_tables() -> list[Pivot]:
    tables = [
        Pivot(f"{title}, {words}", figure, BY_POLICY, digits=digits, where={"part": part})
        for part, title in PARTS_TITLES.items()
        for figure, words, digits in (
            (FIGURE, TTFT, 3),
            ("throughput", "requests/s until the last one ends", 2),
        )
    ]
    title = "Fig. 10: lowest SLO scale at which 90 % attain, load 0.8"
    lowest = Pivot(title, "tightest", ("workload",), "policy", 2, where={"part": "tightest"})
    return [tables[0], lowest, *tables[1:]]


SYSTEMS = Experiment(
    name="flowprefill_systems",
    source="FlowPrefill Fig. 9",
    question="How much more load does preemption at operators with S-EDF serve than chunked "
    "prefill?",
    setting={**SETTING, **WORDS},
    seeds=5,
    cells=systems_cells,
    tables=(
        Pivot(
            "Fig. 9: goodput at 90 %, requests/s",
            *("rate_0.9", BY_MODEL, "policy", 2),
            where={"part": "goodput"},
        ),
        Pivot(
            f"Fig. 9, first row: {TTFT} by load",
            *(FIGURE, (*BY_MODEL, "policy")),
            where={"part": "rates"},
        ),
        Pivot(
            f"Fig. 9, second row: {TTFT} at load 0.6 by SLO scale",
            *(FIGURE, ("model", "policy"), "scale"),
            where={"part": "objectives"},
        ),
        Pivot(
            "Fig. 9, second row: lowest SLO scale at which 90 % attain, load 0.6",
            *("tightest", ("model",), "policy", 2),
            where={"part": "tightest"},
        ),
    ),
    charts=[Curves(f"{TTFT}, mean over models", FIGURE, "attainment", where={"part": "rates"})],
)

PARTS = Experiment(
    name="flowprefill_parts",
    source="FlowPrefill Fig. 10, 11, 14 and 15",
    question="What do S-EDF, batching and chunks add, and does preemption cost anything?",
    setting={**SETTING, **WORDS},
    seeds=5,
    cells=parts_cells,
    tables=_parts_tables(),
    charts=[
        Curves(title, FIGURE, TTFT, where={"part": part}) for part, title in PARTS_TITLES.items()
    ],
)
