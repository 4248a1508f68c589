"""Workloads by load, and grids of runs at given loads or at the greatest load served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import Cell, Plan, Planned, Value, few
from sluice.benchmarks.experiments.systems import SETUPS, Contender, Kind, Layout, Setup, Suspending
from sluice.scheduling.latency.model import LatencyModel
from sluice.simulation import settings, traces
from sluice.simulation.capacity import full_rate, greatest_loads
from sluice.simulation.generators import LengthDistribution, OnOff, Slowdown
from sluice.simulation.workload import (
    Workload,
    stretched,
    thinned,
    with_objectives,
    with_priorities,
)

Make = Callable[[Setup, float, int, int], Workload]
"""A workload for a setup: its rate, the number of requests, and the seed."""

SAMPLE = 2_000
"""Requests over which the mean work is taken."""


def alone_s(model: LatencyModel) -> Callable[[int], float]:
    """Time to the first token of a prompt on an idle engine."""
    return lambda prompt_tokens: model.fixed_s + model.work_s(prompt_tokens, 0)


def _generate(
    setting: Callable[..., Workload], setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    idle = {"zero_load_s": alone_s(setup.truth)}
    of_setup = idle if getattr(setting, "func", None) is settings.slos_serve else {}
    return setting(rate=rate, requests=requests, seed=seed, **of_setup)


def generated(setting: Callable[..., Workload], *names: str, **more: Any) -> Make:
    """A function of :mod:`sluice.simulation.settings` with further arguments."""
    return partial(_generate, partial(setting, *names, **more))


def _flowprefill(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    output = LengthDistribution.of_p90(100, 200)
    model = "llama3-8b" if setup.truth.fixed_s < 0.02 else "llama3-70b"
    return settings.flowprefill(model, rate, requests, seed, output=output)


GENERATED: dict[str, Make] = {
    "proserve sharegpt": generated(settings.proserve, "sharegpt"),
    "proserve azure": generated(settings.proserve, "azure"),
    "proserve bursty": generated(
        settings.proserve, "sharegpt", arrivals=partial(OnOff, on_s=8.0, off_s=12.0)
    ),
    "fairbatching burstgpt": generated(settings.fairbatching, "burstgpt"),
    "fairbatching azure": generated(settings.fairbatching, "azure"),
    "slos-serve mixed": generated(settings.slos_serve, "mixed"),
    "slos-serve coder": generated(settings.slos_serve, "coder"),
    "slos-serve tools": generated(settings.slos_serve, "tools"),
    "flowprefill": _flowprefill,
    "chat and code": generated(settings.chat_and_code),
}
"""The papers' settings, one without a TPOT objective, and one in bursts of 8 s in 20."""


@lru_cache(maxsize=8)
def _trace(path: Path) -> Workload:
    return traces.load(path)


def _recorded(
    path: Path, scaling: str, setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    """``requests`` of a trace from a random position at a rate: ``stretched`` in time, or
    ``thinned``, which stretches a trace that is too slow."""
    trace = _trace(path)
    share = min(1.0, rate / trace.rate) if scaling == "thinned" else 1.0
    wanted = min(len(trace), max(1, round(requests / share)))
    start = int(np.random.default_rng(seed).integers(len(trace) - wanted + 1))
    chosen = trace.arrivals[start : start + wanted]
    moved = tuple(a._replace(arrival_s=a.arrival_s - chosen[0].arrival_s) for a in chosen)
    workload = replace(trace, arrivals=moved)
    if share < 1:
        workload = thinned(workload, share, seed)
    # The rate is a mean over the trace; this window has its own.
    workload = stretched(workload, workload.rate / rate)
    if workload.mean_prompt_tokens < 4_000:
        return settings.proserve_objectives(workload, seed)
    slowdown = Slowdown(3.0, alone_s(setup.truth), 0.8, 0.08)
    words = "TTFT 3 times that of the prompt on an idle engine, at least 0.8 s; TPOT 0.08 s."
    judged = with_objectives(workload, lambda a: slowdown(a.prompt_tokens), words)
    return with_priorities(judged, {2: 1.0, 1: 1.0}, seed)


def recorded(
    folder: Path | None, scalings: Sequence[str] = ("stretched", "thinned")
) -> dict[str, Make]:
    """Every trace in ``folder``, stretched and thinned; raises :class:`TraceError`."""
    if folder is None:
        return {}
    found: dict[str, Make] = {}
    for path in traces.trace_files(folder):
        _trace(path)
        found |= {f"{path.stem} ({each})": partial(_recorded, path, each) for each in scalings}
    return found


recorded_stretched = partial(recorded, scalings=("stretched",))
"""For clusters, whose rates are above the traces' own."""


def workloads(
    names: Planned[Sequence[Any]],
    make: Callable[[Any], Make] = GENERATED.__getitem__,
    traces: Callable[[Path | None], Mapping[str, Make]] = lambda folder: {},
) -> Callable[[Plan], Mapping[Any, Make]]:
    """Workloads by label (in quick scale the first) and traces of a folder, as a part of a grid."""
    return lambda plan: (
        {name: make(name) for name in few(plan.of(names), plan)} | dict(traces(plan.traces))
    )


def full_load_rate(make: Make, setup: Setup) -> float:
    """Load 1 of one engine: its time or its KV is full at the tightest TPOT objective."""
    return full_rate(make(setup, 1.0, SAMPLE, 0), setup.truth, setup.engine)


class Span(NamedTuple):
    """How long a run's arrivals last: ``seconds``, with ``least`` to ``most`` requests."""

    seconds: float
    least: int
    most: int

    def requests(self, rate: float) -> int:
        """Requests at a rate."""
        return round(min(max(rate * self.seconds, self.least), self.most))


QUICK = Span(3.0, 5, 10)
"""Of every sweep in quick scale."""


class Conditions(NamedTuple):
    """What systems are measured with: the workload; the setup of every engine; the replicas of a
    system with a router, or ``None`` for one engine; and whether output lengths are known."""

    make: Make
    setup: Setup
    layout: Layout | None = None
    oracle: bool = False

    @property
    def size(self) -> int:
        """Replicas; one without a layout."""
        return 1 if self.layout is None else self.layout.size

    @property
    def full_rate(self) -> float:
        """Requests per second that are load 1: of one engine, or the sum over the replicas."""
        return self.size * full_load_rate(self.make, self.setup)


def measure(
    kind: Kind, seed: int, conditions: Conditions, rate: float, requests: int
) -> Mapping[str, float]:
    """The figures of one run of a cell."""
    setup, layout = conditions.setup, conditions.layout
    workload = conditions.make(setup, rate, requests, seed)
    if isinstance(kind, Contender):
        return systems.figures(systems.run(workload, kind, setup, seed, conditions.oracle))
    if isinstance(kind, Suspending):
        served = systems.run_suspending(workload, kind, setup, seed)
        return systems.prefill_figures(served, setup.believed)
    assert layout is not None
    done = systems.run_cluster(workload, kind, setup, layout, seed, conditions.oracle)
    return systems.cluster_figures(done)


class Search(NamedTuple):
    """The greatest rates per replica (``rate_0.9``) at which the ``shares`` attain by
    ``figure``, and the figures ``also`` at the first of them."""

    figure: str
    shares: Sequence[float] = (0.9,)
    least: float = 0.05
    most: float = 4.0
    steps: int = 7
    also: Sequence[str] = ()

    def loads(self, attainment: Callable[[float], float]) -> Mapping[float, float]:
        """The load by share."""
        return greatest_loads(attainment, *self[1:5])


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid of workloads x setups x layouts x loads x systems. ``named``: labels of workloads.
    Static policies without a token budget get the profiled one; ``span`` and ``spans`` (of single
    workloads) count requests per replica."""

    workloads: Planned[Mapping[Any, Make]]
    kinds: Planned[Sequence[Kind]]
    span: Planned[Span]
    loads: Planned[Sequence[float | Search]]
    spans: Mapping[str, Planned[Span]] = field(default_factory=dict)
    setups: Planned[Sequence[Setup]] = (SETUPS["8b"],)
    layouts: Planned[Sequence[Layout | None]] = (None,)
    named: Sequence[str] = ("workload",)
    labels: Mapping[str, Value] = field(default_factory=dict)
    oracle: bool = False

    def cells(self, plan: Plan) -> list[Cell]:
        """The cells in this plan."""
        found = []
        quick = plan.scale == "quick"
        for key, make in plan.of(self.workloads).items():
            names = key if isinstance(key, tuple) else (key,)
            own = {**self.labels, **dict(zip(self.named, names, strict=True))}
            span = QUICK if quick else plan.of(self.spans.get(names[0], self.span))
            for setup in few(plan.of(self.setups), plan):
                budget = cache(partial(budget_of, make, setup))
                kinds = [fitted(kind, budget) for kind in plan.of(self.kinds)]
                for layout in few(plan.of(self.layouts), plan, count=2):
                    labels: dict[str, Value] = {**own, "setup": setup.name}
                    if layout is not None:
                        labels |= {"layout": layout.name, "replicas": layout.size}
                    conditions = Conditions(make, setup, layout, self.oracle)
                    full_rate = conditions.full_rate
                    for load in few(plan.of(self.loads), plan):
                        at = {} if isinstance(load, Search) else {"load": load}
                        if quick and isinstance(load, Search):
                            load = load._replace(least=0.5, most=1.0, steps=1)
                        fixed = {"conditions": conditions, "full_rate": full_rate, "load": load}
                        run = partial(at_load, **fixed, span=span)
                        found += [
                            Cell({**labels, **at, **systems.labels_of(kind)}, partial(run, kind))
                            for kind in kinds
                        ]
        return found


def at_load(
    kind: Kind,
    seed: int,
    conditions: Conditions,
    full_rate: float,
    load: float | Search,
    span: Span,
) -> Mapping[str, float]:
    """The figures at a load, 1 of which is ``full_rate``, or the rates that a search finds."""

    def run(load: float) -> Mapping[str, float]:
        rate, size = load * full_rate, conditions.size
        return measure(kind, seed, conditions, rate, span.requests(rate / size) * size)

    if not isinstance(load, Search):
        return run(load)
    figure, full = load.figure, full_load_rate(conditions.make, conditions.setup)
    found = load.loads(lambda each: run(each)[figure])
    rates = {f"rate_{share:g}": each * full for share, each in found.items()}
    first = found[load.shares[0]]
    there = run(first) if load.also and first else {}
    return rates | {name: there.get(name, 0.0) for name in load.also}


STATIC = ("sarathi", "sarathi_priority", "edf", "sjf")
"""Policies under a static token budget, which is profiled for each workload and setup."""


def fitted(kind: Kind, budget: Callable[[], int]) -> Kind:
    """``kind``, whose local policy has the profiled token budget if it is static and has none."""
    if isinstance(kind, systems.System):
        local = fitted(kind.local, budget)
        assert isinstance(local, Contender)
        return kind._replace(local=local)
    if not isinstance(kind, Contender) or kind.policy not in STATIC or kind.options:
        return kind
    return kind._replace(options={"token_budget": budget()})


def budget_of(make: Make, setup: Setup) -> int:
    """:func:`profiled_budget` for a workload."""
    return profiled_budget(setup, make(setup, 1.0, SAMPLE, 0).tightest_tpot_s)


def profiled_budget(setup: Setup, tpot_s: float) -> int:
    """Sarathi's budget: the most prompt tokens within the TPOT, 64 to 2,048 (vLLM's default)."""
    tokens = setup.truth.tokens_within(tpot_s - setup.truth.fixed_s, 0) if tpot_s < inf else 2_048
    return min(max(64, tokens), 2_048)
