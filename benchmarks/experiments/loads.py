"""Workloads by load: generated ones, and windows of recorded traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments.base import Cell, Value
from sluice.benchmarks.experiments.engines import Contender, Setup, figures, run
from sluice.scheduling.latency import LatencyModel
from sluice.simulation.workload import (
    Workload,
    stretched,
    thinned,
    with_objectives,
    with_priorities,
)
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
from sluice.simulation.workloads.traces import TraceError, load

Make = Callable[[Setup, float, int, int], Workload]
"""A workload for a setup: its rate, the number of requests, and the seed."""

LOAD_WORDS = (
    "load 1 is the rate at which the work of the mean request fills the engine's time in steps as "
    "long as the tightest TPOT objective, or at which its decodes fill the KV"
)
SAMPLE = 2_000
"""Requests over which the mean work is taken."""


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
    return load(path)


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


def measure(
    make: Make,
    setup: Setup,
    rate: float,
    requests: int,
    contender: Contender,
    oracle: bool,
    seed: int,
) -> Mapping[str, float]:
    """The figures of one run of a cell, see :func:`sluice.benchmarks.experiments.engines.run`."""
    return figures(run(make(setup, rate, requests, seed), contender, setup, seed, oracle))


class Span(NamedTuple):
    """How long a run's arrivals last: ``seconds``, with at least ``least`` and at most ``most``
    requests."""

    seconds: float
    least: int
    most: int

    def requests(self, rate: float) -> int:
        """Requests at a rate."""
        return round(min(max(rate * self.seconds, self.least), self.most))


def load_cells(
    labels: Mapping[str, Value],
    make: Make,
    setup: Setup,
    loads: Sequence[float],
    contenders: Sequence[Contender],
    span: Span,
    oracle: bool = False,
) -> list[Cell]:
    """A cell per load and contender, with the labels ``load`` and ``policy`` added."""
    full = full_load_rate(make, setup)
    return [
        Cell(
            {**labels, "load": load, "policy": contender.label},
            partial(
                measure, make, setup, load * full, span.requests(load * full), contender, oracle
            ),
        )
        for load in loads
        for contender in contenders
    ]


def profiled_budget(setup: Setup, tpot_s: float) -> int:
    """Sarathi's static budget: the max tokens of a fresh prompt that a batch processes within the
    TPOT objective; from 64 to 2,048, vLLM's own default."""
    tokens = setup.truth.tokens_within(tpot_s - setup.truth.fixed_s, 0) if tpot_s < inf else 2_048
    return min(max(64, tokens), 2_048)
