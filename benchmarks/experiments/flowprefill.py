"""FlowPrefill on prefill instances (Fig. 9 to 11, 13 to 15, 17), with decodes (16), and bounds
(12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.grid import (
    Axes,
    Experiment,
    Pivot,
    Planned,
    Product,
    Rows,
    Scaled,
    Where,
    first,
)
from sluice.benchmarks.experiments.loads import (
    QUICK,
    Make,
    Search,
    Span,
    Sweep,
    recorded,
    workloads,
)
from sluice.benchmarks.experiments.systems import DEFAULT, Contender, Kind, Setup, Suspending
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.generators import LengthDistribution
from sluice.simulation.preemption import WHOLE, SuspensionConfig
from sluice.simulation.settings import FLOWPREFILL_TTFT_S, flowprefill, flowprefill_single
from sluice.simulation.workload import Arrival, Workload, with_objectives

FIGURE = "attainment_mean"
TTFT = "TTFT attainment"
MODELS = {"8b": "llama3-8b", "70b": "llama3-70b", "30b-a3b": "llama3-8b"}
"""The model whose objectives a setup has; the paper states none for its model with experts."""

TBT_S = {"text": 0.1, "image": 0.1, "search": 0.2, "file": 0.2}
"""Objectives between two tokens, by task (§6.5)."""

LONG_TOKENS = 2_500
"""A recorded prompt without a task of Table 1 counts as search from this length, else as text."""

SETTING = (
    "Only the TTFT is judged, by task as in FlowPrefill Tables 1 and 2, on an instance that only "
    "prefills. Load 1: the mean prefill work fills the engine's time without the fixed time of "
    "its steps. A pass stops before its next operator; a suspension costs 1.3 ms and a check "
    "0.32 us, both measured on a CPU. "
)
SPAN = Span(120.0, 150, 500)
PAPER = SuspensionConfig(depth=WHOLE, chunk_tokens=WHOLE, batch_tokens=4_096)
"""As in the paper: prompts are not split, and the number of suspended prefills is unlimited."""


def flow(label: str, **changes: Any) -> Suspending:
    """The paper's engine, with changes."""
    return Suspending(label, dataclasses.replace(PAPER, **changes))


def bounded(label: str, **changes: Any) -> Suspending:
    """The engine with its default bounds, and changes."""
    return Suspending(label, dataclasses.replace(SuspensionConfig(), **changes))


def _mix(scale: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return flowprefill(MODELS[setup.name], rate, requests, seed, scale)


def mix(scale: float) -> Make:
    """The paper's tasks with the objectives of the setup's model times ``scale``."""
    return partial(_mix, scale)


def colocated(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's run with both phases on one instance (§6.5): 3 times the TTFT, and outputs."""
    output = LengthDistribution.of_p90(100, 200)
    made = flowprefill(MODELS[setup.name], rate, requests, seed, 3.0, output)
    words = "TBT of FlowPrefill §6.5, by task."
    return with_objectives(made, lambda a: replace(a.slo, tpot_s=TBT_S[a.task]), words)


def single(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's run with one objective."""
    return flowprefill_single("llama3-8b", rate, seed, requests)


def _of_trace(make: Make, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """Recorded arrivals and prompts as single-turn requests with the paper's objectives."""
    model = MODELS[setup.name]
    by_task = FLOWPREFILL_TTFT_S[model]

    def objective(each: Arrival) -> SLO:
        by_length = "search" if each.prompt_tokens >= LONG_TOKENS else "text"
        return SLO(ttft_s=by_task.get(each.task, by_task[by_length]))

    words = f"TTFT of FlowPrefill Table 2 for {model}, by task or by length."
    judged = with_objectives(make(setup, rate, requests, seed), objective, words)
    short = tuple(each._replace(output_tokens=1, block_hashes=()) for each in judged.arrivals)
    return Workload(judged.name, short, judged.block_tokens, judged.scaling, judged.description)


def of_traces(folder: Path | None) -> Mapping[str, Make]:
    """Every recorded workload, by name."""
    return {name: partial(_of_trace, make) for name, make in recorded(folder).items()}


def setup_of(name: str) -> Setup:
    """A prefill-only instance: ample KV, and planners know the real step times."""
    setup = systems.SETUPS[name]
    return setup._replace(engine=EngineConfig(kv_blocks=32_768), believed=setup.truth)


def tightest(seed: int, policy: Kind, setup: Setup, load: float, span: Span) -> Mapping[str, float]:
    """The lowest factor on the objectives at which 90 % attain; infinite above 20."""
    rate = load * loads.full_load_rate(mix(1.0), setup)

    def attainment(strictness: float) -> float:
        case = loads.Conditions(mix(1.0 / strictness), setup)
        return loads.measure(policy, seed, case, rate, span.requests(rate))[FIGURE]

    found = Search(FIGURE).loads(attainment)[0.9]
    return {"tightest": 1.0 / found if found else inf}


WORDS = (
    "Contenders: distserve: first come, first served in batches of 8,192 tokens; cp2k, cp8k: "
    "chunks of 2,048 and 8,192 tokens, earliest deadline first; flowprefill: S-EDF with prompts "
    "that are not split, batches below 4,096 tokens and no limit of suspended prefills; bounded: "
    "with our defaults, 4 suspended, chunks of 8,192, batches below 1,024."
)
SETUP = setup_of("8b")
BOTH = {"8b": SETUP, "70b": setup_of("70b")}
MIX = workloads(("generated",), lambda name: mix(1.0), of_traces)
BELOW = (0.5, 0.7, 0.9, 1.1, 1.3)


def _sweep(
    part: str,
    kinds: Sequence[Kind],
    at: Planned[Sequence[float | Search]] = BELOW,
    made: Planned[Mapping[Any, Make]] = MIX,
    setups: Planned[Sequence[Setup]] = (SETUP,),
    **more: Any,
) -> Sweep:
    labels = {"part": part}
    return Sweep(
        workloads=made, kinds=kinds, loads=at, span=SPAN, setups=setups, labels=labels, **more
    )


def _tightest(
    kinds: Sequence[Contender | Suspending], load: float, setups: Mapping[str, Setup]
) -> Product:
    axes: Axes = {"setup": first(setups), "policy": kinds}
    fixed = {"load": load, "span": Scaled(QUICK, SPAN)}
    return Product(tightest, axes, fixed, {"part": "tightest", "workload": "generated"})


def _tables(
    part: str,
    title: str,
    *figures: tuple[str, str, int],
    down: Sequence[str] = ("workload", "policy"),
    across: str = "load",
    policies: Sequence[Suspending] = (),
) -> list[Pivot]:
    where: Where = {"part": part}
    if policies:
        where = {"part": part, "policy": tuple(kind.label for kind in policies)}
    return [
        Pivot(f"{title}{words}", figure, down, across, digits, where=where)
        for figure, words, digits in figures
    ]


DISTSERVE = Contender("distserve", "fcfs", batch_tokens=8_192)
CP2K = Contender("distserve-cp2k", "edf", {"token_budget": 2_048}, batch_tokens=2_048)
CP8K = Contender("distserve-cp8k", "edf", {"token_budget": 8_192}, batch_tokens=8_192)
CHUNKED = bounded("s_edf, chunks of 1K", granularity="off", chunk_tokens=1_024)
FLOW = flow("flowprefill")
BOUNDED = bounded("flowprefill, bounded")
KINDS = (
    *(DISTSERVE, CP8K, CP2K, CHUNKED, flow("layers", granularity="layer")),
    *(FLOW, BOUNDED, DEFAULT),
)

GOODPUT = ("rate_0.9", "goodput at 90 %, requests/s", 2)
BY_LOAD = (FIGURE, f"{TTFT} by load", 3)
BY_SCALE = (FIGURE, f"{TTFT} at load 0.6 by SLO scale", 3)
SECOND = "Fig. 9, second row: "


def tightest_at(load: float) -> tuple[str, str, int]:
    """The figure of :func:`tightest` at a load, its words and digits."""
    return "tightest", f"lowest SLO scale at which 90 % attain, load {load:g}", 2


def by_model(rows: Rows) -> Rows:
    """The model of each setup."""
    return [{**row, "model": MODELS[str(row["setup"])]} for row in rows]


SYSTEMS = Experiment(
    "flowprefill_systems",
    "FlowPrefill Fig. 9",
    "How much more load does preemption at operators with S-EDF serve than chunked prefill?",
    seeds=5,
    setting=f"{SETTING}{WORDS}",
    grids=[
        _sweep("rates", KINDS, (0.3, 0.5, 0.7, 0.9, 1.1), setups=tuple(BOTH.values())),
        _sweep("goodput", KINDS, (Search(FIGURE),), setups=tuple(BOTH.values())),
        _tightest(KINDS, 0.6, BOTH),
        _sweep(
            *("objectives", KINDS, (0.6,)),
            workloads((0.5, 1.0, 2.0, 4.0), mix),
            setups=tuple(BOTH.values()),
            named=("scale",),
        ),
    ],
    derive=by_model,
    tables=[
        *_tables("goodput", "Fig. 9: ", GOODPUT, down=("workload", "model"), across="policy"),
        *_tables("rates", "Fig. 9, first row: ", BY_LOAD, down=("workload", "model", "policy")),
        *_tables("objectives", SECOND, BY_SCALE, down=("model", "policy"), across="scale"),
        *_tables("tightest", SECOND, tightest_at(0.6), down=("model",), across="policy"),
    ],
)

# Parts.

ORDER = (flow("s_edf"), flow("d_edf", foresight="deadline"), flow("edf", foresight="none"))
BATCHES = tuple(
    flow(f"G = {tokens}" if tokens else "no batching", batch_tokens=tokens)
    for tokens in (0, 512, 1_024, 2_048, 4_096, 8_192)
)
CHUNKS = tuple(
    flow(f"chunks of {tokens}" if tokens < WHOLE else "not split", chunk_tokens=tokens)
    for tokens in (2_048, 4_096, 8_192, 16_384, WHOLE)
)
ONE = {"one objective": single}
PROPORTIONAL = SETUP.truth.of([0.0, *SETUP.truth.coefficients[1:]])
NOTHING_FIXED = SETUP._replace(truth=PROPORTIONAL, believed=PROPORTIONAL)
ATTAINED = (FIGURE, TTFT, 3)
THROUGHPUT = ("throughput", "requests/s until the last one ends", 2)
PER_REQUEST = ("batches", "batches per request", 3)

PARTS = Experiment(
    "flowprefill_parts",
    "FlowPrefill Fig. 10, 11, 14 and 15",
    "What do S-EDF, batching and chunks add, and does preemption cost anything?",
    seeds=5,
    setting=f"{SETTING}{WORDS}",
    grids=[
        _sweep("order", ORDER),
        _sweep("batching", BATCHES),
        _sweep("chunks", CHUNKS),
        _tightest(ORDER, 0.8, {"8b": SETUP}),
        _sweep("short", BATCHES, made=ONE),
        _sweep("single", (CP2K, FLOW, BOUNDED, CHUNKED), made=ONE),
        _sweep("proportional", (CP2K, FLOW, BOUNDED), made=ONE, setups=(NOTHING_FIXED,)),
    ],
    tables=[
        *_tables("order", "Fig. 10: order of prefills, ", ATTAINED),
        *_tables("tightest", "Fig. 10: ", tightest_at(0.8), down=("workload",), across="policy"),
        *_tables("batching", "Fig. 11: batching, ", ATTAINED),
        *_tables("short", "Fig. 11 with the short prompts of Fig. 14, ", ATTAINED, THROUGHPUT),
        *_tables("single", "Fig. 14: one objective, ", ATTAINED, THROUGHPUT, PER_REQUEST),
        *_tables("proportional", "Fig. 14 without a fixed time of a step, ", ATTAINED, THROUGHPUT),
        *_tables("chunks", "Fig. 15: operators and chunks, ", ATTAINED, THROUGHPUT),
    ],
)

# Other settings of the paper.

VLLM = Contender("vllm-cp2k", "sarathi", {"token_budget": 2_048}, batch_tokens=2_048)
EXPERTS = setup_of("30b-a3b")
DENSE = (DISTSERVE, CP8K, CP2K, FLOW, BOUNDED)

SETTINGS = Experiment(
    "flowprefill_settings",
    "FlowPrefill Fig. 13, 16 and 17",
    "Is the TTFT predictable, and does preemption pay beside decodes, and with experts?",
    seeds=5,
    setting=f"{SETTING}{WORDS} Fig. 13: near the step time of the prompt alone. Fig. 16: outputs "
    "of 100 tokens in the mean (assumed); ours runs the phases in turn, the paper's at once. Fig. "
    "17: Qwen3-30B-A3B on two GPUs, objectives of Llama3-8B, as the paper states none.",
    grids=[
        _sweep("prediction", (FLOW,), (0.1, 0.3, 0.5, 0.7), setups=tuple(BOTH.values())),
        _sweep("colocated", (VLLM, DEFAULT, FLOW, BOUNDED), made={"co-located": colocated}),
        _sweep("experts", DENSE, setups=(EXPERTS,)),
        _sweep("goodput", DENSE, (Search(FIGURE),), setups=(EXPERTS,)),
        _tightest(DENSE, 0.6, {"30b-a3b": EXPERTS}),
    ],
    tables=[
        *_tables(
            *("prediction", "Fig. 13: share of the requests with a TTFT as predicted, "),
            ("near_10", "within 10 %", 3),
            ("near_50", "within 50 %", 3),
            down=("setup",),
        ),
        *_tables(
            *("colocated", "Fig. 16: both phases on one instance, "),
            ("ttft_met", "TTFT attainment by request", 3),
            ("tbt_met", "TBT attainment by token", 3),
        ),
        *_tables("experts", "Fig. 17: a model with experts, ", ATTAINED),
        *_tables("goodput", "Fig. 17: ", GOODPUT, down=("workload",), across="policy"),
        *_tables("tightest", "Fig. 17: ", tightest_at(0.6), down=("workload",), across="policy"),
    ],
)

# Bounds.

_DEPTHS = [
    bounded(f"{depth} suspended" if depth < WHOLE else "no limit", depth=depth)
    for depth in (1, 2, 4, 8, 16, WHOLE)
] + [
    bounded(f"{depth} suspended, no small chunks", depth=depth, small_chunk_tokens=8_192)
    for depth in (1, 4)
]
_STOPS = [bounded("operator"), bounded("layer", granularity="layer")]
_CUTS = [
    bounded(f"chunks of {tokens}", granularity="off", chunk_tokens=tokens)
    for tokens in (512, 1_024, 2_048, 8_192)
]
_COSTS = [
    bounded(f"{1e3 * seconds:g} ms a suspension", switch_s=seconds)
    for seconds in (0.0, 0.0013, 0.005, 0.02)
] + [bounded("0.1 ms a check", check_s=1e-4)]

BOUNDS = Experiment(
    "flowprefill_bounds",
    "ours, around FlowPrefill Fig. 12; its stack has no bound",
    "How much attainment do a bounded stack, coarser preemption points and their cost take?",
    seeds=5,
    setting=f"{SETTING}Our defaults except what a row names: operators, 4 suspended, chunks of "
    "8,192 tokens, 512 for tasks that must not be suspended, batches below 1,024.",
    grids=[
        _sweep("depth", _DEPTHS, (0.8, 1.0, 1.2, 1.4, 1.6)),
        _sweep("points", [*_STOPS, *_CUTS]),
        _sweep("costs", _COSTS),
    ],
    tables=[
        *_tables(
            *("depth", "Bounds on the stack: ", ATTAINED),
            ("suspended_tokens", "max suspended tokens at a time", 0),
        ),
        *_tables("points", "Points of preemption (Fig. 12): ", ATTAINED),
        *_tables(
            *("points", "Points of preemption (Fig. 12): ", ("blocked_ms", "blocking, mean ms", 2)),
            policies=_STOPS,
        ),
        *_tables("costs", "Cost of a preemption: ", ATTAINED),
    ],
)
