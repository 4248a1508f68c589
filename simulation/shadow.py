"""What other policies would have done with recorded traffic: it is replayed under both.

A batch policy's effect cannot be judged decision by decision, because each decision changes what
follows. So recorded requests are run through the simulator twice, with the live policies and with
the shadow ones; the same seeds draw the noise of both. The replay of the live policies is also
compared with what was measured: by how much it misses is how far the other replay is trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan, sqrt
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.placement.output_lengths import TaskLengths
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import RoutingPolicy
from sluice.simulation.cluster import Node, simulate_cluster
from sluice.simulation.config import ClusterConfig
from sluice.simulation.metrics import Flags, attained, stages
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Arrival, Workload

WINDOW_S = 20.0
"""Traffic is compared in windows of about this length."""

WARM_UP_S = 20.0
"""At both ends of a replay, requests run and are not compared: queues begin empty."""

SEEDS = 4
"""Replays of each side."""

FIGURES = ("attained", "kept", "tokens_per_s")
"""Share of the requests with an objective that met it; share that was promised it and met it; and
output tokens of answers that met their objective, or have none, a second."""


class Recorded(NamedTuple):
    """A request as its controller and router saw it: sizes and hashes, no text. Its
    ``arrival.output_tokens`` are 0 without an answer; ``kept``: it was promised, and attained."""

    arrival: Arrival
    attained: bool
    kept: bool


class Policies(NamedTuple):
    """What decides: each makes a new policy."""

    batching: Callable[[Role], BatchPolicy]
    routing: Callable[[], RoutingPolicy]
    admission: Callable[[], AdmissionPolicy | None]


class Replicas(NamedTuple):
    """The replicas that the traffic had, in the order of the roles of ``cluster``."""

    nodes: Sequence[Node]
    cluster: ClusterConfig


def compared(
    records: Sequence[Recorded],
    live: Policies,
    shadow: Policies,
    replicas: Replicas,
    block_tokens: int,
    seed: int = 0,
) -> Floats:
    """The windows of ``records``, in order of arrival, whose prompts are hashed by blocks of
    ``block_tokens``: ``float64[windows, 2 + 2 * SEEDS, FIGURES]`` of sums: what counts, what was
    measured live, and for each seed the replays under the live and the shadow policies."""
    workload = _replayable([each.arrival for each in records], block_tokens, seed)
    measured = [np.array([getattr(each, name) for each in records]) for name in FIGURES[:2]]
    stated = _stated(workload)
    counted = per_window(workload, stated, stated, stated)
    counted[:, 2] = (workload.duration_s - 2 * WARM_UP_S) / max(1, len(counted))
    rows = [counted, sums(workload, *measured)]
    for number in range(SEEDS):
        for side in (live, shadow):
            lengths = TaskLengths()
            for each in records:
                if each.arrival.output_tokens:
                    lengths.observe(each.arrival.task, each.arrival.output_tokens)
            result = simulate_cluster(
                workload,
                side.batching,
                side.routing(),
                *replicas.nodes[0],
                replicas.cluster,
                seed=seed + number,
                predictor=lengths,
                admission=side.admission(),
                nodes=replicas.nodes,
            )
            rows.append(sums(workload, *outcomes(result.requests)))
    return np.stack(rows, axis=1)


def _replayable(arrivals: Sequence[Arrival], block_tokens: int, seed: int) -> Workload:
    """The traffic, in which a request without an answer has the length of another of its task."""
    known: dict[str, list[int]] = {}
    for each in arrivals:
        if each.output_tokens:
            known.setdefault(each.task, []).append(each.output_tokens)
    every = [tokens for own in known.values() for tokens in own] or [1]
    rng = np.random.default_rng(seed)
    found = (
        each._replace(
            arrival_s=each.arrival_s - arrivals[0].arrival_s,
            output_tokens=each.output_tokens or int(rng.choice(known.get(each.task, every))),
        )
        for each in arrivals
    )
    return Workload("recorded", tuple(found), block_tokens)


def outcomes(requests: Requests) -> tuple[Flags, Flags]:
    """Of each simulated request whether it attained its objective, and was promised that, too."""
    met = attained(requests, stages(requests))
    return met, met & ~np.isnan(requests.promised_s)


def sums(workload: Workload, met: Flags, kept: Flags) -> Floats:
    """``float64[windows, FIGURES]`` of what requests came to."""
    stated = _stated(workload)
    tokens = np.array([float(each.output_tokens) for each in workload.arrivals])
    return per_window(workload, met & stated, kept & stated, tokens * met)


def _stated(workload: Workload) -> Flags:
    return np.array([each.slo.stated for each in workload.arrivals])


def per_window(workload: Workload, *values: Floats | Flags) -> Floats:
    """``float64[windows, len(values)]``: the sums of each window's requests."""
    at_s = np.array([each.arrival_s for each in workload.arrivals]) - WARM_UP_S
    lasts_s = max(0.0, workload.duration_s - 2 * WARM_UP_S)
    count = round(lasts_s / WINDOW_S)
    inside = (at_s >= 0) & (at_s < lasts_s) & (count > 0)
    place = (at_s[inside] * count / lasts_s).astype(np.int64) if count else at_s[:0].astype(int)
    found = [np.bincount(place, each[inside], count) for each in values]
    return np.stack(found, axis=1)


class Estimate(NamedTuple):
    """A figure of all windows: measured ``live``, ``replayed`` under the live policies, and the
    ``difference`` under the shadow ones with its 95 % interval."""

    live: float
    replayed: float
    difference: float
    low: float
    high: float


def estimates(recordings: Sequence[Floats]) -> list[Estimate]:
    """By figure, of recordings as :func:`compared` gives them; nan where nothing was counted.

    What the live replay misses of what was measured (the gap) corrects the shadow's, as a control
    variate: by the part of it, squared, that is beyond the noise of a run, because the rest is the
    live run's own. The variance is that part of the gap, and the noise of a run under the shadow
    policies, at least as much as the gap varies between windows. The noise is that of whole
    recordings: a run that is behind in one window is so in the next one."""
    windows = np.concatenate(recordings)
    runs = np.stack([each.sum(0) for each in recordings])
    attained_count = max(1.0, float(windows[:, 1, 0].sum()))
    return [
        _estimate(windows[..., at], runs[..., at], windows[:, 1, at].sum() / attained_count, most)
        for at, most in enumerate((1.0, 1.0, inf))
    ]


def _estimate(windows: Floats, runs: Floats, one: float, most: float) -> Estimate:
    """``one``: what a request adds to the sums, the least that an interval is wide; ``most``: the
    figure's largest value."""
    of, live, replayed, shadow = windows[:, 0], windows[:, 1], windows[:, 2::2], windows[:, 3::2]
    whole, count = float(of.sum()), len(of)
    if count < 2 or not whole:
        return Estimate(*[nan] * 5)
    noises = [(1 + 1 / SEEDS) * runs[:, first::2].var(1, ddof=1).sum() for first in (2, 3)]
    gaps = live - replayed.mean(1)
    gap = gaps.sum()
    beyond = max(0.0, 1 - noises[0] / gap**2) if gap else 0.0
    off = gaps - of * gap / whole
    between = (off @ off) * count / (count - 1)
    variance = max(noises[1], between) + beyond * gap**2 + one**2
    half = _student(len(runs) * (SEEDS - 1)) * sqrt(variance) / whole
    difference = (shadow.mean(1).sum() - live.sum() + beyond * gap) / whole
    measured = live.sum() / whole
    bounds = np.clip(difference + np.array([0.0, -half, half]), -measured, most - measured)
    return Estimate(*map(float, (measured, measured - gap / whole, *bounds)))


def _student(freedom: int) -> float:
    """Student's t at 97.5 %, by its expansion at the normal distribution (within 1 % from 3 on)."""
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    last = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + terms[0] / freedom + terms[1] / freedom**2 + last / freedom**3
