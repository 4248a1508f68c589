"""FlowPrefill on prefill instances (Fig. 9 to 11, 13 to 15, 17), with decodes (16), and bounds
(12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from msgspec.structs import replace

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.grid import (
    Axes,
    Experiment,
    Pivot,
    Product,
    Scaled,
    first,
)
from sluice.benchmarks.experiments.systems import DEFAULT, Contender, Kind, Setup, Suspending
from sluice.simulation.config import EngineConfig
from sluice.simulation.generators import LengthDistribution
from sluice.simulation.preemption import WHOLE, SuspensionConfig
from sluice.simulation.settings import flowprefill, flowprefill_single
from sluice.simulation.workload import Workload, with_objectives

FIGURE = "attainment_mean"
MODELS = {"8b": "llama3-8b", "70b": "llama3-70b", "30b-a3b": "llama3-8b"}
"""The model whose objectives a setup has; the paper states none for its model with experts."""

TBT_S = {"text": 0.1, "image": 0.1, "search": 0.2, "file": 0.2}
"""Objectives between two tokens, by task (§6.5)."""

SETTING = (
    "Only the TTFT is judged, by task as in FlowPrefill Tables 1 and 2, on an instance that only "
    "prefills. Load 1: the mean prefill work fills the engine's time without the fixed time of "
    "its steps. A pass stops before its next operator; a suspension costs 1.3 ms and a check "
    "0.32 us, both measured on a CPU. "
)
SPAN = loads.Span(120.0, 150, 500)
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


def mix(scale: float) -> loads.Make:
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


def setup_of(name: str) -> Setup:
    """A prefill-only instance: ample KV, and planners know the real step times."""
    setup = systems.SETUPS[name]
    return setup._replace(engine=EngineConfig(kv_blocks=32_768), believed=setup.truth)


def tightest(
    seed: int, policy: Kind, setup: Setup, load: float, span: loads.Span
) -> Mapping[str, float]:
    """The lowest factor on the objectives at which 90 % attain; infinite above 20."""
    rate = load * loads.full_load_rate(mix(1.0), setup)

    def attainment(strictness: float) -> float:
        case = loads.Conditions(mix(1.0 / strictness), setup)
        return loads.measure(policy, seed, case, rate, span.requests(rate))[FIGURE]

    found = loads.Search(FIGURE).loads(attainment)[0.9]
    return {"tightest": 1.0 / found if found else inf}


WORDS = (
    "Contenders: distserve: first come, first served in batches of 8,192 tokens; cp2k, cp8k: "
    "chunks of 2,048 and 8,192 tokens, earliest deadline first; flowprefill: S-EDF with prompts "
    "that are not split, batches below 4,096 tokens and no limit of suspended prefills; bounded: "
    "with our defaults, 4 suspended, chunks of 8,192, batches below 1,024."
)
SETUP = setup_of("8b")
BOTH = {"8b": SETUP, "70b": setup_of("70b")}
MIX = {"generated": mix(1.0)}
BELOW = (0.5, 0.7, 0.9, 1.1, 1.3)
Shown = tuple[str, str, int]
"""A figure, its words in a title and its digits."""


class Part(NamedTuple):
    """One grid of an experiment, whose cells are labelled with it, and its tables."""

    grid: loads.Sweep | Product
    tables: Sequence[Pivot]


def _part(
    name: str,
    title: str,
    kinds: Sequence[Kind],
    figures: Sequence[Shown],
    at: Sequence[float | loads.Search] = BELOW,
    made: Mapping[Any, loads.Make] = MIX,
    setups: Sequence[Setup] = (SETUP,),
    down: Sequence[str] = ("workload", "policy"),
    across: str = "load",
) -> Part:
    sweep = loads.Sweep(
        workloads=made, kinds=kinds, loads=at, span=SPAN, setups=setups, labels={"part": name}
    )
    return Part(sweep, _tables(name, title, figures, down, across))


def _tables(
    part: str, title: str, figures: Sequence[Shown], down: Sequence[str], across: str
) -> list[Pivot]:
    return [
        Pivot(f"{title}{words}", figure, down, across, digits, where={"part": part})
        for figure, words, digits in figures
    ]


def _goodput(title: str, kinds: Sequence[Kind], *setups: Setup) -> Part:
    figure = "rate_0.9", "goodput at 90 %, requests/s", 2
    down = "workload", "setup"
    return _part(
        "goodput", title, kinds, [figure], (loads.Search(FIGURE),), MIX, setups, down, "policy"
    )


def _tightest(title: str, kinds: Sequence[Kind], load: float, setups: Mapping[str, Setup]) -> Part:
    axes: Axes = {"setup": first(setups), "policy": kinds}
    fixed = {"load": load, "span": Scaled(loads.QUICK, SPAN)}
    figure = "tightest", f"lowest SLO scale at which 90 % attain, load {load:g}", 2
    return Part(
        Product(tightest, axes, fixed, {"part": "tightest", "workload": "generated"}),
        _tables("tightest", title, [figure], ("setup",), "policy"),
    )


def _experiment(
    name: str, source: str, question: str, setting: str, parts: Sequence[Part]
) -> Experiment:
    return Experiment(
        *(name, source, question),
        seeds=5,
        setting=f"{SETTING}{setting}",
        grids=[part.grid for part in parts],
        tables=[table for part in parts for table in part.tables],
    )


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

SYSTEMS = _experiment(
    "flowprefill_systems",
    "FlowPrefill Fig. 9",
    "How much more load does preemption at operators with S-EDF serve than chunked prefill?",
    WORDS,
    [_goodput("Fig. 9: ", KINDS, *BOTH.values()), _tightest("Fig. 9: ", KINDS, 0.6, BOTH)],
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
ATTAINED = (FIGURE, "TTFT attainment", 3)
BOTH_FIGURES = (ATTAINED, ("throughput", "requests/s until the last one ends", 2))
ALL_FIGURES = (*BOTH_FIGURES, ("batches", "batches per request", 3))

PARTS = _experiment(
    "flowprefill_parts",
    "FlowPrefill Fig. 10, 11, 14 and 15",
    "What do S-EDF, batching and chunks add, and does preemption cost anything?",
    WORDS,
    [
        _part("order", "Fig. 10: order of prefills, ", ORDER, [ATTAINED]),
        _tightest("Fig. 10: ", ORDER, 0.8, {"8b": SETUP}),
        _part("batching", "Fig. 11: batching, ", BATCHES, BOTH_FIGURES),
        _part(
            *("short", "Fig. 11 with the short prompts of Fig. 14, ", BATCHES, BOTH_FIGURES),
            made=ONE,
        ),
        _part(
            *("single", "Fig. 14: one objective, ", (CP2K, FLOW, BOUNDED, CHUNKED), ALL_FIGURES),
            made=ONE,
        ),
        _part(
            *("proportional", "Fig. 14 without a fixed time of a step, "),
            *((CP2K, FLOW, BOUNDED), BOTH_FIGURES),
            made=ONE,
            setups=(NOTHING_FIXED,),
        ),
        _part("chunks", "Fig. 15: operators and chunks, ", CHUNKS, BOTH_FIGURES),
    ],
)

# Other settings of the paper.

VLLM = Contender("vllm-cp2k", "sarathi", {"token_budget": 2_048}, batch_tokens=2_048)
EXPERTS = setup_of("30b-a3b")
DENSE = (DISTSERVE, CP8K, CP2K, FLOW, BOUNDED)

SETTINGS = _experiment(
    "flowprefill_settings",
    "FlowPrefill Fig. 13, 16 and 17",
    "Is the TTFT predictable, and does preemption pay beside decodes, and with experts?",
    f"{WORDS} Fig. 13: near the step time of the prompt alone. Fig. 16: outputs "
    "of 100 tokens in the mean (assumed); ours runs the phases in turn, the paper's at once. Fig. "
    "17: Qwen3-30B-A3B on two GPUs, objectives of Llama3-8B, as the paper states none.",
    [
        _part(
            *("prediction", "Fig. 13: share of the requests with a TTFT as predicted, ", (FLOW,)),
            [("near_10", "within 10 %", 3)],
            (0.1, 0.3, 0.5, 0.7),
            setups=tuple(BOTH.values()),
            down=("setup",),
        ),
        _part(
            *("colocated", "Fig. 16: both phases on one instance, "),
            (VLLM, DEFAULT, FLOW, BOUNDED),
            [
                ("ttft_met", "TTFT attainment by request", 3),
                ("tbt_met", "TBT attainment by token", 3),
            ],
            made={"co-located": colocated},
        ),
        _goodput("Fig. 17: ", DENSE, EXPERTS),
        _tightest("Fig. 17: ", DENSE, 0.6, {"30b-a3b": EXPERTS}),
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

BOUNDS = _experiment(
    "flowprefill_bounds",
    "ours, around FlowPrefill Fig. 12; its stack has no bound",
    "How much attainment do a bounded stack, coarser preemption points and their cost take?",
    "Our defaults except what a row names: operators, 4 suspended, chunks of "
    "8,192 tokens, 512 for tasks that must not be suspended, batches below 1,024.",
    [
        _part(
            *("depth", "Bounds on the stack: ", _DEPTHS),
            [ATTAINED, ("suspended_tokens", "max suspended tokens at a time", 0)],
            (0.8, 1.0, 1.2, 1.4, 1.6),
        ),
        _part(
            *("points", "Points of preemption (Fig. 12): ", [*_STOPS, *_CUTS]),
            [ATTAINED, ("blocked_ms", "blocking, mean ms", 2)],
        ),
        _part("costs", "Cost of a preemption: ", _COSTS, [ATTAINED]),
    ],
)
