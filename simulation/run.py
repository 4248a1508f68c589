"""A workload through one simulated engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduling.batching import BatchPolicy
from scheduling.latency import LatencyModel
from simulation.config import EngineConfig
from simulation.engine import Engine
from simulation.requests import LengthPredictor, Requests
from simulation.truth import Belief, Truth
from simulation.workload import Workload

HEADROOM = 1.05
TOO_LONG = "longer than the KV cache"


@dataclass(frozen=True, slots=True)
class Result:
    """What a run did. Times are seconds from the workload's start.

    Attributes:
        requests: every request, with the times of its tokens and the failures.
        end_s: when the last one ended.
        steps: engine steps.
        busy_s: sum of the steps' times, over all engines.
        preemptions: requests that lost their KV to others.
        computed_tokens: tokens that went through steps.
        recomputed_tokens: of these, those that had been computed before.
        fallbacks: steps that the policy left empty, see :class:`~simulation.engine.Engine`.
        dropped: planned entries that the engine could not run.
        correction: mean of the engines' learnt corrections at the end.
        engines: how many ran.
    """

    requests: Requests
    end_s: float
    steps: int
    busy_s: float
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    fallbacks: int = 0
    dropped: int = 0
    correction: float = 1.0
    engines: int = 1


def simulate(
    workload: Workload,
    policy: BatchPolicy,
    truth: Truth | LatencyModel,
    belief: Belief | LatencyModel | None = None,
    config: EngineConfig | None = None,
    seed: int = 0,
    predictor: LengthPredictor | None = None,
) -> Result:
    """Run ``workload`` through one engine until every request has ended.

    A request that is longer than the KV cache fails at its arrival, with the reason in the result.
    Equal arguments give equal results, if the policy is new.

    Args:
        workload: what arrives.
        policy: a new one; policies keep state.
        truth: how long steps take; a model stands for itself with 3 % noise.
        belief: what the policy plans with; a model stands for itself, with its own head-room and
            online correction. Default: the truth's model with 5 % head-room.
        config: the engine's limits.
        seed: of the noise and of speculative acceptance.
        predictor: fills the policies' column of expected lengths.

    Raises:
        StuckError: nothing could run.
    """
    believed, true = _sides(truth, belief)
    requests = Requests(workload, predictor)
    rng = np.random.default_rng(seed)
    engine = Engine(config or EngineConfig(), policy, believed, true, requests, rng)
    end_s = drive(engine, requests)
    return Result(
        requests,
        end_s,
        engine.steps,
        engine.busy_s,
        engine.preemptions,
        engine.done_tokens,
        engine.lost_tokens,
        engine.fallbacks,
        engine.dropped,
        engine.planner.latency.correction,
    )


def drive(engine: Engine, requests: Requests) -> float:
    """Run the clock until ``engine`` has seen and ended all ``requests``; return the last time.

    Requests that arrive during a step are seen by the next plan.
    """
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
            for key in engine.complete(now_s):
                requests.finished(key)
        elif arrived < count:
            now_s = arrival_s[arrived]
        else:
            break
    return now_s


def _sides(
    truth: Truth | LatencyModel, belief: Belief | LatencyModel | None
) -> tuple[Belief, Truth]:
    if not isinstance(truth, Truth):
        truth = Truth(truth)
    if belief is None:
        belief = truth.model.with_headroom(HEADROOM)
    return belief if isinstance(belief, Belief) else Belief(belief), truth
