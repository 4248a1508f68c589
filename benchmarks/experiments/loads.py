"""Workloads by load: generated ones, and windows of recorded traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments.capacity import ALL_LOADS, Loads, greatest_loads
from sluice.benchmarks.experiments.grid import Cell, Value
from sluice.benchmarks.experiments.systems import Contender, Kind, Layout, Setup, served
from sluice.scheduling.latency.model import LatencyModel
from sluice.simulation.workload import (
    Workload,
    stretched,
    thinned,
    with_objectives,
    with_priorities,
)
from sluice.simulation.workloads import traces
from sluice.simulation.workloads.arrivals import OnOff
from sluice.simulation.workloads.generators import Slowdown
from sluice.simulation.workloads.lengths import LengthDistribution
from sluice.simulation.workloads.settings import (
    chat_and_code,
    fairbatching,
    flowprefill,
    proserve,
    proserve_objectives,
    slos_serve,
)
from sluice.simulation.workloads.traces import TraceError

Make = Callable[[Setup, float, int, int], Workload]
"""A workload for a setup: its rate, the number of requests, and the seed."""

LOAD_WORDS = (
    "load 1 is the rate at which the work of the mean request fills the engine's time in steps as "
    "long as the tightest TPOT objective, or at which its decodes fill the KV"
)
SAMPLE = 2_000
"""Requests over which the mean work is taken."""

CLUSTER_WORDS = (
    "the load is that of each replica; with separate prefill and decode, of all together"
)


def alone_s(model: LatencyModel) -> Callable[[int], float]:
    """Time to the first token of a prompt on an idle engine."""
    return lambda prompt_tokens: model.fixed_s + model.work_s(prompt_tokens, 0)


def _proserve(dataset: str, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return proserve(dataset, rate, requests, seed)


def _fairbatching(dataset: str, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return fairbatching(dataset, rate, requests, seed)


def _slos_serve(scenario: str, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return slos_serve(scenario, rate, requests, seed, alone_s(setup.truth))


def _bursty(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return proserve("sharegpt", rate, requests, seed, arrivals=partial(OnOff, on_s=8.0, off_s=12.0))


def _flowprefill(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    output = LengthDistribution.of_p90(100, 200)
    model = "llama3-8b" if setup.truth.fixed_s < 0.02 else "llama3-70b"
    return flowprefill(model, rate, requests, seed, output=output)


def _chat_and_code(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return chat_and_code(requests, seed, rate)


GENERATED: dict[str, Make] = {
    "proserve sharegpt": partial(_proserve, "sharegpt"),
    "proserve azure": partial(_proserve, "azure"),
    "proserve bursty": _bursty,
    "fairbatching burstgpt": partial(_fairbatching, "burstgpt"),
    "fairbatching azure": partial(_fairbatching, "azure"),
    "slos-serve mixed": partial(_slos_serve, "mixed"),
    "slos-serve coder": partial(_slos_serve, "coder"),
    "slos-serve tools": partial(_slos_serve, "tools"),
    "flowprefill": _flowprefill,
    "chat and code": _chat_and_code,
}
"""The papers' settings (:mod:`sluice.simulation.workloads.settings`), one without a TPOT objective
and one in bursts of 8 s on average with 12 s of silence between them."""


@lru_cache(maxsize=8)
def _trace(path: Path) -> Workload:
    return traces.load(path)


def _recorded(
    path: Path, scaling: str, setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    """``requests`` of a trace, from a position drawn by ``seed``, at a rate.

    ``stretched`` multiplies the times. ``thinned`` drops requests at random, and if even the whole
    trace is too slow for the rate, stretches it to the rate.
    """
    trace = _trace(path)
    share = min(1.0, rate / trace.rate) if scaling == "thinned" else 1.0
    wanted = min(len(trace), max(1, round(requests / share)))
    start = int(np.random.default_rng(seed).integers(len(trace) - wanted + 1))
    workload = _slice(trace, start, wanted)
    if share < 1:
        workload = thinned(workload, share, seed)
    # The rate is a mean over the trace; this window has its own.
    workload = stretched(workload, workload.rate / rate)
    if workload.mean_prompt_tokens < 4_000:
        return proserve_objectives(workload, seed)
    slowdown = Slowdown(3.0, alone_s(setup.truth), 0.8, 0.08)
    words = "TTFT 3 times that of the prompt on an idle engine, at least 0.8 s; TPOT 0.08 s."
    judged = with_objectives(workload, lambda a: slowdown(a.prompt_tokens), words)
    return with_priorities(judged, {2: 1.0, 1: 1.0}, seed)


def _slice(trace: Workload, start: int, count: int) -> Workload:
    chosen = trace.arrivals[start : start + count]
    begin_s = chosen[0].arrival_s
    moved = tuple(arrival._replace(arrival_s=arrival.arrival_s - begin_s) for arrival in chosen)
    words = f"{trace.description} Requests {start} to {start + count - 1}."
    return replace(trace, arrivals=moved, description=words)


def recorded(folder: Path | None) -> dict[str, Make]:
    """Every trace in ``folder``, by file and by how its rate is reached.

    Raises:
        TraceError: the folder has no trace, or a trace cannot be read.
    """
    if folder is None:
        return {}
    files = sorted(path for path in folder.iterdir() if path.suffix in (".csv", ".jsonl"))
    if not files:
        raise TraceError(f"{folder}: has no .csv or .jsonl file")
    found: dict[str, Make] = {}
    for path in files:
        _trace(path)
        for scaling in ("stretched", "thinned"):
            found[f"{path.stem} ({scaling})"] = partial(_recorded, path, scaling)
    return found


def full_load_rate(make: Make, setup: Setup) -> float:
    """The rate of load 1, see :data:`LOAD_WORDS`."""
    sample = make(setup, 1.0, SAMPLE, 0)
    model = setup.truth
    work_s, held_tokens = 0.0, 0.0
    for arrival in sample.arrivals:
        prompts = [arrival.prompt_tokens, *(stage.prompt_tokens for stage in arrival.stages)]
        output, context = arrival.output_tokens, 0
        for prompt in prompts:
            work_s += model.work_s(prompt, context) if prompt else 0.0
            context += prompt
        middle = context + output // 2
        work_s += output * model.work_s(1, middle)
        held_tokens += output * middle
    work_s, held_tokens = work_s / len(sample), held_tokens / len(sample)
    tpot_s = least_tpot_s(sample)
    if tpot_s == inf:
        return 1 / work_s
    busy = (1 - min(model.fixed_s / tpot_s, 0.7)) / work_s
    return min(busy, setup.engine.kv_tokens / (held_tokens * tpot_s))


def least_tpot_s(workload: Workload) -> float:
    """The tightest TPOT objective that a request states; infinite without any."""
    return min((arrival.slo.tpot_s or inf for arrival in workload.arrivals), default=inf)


class Span(NamedTuple):
    """How long a run's arrivals last: ``seconds``, with at least ``least`` and at most ``most``
    requests."""

    seconds: float
    least: int
    most: int

    def requests(self, rate: float) -> int:
        """Requests at a rate."""
        return round(min(max(rate * self.seconds, self.least), self.most))


def cluster_rate(make: Make, setup: Setup, layout: Layout) -> float:
    """Requests per second that are load 1 of all replicas together."""
    others = layout.size - len(layout.nodes)
    of_node = {node.name: full_load_rate(make, node) for node in layout.nodes}
    rate = others * full_load_rate(make, setup) if others else 0.0
    return rate + sum(of_node[node.name] for node in layout.nodes)


def measure(
    make: Make,
    setup: Setup,
    rate: float,
    requests: int,
    kind: Kind,
    layout: Layout | None,
    oracle: bool,
    seed: int,
) -> Mapping[str, float]:
    """The figures of one run of a cell."""
    return served(make(setup, rate, requests, seed), kind, setup, layout, oracle, seed)


def sweep(
    labels: Mapping[str, Value],
    make: Make,
    setup: Setup,
    loads: Sequence[float],
    kinds: Sequence[Kind],
    span: Span,
    layout: Layout | None = None,
    oracle: bool = False,
) -> list[Cell]:
    """A cell per load and kind, with the label ``load`` and the kind's labels added.

    Args:
        labels: of all cells.
        make: the workload.
        setup: of the engine, or of the replicas that ``layout`` does not name.
        loads: see :data:`LOAD_WORDS`; of a cluster, of all replicas together.
        kinds: to compare.
        span: of the arrivals; its numbers of requests apply to each replica.
        layout: the replicas of systems with a router.
        oracle: whether output lengths are known.
    """
    size = 1 if layout is None else layout.size
    full = full_load_rate(make, setup) if layout is None else cluster_rate(make, setup, layout)
    cells = []
    for load in loads:
        rate = load * full
        run = make, setup, rate, span.requests(rate / size) * size
        for kind in kinds:
            names = {**labels, "load": load, **kind.labels}
            cells.append(Cell(names, partial(measure, *run, kind, layout, oracle)))
    return cells


def capacity(
    make: Make,
    setup: Setup,
    kind: Kind,
    span: Span,
    figure: str,
    seed: int,
    shares: Sequence[float] = (0.9,),
    loads: Loads = ALL_LOADS,
    layout: Layout | None = None,
    oracle: bool = False,
) -> Mapping[str, float]:
    """The highest rates, per replica, at which these shares of the requests attain:
    ``rate_0.9``."""
    full, size = full_load_rate(make, setup), 1 if layout is None else layout.size

    def attainment(load: float) -> float:
        rate, requests = load * full * size, span.requests(load * full) * size
        return measure(make, setup, rate, requests, kind, layout, oracle, seed)[figure]

    found = greatest_loads(attainment, shares, loads)
    return {f"rate_{share:g}": load * full for share, load in found.items()}


def tightest(
    make: Callable[[float], Make], setup: Setup, load: float, kind: Kind, span: Span, seed: int
) -> Mapping[str, float]:
    """The lowest factor on the objectives at which 90 % attain; infinite if none up to 20 suffices.

    Args:
        make: the workload by the factor.
    """
    rate = load * full_load_rate(make(1.0), setup)

    def attainment(strictness: float) -> float:
        run = make(1.0 / strictness), setup, rate, span.requests(rate), kind, None, False
        return measure(*run, seed)["attainment_mean"]

    found = greatest_loads(attainment, (0.9,))[0.9]
    return {"tightest": 1.0 / found if found else inf}


STATIC = ("sarathi", "sarathi_priority", "edf", "sjf")
"""Policies under a static token budget, which is profiled for each workload and setup."""


def contenders(names: Iterable[str], make: Make, setup: Setup) -> list[Contender]:
    """Local policies with their default options; a static token budget is profiled."""
    budget = profiled_budget(setup, least_tpot_s(make(setup, 1.0, SAMPLE, 0)))
    return [
        Contender(name, name, {"token_budget": budget} if name in STATIC else {}) for name in names
    ]


def profiled_budget(setup: Setup, tpot_s: float) -> int:
    """Sarathi's static budget: the max tokens of a fresh prompt that a batch processes within the
    TPOT objective; from 64 to 2,048, vLLM's own default."""
    tokens = setup.truth.tokens_within(tpot_s - setup.truth.fixed_s, 0) if tpot_s < inf else 2_048
    return min(max(64, tokens), 2_048)
