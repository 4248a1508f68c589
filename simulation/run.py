"""A workload through one simulated engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.placement.loops import LoopEnding
from sluice.scheduling.placement.output_lengths import LengthPredictor
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.requests import Requests
from sluice.simulation.rows import DONE_TOKENS, LOST_TOKENS, PREEMPTIONS
from sluice.simulation.workload import Workload

HEADROOM = 1.05
TOO_LONG = "longer than the KV cache"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run. Times are seconds from the workload's start.

    ``busy_s``, ``up_s``, ``starting_s`` are sums over engines (the last before they serve);
    ``recomputed_tokens`` had been computed or cached, and lost; ``fallbacks``: steps left empty by
    the policy; ``dropped``: planned entries that could not run; ``moved``: placements after a
    failure; ``split``: KV taken over from a prefill replica; ``migrated``: streams; ``fetched``:
    prefixes of turns; ``sizes``: wanted replicas by role, empty where fixed; ``loops``: those with
    a deadline that ended; ``learned``: each engine's latency model at the end, no head-room."""

    requests: Requests
    end_s: float
    steps: tuple[int, ...]
    busy_s: float
    up_s: float
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    hit_tokens: int
    fallbacks: int
    dropped: int
    correction: float
    checked_drafts: int
    accepted_drafts: int
    moved: int = 0
    split: int = 0
    migrated: int = 0
    fetched: int = 0
    drains_s: tuple[float, ...] = ()
    starting_s: float = 0.0
    sizes: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    loops: Mapping[LoopEnding, int] = field(default_factory=dict)
    learned: tuple[LatencyModel, ...] = ()

    @property
    def replica_s(self) -> float:
        """Sum of the times for which replicas are paid for, starting ones included."""
        return self.up_s + self.starting_s


class Size(NamedTuple):
    """The number of replicas that is wanted from a time on, and the policy's reason."""

    at_s: float
    replicas: int
    reason: str


def result_of(
    requests: Requests,
    engines: Sequence[VirtualEngine],
    end_s: float,
    up_s: float,
    **of_cluster: Any,
) -> Result:
    """The sums over all engines of a run; ``of_cluster``: further fields of the result."""
    return Result(
        requests=requests,
        end_s=end_s,
        steps=tuple(engine.steps for engine in engines),
        busy_s=sum(engine.busy_s for engine in engines),
        up_s=up_s,
        preemptions=sum(int(engine.counters[PREEMPTIONS]) for engine in engines),
        computed_tokens=sum(int(engine.counters[DONE_TOKENS]) for engine in engines),
        recomputed_tokens=sum(int(engine.counters[LOST_TOKENS]) for engine in engines),
        hit_tokens=sum(engine.hit_tokens for engine in engines),
        fallbacks=sum(engine.fallbacks for engine in engines),
        dropped=sum(engine.dropped for engine in engines),
        correction=fmean(engine.planner.latency.correction for engine in engines),
        checked_drafts=sum(engine.drafts.checked for engine in engines if engine.drafts),
        accepted_drafts=sum(engine.drafts.accepted for engine in engines if engine.drafts),
        learned=tuple(engine.planner.latency.with_headroom(1.0) for engine in engines),
        **of_cluster,
    )


def simulate(
    workload: Workload,
    policy: BatchPolicy,
    truth: Truth | LatencyModel,
    belief: Belief | LatencyModel | None = None,
    config: EngineConfig | None = None,
    seed: int = 0,
    predictor: LengthPredictor | None = None,
) -> Result:
    """Run ``workload`` through one engine until every request has ended; one that is longer than
    the KV fails at arrival. Equal arguments, with a new policy, give equal results.

    A model as ``truth`` has 3 % noise; ``belief`` is by default its model with 5 % head-room.
    ``seed`` is of the noise and of speculation. Raises :class:`StuckError`: nothing could run;
    ValueError: loops, whose turns only a cluster awaits."""
    believed, true = sides(truth, belief)
    requests = Requests(workload, predictor)
    if requests.followers:
        raise ValueError(f"workload {workload.name} has loops: simulate it on a cluster")
    rng = np.random.default_rng(seed)
    engine = VirtualEngine(config or EngineConfig(), policy, believed, true, requests, rng)
    end_s = drive(engine, requests)
    first_s = workload.arrivals[0].arrival_s if len(workload) else 0.0
    return result_of(requests, [engine], end_s, end_s - first_s)


def drive(engine: VirtualEngine, requests: Requests) -> float:
    """Run until all ``requests`` have ended; the last time. The next plan sees arrivals."""
    arrival_s = [arrival.arrival_s for arrival in requests.arrivals]
    count, arrived, now_s = len(requests), 0, 0.0
    while True:
        while arrived < count and arrival_s[arrived] <= now_s:
            requests.predict(arrived)
            if not engine.submit(arrived):
                requests.failures[arrived] = TOO_LONG
            arrived += 1
        if engine.live:
            now_s += engine.begin(now_s)
            engine.complete(now_s)
        elif arrived < count:
            now_s = arrival_s[arrived]
        else:
            break
    return now_s


def sides(
    truth: Truth | LatencyModel, belief: Belief | LatencyModel | None
) -> tuple[Belief, Truth]:
    """A run's belief and truth, with the defaults of :func:`simulate`."""
    if not isinstance(truth, Truth):
        truth = Truth(truth)
    if belief is None:
        belief = truth.model.with_headroom(HEADROOM)
    return belief if isinstance(belief, Belief) else Belief(belief), truth
