"""What ``sluice simulate`` measures: recorded traffic on a simulated fleet of replicas."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling import batching, routing
from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import Floats, Ints
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.simulation import metrics, mixes
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.traces import MAX_REQUESTS, load
from sluice.simulation.workload import (
    AS_RECORDED,
    Arrival,
    Workload,
    merged,
    stretched,
    thinned,
    window,
    with_objectives,
)
from sluice.simulation.wrapped import Noted

# Recorded traffic as ``sluice simulate`` plays it: its rate changed, its requests spread over
# service classes, all of it or some windows.

MAX_TOKENS = 100_000_000
"""Output tokens of a workload; a run keeps the time of each, 8 bytes."""


class SharedClass(NamedTuple):
    """A service class: its objective, and its share of the requests relative to the others'."""

    slo: SLO
    share: float


class Windows(NamedTuple):
    """A stratified sample of a long trace: a random window of ``seconds`` in each of ``parts``.
    Requests within ``margin_s`` of it run and are not judged; backlogs of longer overloads are
    missing."""

    parts: int
    seconds: float
    margin_s: float

    def starts_s(self, lasts_s: float, seed: int) -> list[float]:
        """When the windows begin; raises :class:`ValueError` if they do not fit."""
        part_s = lasts_s / self.parts
        if part_s < self.seconds:
            raise ValueError(
                f"{self.parts} windows of {self.seconds:g} s need {self.parts * self.seconds:g} s "
                f"of traffic, and the trace has {lasts_s:g}"
            )
        rng = random.Random(f"windows {seed}")
        return [
            part_s * number + (part_s - self.seconds) * rng.random() for number in range(self.parts)
        ]


class Played(NamedTuple):
    """Requests of one run, of which those that arrive in ``[from_s, until_s)`` are judged."""

    workload: Workload
    from_s: float
    until_s: float
    seed: int

    def judged(self) -> Ints:
        """Which requests are judged, in order of arrival."""
        times = np.array([arrival.arrival_s for arrival in self.workload.arrivals])
        return np.flatnonzero((times >= self.from_s) & (times < self.until_s))


class Traffic(NamedTuple):
    """What arrives: ``limit`` requests of a trace, :func:`scaled`, each drawn into a service
    class; or of a published mix, by name, whose requests have theirs."""

    path: Path | str
    limit: int
    rate_scale: float
    stretch: float
    classes: tuple[SharedClass, ...]
    windows: Windows | None = None

    @property
    def parts(self) -> int:
        """How many runs play it: one, or one for each window."""
        return 1 if self.windows is None else self.windows.parts

    def played(self, seed: int, part: int = 0) -> Played:
        """What one run plays: all requests, or a window, cut before its rate is scaled so that
        copies stay in their part of the day. Raises :class:`TraceError` or :class:`ValueError`."""
        whole = self._whole()
        if self.windows is None:
            return Played(self._finished(whole, seed), 0.0, inf, seed)
        _, seconds, margin_s = self.windows
        start_s = self.windows.starts_s(whole.duration_s, seed)[part]
        before_s = min(margin_s, start_s)
        cut = window(whole, start_s - before_s, before_s + seconds + margin_s)
        own = seed + (part << 32)  # below it are the seeds of runs
        return Played(self._finished(cut, own), before_s, before_s + seconds, own)

    def workload(self, seed: int) -> Workload:
        """The judged requests, of windows one window after the other; raises as :meth:`played`."""
        first = self.played(seed)
        if self.windows is None:
            return first.workload
        arrivals: list[Arrival] = []
        for part in range(self.parts):
            own = self.played(seed, part)
            later_s = part * self.windows.seconds - own.from_s
            arrivals += [
                own.workload.arrivals[key]._replace(
                    arrival_s=own.workload.arrivals[key].arrival_s + later_s
                )
                for key in own.judged()
            ]
        arrivals.sort(key=lambda arrival: arrival.arrival_s)  # rounding may swap two at a border
        parts, seconds, margin_s = self.windows
        note = (
            f"{self._whole().description} {parts} windows of {seconds:g} s with margins of "
            f"{margin_s:g} s. Service classes drawn by share."
        )
        return replace(first.workload, arrivals=tuple(arrivals), description=note)

    def _whole(self) -> Workload:
        whole = _trace(self.path, self.limit)
        return whole if self.stretch == 1 else stretched(whole, self.stretch)

    def _finished(self, cut: Workload, seed: int) -> Workload:
        made = scaled(cut, self.rate_scale, seed)
        if not len(made) and self.windows is None:
            raise ValueError(f"a rate scale of {self.rate_scale:g} leaves no request of the trace")
        tokens = sum(arrival.output_tokens for arrival in made.arrivals)
        if tokens > MAX_TOKENS:
            raise ValueError(
                f"{len(made)} requests have {tokens} output tokens, more than {MAX_TOKENS}; take "
                "fewer requests"
            )
        if isinstance(self.path, str):
            return made
        rng = random.Random(f"classes {seed}")
        slos = [each.slo for each in self.classes]
        drawn = iter(rng.choices(slos, [each.share for each in self.classes], k=len(made)))
        made = with_objectives(made, lambda _: next(drawn), "Service classes drawn by share.")
        named = tuple(a._replace(task=a.slo.service_class) for a in made.arrivals)
        return replace(made, arrivals=named)


@lru_cache(maxsize=1)
def _trace(path: Path | str, limit: int) -> Workload:
    return mixes.workload(path, limit, 0) if isinstance(path, str) else load(path, limit=limit)


def scaled(workload: Workload, factor: float, seed: int) -> Workload:
    """``factor`` times as many requests: thinned below 1, else copies rotated in time so that
    bursts do not coincide, without common prefixes. Raises :class:`ValueError`."""
    if factor == 1 or not len(workload):
        return workload
    if factor < 1:
        return thinned(workload, factor, seed)
    if factor * len(workload) > MAX_REQUESTS:
        raise ValueError(
            f"{factor:g} times {len(workload)} requests are more than {MAX_REQUESTS}; take fewer "
            "of the trace, or a smaller factor"
        )
    rng = random.Random(f"copies {seed}")
    copies = [workload]
    while len(copies) < int(factor):
        copies.append(_turned(workload, rng.random()))
    if rest := factor - int(factor):
        copies.append(thinned(_turned(workload, rng.random()), rest, seed))
    how = f"rate times {factor:g} by copies turned in time (seed {seed})"
    if workload.scaling != AS_RECORDED:
        how = f"{workload.scaling}, then {how}"
    whole = merged(workload.name, copies)
    return replace(whole, scaling=how, description=workload.description)


def _turned(workload: Workload, share: float) -> Workload:
    """Begin at ``share`` of the time; earlier requests follow at the end, a mean gap later."""
    span_s = workload.duration_s * len(workload) / max(len(workload) - 1, 1)
    by_s = share * span_s

    def moved(arrival: Arrival) -> Arrival:
        at_s = arrival.arrival_s - by_s
        return arrival._replace(arrival_s=at_s if at_s >= 0 else at_s + span_s)

    arrivals = sorted(map(moved, workload.arrivals), key=lambda arrival: arrival.arrival_s)
    return replace(workload, arrivals=tuple(arrivals))


NOISE = 0.03
"""Standard deviation of the logarithm of a step's time around the profile."""

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")

Figures = dict[str, float]


class OutOfTimeError(RuntimeError):
    """A run was stopped, as the time for the search was up."""


class PlannedFleet(NamedTuple):
    """Equal replicas behind one router: believed step times (corrected online; real ones have
    noise), limits, policies, and a factor on the belief."""

    model: LatencyModel
    engine: EngineConfig
    cluster: ClusterConfig
    policy: str
    policy_options: Mapping[str, Any]
    routing: str
    routing_options: Mapping[str, Any]
    headroom: float


class Run(NamedTuple):
    """One simulated run with these replicas by role, as a :class:`ClusterConfig` names them;
    ``stop_at_s`` is on the host's monotonic clock."""

    traffic: Traffic
    fleet: PlannedFleet
    sizes: Mapping[str, int]
    seed: int
    part: int
    stop_at_s: float


class Judged(NamedTuple):
    """The judged requests of a run, TTFT and TPOT in seconds; and of the whole run, margins
    included, busy and up seconds and preemptions."""

    met: metrics.Flags
    failed: metrics.Flags
    ttft_s: Floats
    tpot_s: Floats
    names: NDArray[np.str_]
    busy_s: float
    up_s: float
    preemptions: int


class Measured(NamedTuple):
    """The figures of all runs of a seed, together and by service class; ``failed``: without all
    their output; ``utilisation``: share of the time in steps."""

    whole: Figures
    classes: dict[str, Figures]

    @classmethod
    def of(cls, runs: Sequence[Judged], classes: Sequence[SharedClass]) -> Self:
        """The figures of ``runs``; raises :class:`ValueError` if none was judged."""
        met, failed, ttft_s, tpot_s, names = (
            np.concatenate(each) for each in zip(*(run[:5] for run in runs), strict=True)
        )
        if not len(met):
            raise ValueError("no request of the trace comes in any of the windows")
        busy_s, up_s, preemptions = (
            sum(each) for each in zip(*(run[5:] for run in runs), strict=True)
        )
        whole = _figures(met, ttft_s, tpot_s, np.ones(len(met), np.bool_))
        whole["utilisation"] = busy_s / up_s if up_s > 0 else nan
        whole["failed"] = float(failed.sum())
        whole["preemptions"] = float(preemptions)
        chosen = {name: names == name for name in (each.slo.service_class for each in classes)}
        by_class = {name: _figures(met, ttft_s, tpot_s, own) for name, own in chosen.items()}
        return cls(whole, by_class)


def play(run: Run) -> Judged:
    """Simulate ``run``; raises :class:`OutOfTimeError`, or :class:`StuckError`."""
    played, fleet = run.traffic.played(run.seed, run.part), run.fleet

    def in_time(*_: object) -> None:
        if time.monotonic() >= run.stop_at_s:
            raise OutOfTimeError("the time limit was reached")

    def batch(role: Role) -> BatchPolicy:
        policy = batching.make_policy(fleet.policy, fleet.policy_options, role=role)
        return Noted(policy, in_time)

    routing_options = dict(fleet.routing_options)
    if "seed" in routing.POLICIES[fleet.routing].Options.model_fields:
        routing_options.setdefault("seed", run.seed)
    result = simulate_cluster(
        played.workload,
        batch,
        routing.make_policy(fleet.routing, routing_options),
        Truth(fleet.model, NOISE),
        Belief(fleet.model.with_headroom(fleet.headroom)),
        fleet.engine,
        fleet.cluster.model_copy(update=dict(run.sizes)),
        seed=played.seed,
    )
    requests, chosen = result.requests, played.judged()
    measured = metrics.stages(requests)
    tpot_s = metrics.worst_by_request(requests, measured, metrics.judged_tpot_s(requests, measured))
    return Judged(
        metrics.attained(requests, measured)[chosen],
        np.array([key in requests.failures for key in chosen.tolist()], np.bool_),
        measured.ttft_s[requests.first_stage[:-1]][chosen],
        tpot_s[chosen],
        np.array([requests.slos[key].service_class for key in chosen.tolist()], np.str_),
        result.busy_s,
        result.up_s,
        result.preemptions,
    )


def _figures(met: metrics.Flags, ttft_s: Floats, tpot_s: Floats, chosen: metrics.Flags) -> Figures:
    """Of the ``chosen`` requests; nan where none of them has the figure."""
    count = int(chosen.sum())
    found = {"requests": float(count), "attainment": float(met[chosen].mean()) if count else nan}
    latencies = []
    for values in (ttft_s[chosen], tpot_s[chosen]):
        known = values[~np.isnan(values)]
        quantiles = np.quantile(known, (0.5, 0.99)) if len(known) else np.full(2, nan)
        latencies += (1e3 * quantiles).tolist()
    return found | dict(zip(LATENCIES, latencies, strict=True))
