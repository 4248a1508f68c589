"""The cost of bounds in an engine that suspends prefills, and the gain of admission past
saturation."""

from __future__ import annotations

from functools import partial

from sluice.benchmarks.experiments.flowprefill import (
    BY_POLICY,
    FIGURE,
    SETTING,
    TTFT,
    bounded,
    setup_of,
    span,
    workloads,
)
from sluice.benchmarks.experiments.grid import Cell, Curves, Experiment, Pivot, Plan, Rows
from sluice.benchmarks.experiments.loads import sweep
from sluice.benchmarks.experiments.systems import Kind, Suspending
from sluice.simulation.planning.plots import Table
from sluice.simulation.preemption import PreemptionConfig

MODEL = "llama3-8b"


def _depths() -> list[Kind]:
    kinds: list[Kind] = [
        bounded(f"{depth} suspended" if depth else "no limit", depth=depth)
        for depth in (1, 2, 4, 8, 16, None)
    ]
    for depth in (1, 4):
        label = f"{depth} suspended, no small chunks"
        kinds.append(bounded(label, depth=depth, late_chunk_tokens=8_192))
    return kinds


def _points() -> list[Kind]:
    kinds: list[Kind] = [bounded("operator"), bounded("layer", granularity="layer")]
    kinds += [
        bounded(f"chunks of {tokens}", granularity="off", chunk_tokens=tokens)
        for tokens in (512, 1_024, 2_048, 8_192)
    ]
    return kinds


def _costs() -> list[Kind]:
    kinds: list[Kind] = [
        bounded(f"{1e3 * seconds:g} ms a suspension", switch_s=seconds)
        for seconds in (0.0, 0.0013, 0.005, 0.02)
    ]
    return [*kinds, bounded("0.1 ms a check", check_s=1e-4)]


def bounds_cells(plan: Plan) -> list[Cell]:
    """Depths, points of preemption and costs, by load."""
    lasting = span(plan)
    below = plan.pick([0.8], [0.5, 0.7, 0.9, 1.1, 1.3], [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3])
    past = plan.pick([1.2], [0.8, 1.0, 1.2, 1.4, 1.6], [0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6])
    cells = []
    for name, make in workloads(MODEL, 1.0, plan.traces).items():
        for part, loads, kinds in (
            ("depth", past, _depths()),
            ("points", below, _points()),
            ("costs", below, _costs()),
        ):
            labels = {"workload": name, "part": part}
            cells += sweep(labels, make, setup_of(MODEL), loads, kinds, lasting)
    return cells


BOUNDS_TITLES = {
    "depth": "Bounds on the stack",
    "points": "Points of preemption (Fig. 12)",
    "costs": "Cost of a preemption",
}
BOUNDS_FIGURES = {
    "depth": (
        (FIGURE, TTFT, 3),
        ("deepest", "max suspended prefills", 1),
        ("suspended_tokens", "max suspended tokens at a time", 0),
        ("held_tokens", "max tokens with KV at a time", 0),
    ),
    "points": (
        (FIGURE, TTFT, 3),
        ("blocked_ms", "blocking, mean ms", 2),
        ("blocked_p99_ms", "blocking, 99th percentile ms", 1),
    ),
    "costs": ((FIGURE, TTFT, 3), ("idle_share", "share of the time lost", 4)),
}


def _of_bounds(table: Pivot, rows: Rows) -> Table:
    """Where nothing is suspended, only attainment says something."""
    if table.figure != FIGURE:
        rows = [row for row in rows if not str(row["policy"]).startswith("chunks")]
    return table(rows)


def admission_cells(plan: Plan) -> list[Cell]:
    """Admission policies x refusal or best effort for the rest x loads around saturation."""
    config = PreemptionConfig()
    kinds: list[Kind] = [bounded("off"), bounded("off, no limit of depth", depth=None)]
    for name in ("moore_hodgson", "slos_serve", "pab"):
        kinds += [
            Suspending(f"{name}, refuse", config, name, refuses=True),
            Suspending(f"{name}, best effort", config, name),
        ]
    loads = plan.pick([1.2], [0.6, 0.8, 1.0, 1.2, 1.4, 1.6], [0.5, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6])
    cells = []
    for name, make in workloads(MODEL, 1.0, plan.traces).items():
        cells += sweep({"workload": name}, make, setup_of(MODEL), loads, kinds, span(plan))
    return cells


ADMITTED = {
    FIGURE: f"{TTFT} of all requests",
    "promised": "share of the requests that were guaranteed",
    "kept": f"{TTFT} of the guaranteed requests",
    "attained_tokens": "share of the prompt tokens whose request attained",
}

BOUNDS = Experiment(
    name="flowprefill_bounds",
    source="ours, around FlowPrefill Fig. 12; its stack has no bound",
    question="How much attainment do a bounded stack, coarser preemption points and their cost "
    "take?",
    setting={
        **SETTING,
        "Engine": "our defaults except what a row names: operators, 4 suspended, chunks of 8,192 "
        "tokens, 512 for tasks that must not be suspended, batches below 1,024",
    },
    seeds=5,
    cells=bounds_cells,
    tables=[
        partial(
            _of_bounds,
            Pivot(f"{title}: {words}", figure, BY_POLICY, digits=digits, where={"part": part}),
        )
        for part, title in BOUNDS_TITLES.items()
        for figure, words, digits in BOUNDS_FIGURES[part]
    ],
    charts=[
        Curves(title, FIGURE, TTFT, where={"part": part}) for part, title in BOUNDS_TITLES.items()
    ],
)

ADMISSION = Experiment(
    name="flowprefill_admission",
    source="ours; FlowPrefill serves every request",
    question="What does admission add to an engine that suspends prefills, past saturation?",
    setting={
        **SETTING,
        "Engine": "our defaults: operators, 4 suspended, chunks of 8,192 tokens, 512 for tasks "
        "that must not be suspended, batches below 1,024",
        "Admission": "the policies of production with their defaults, from a report made at each "
        "arrival; a request without a guarantee is refused, or served after all requests with a "
        "deadline. Attainment counts a refused request as missed, and a best-effort request by its "
        "objective",
    },
    seeds=5,
    cells=admission_cells,
    tables=[Pivot(title, figure, BY_POLICY) for figure, title in ADMITTED.items()],
    charts=[Curves(title, figure, title) for figure, title in ADMITTED.items() if figure != "kept"],
)
