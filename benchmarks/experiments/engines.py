"""One simulated engine under one policy: the setups that experiments share, and what they measure.

The latency constants are the order of magnitude of public figures for the named class of hardware
(weights and KV over memory bandwidth, two operations per weight and token over usable arithmetic);
none was measured. Truth has 3 % noise on every step, and planners a head-room of 5 % and the online
correction of production.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments.pab_admission import Rejecting
from scheduling.batching import BatchPolicy, make_policy
from scheduling.latency import LatencyModel, LinearLatency
from scheduling.length import TaskLengths
from simulation.config import EngineConfig
from simulation.metrics import TPOTMetric, attained, column, deadline_gain, stages
from simulation.run import HEADROOM, Result, simulate
from simulation.truth import Belief, Truth
from simulation.workload import Workload

NOISE = 0.03


class Setup(NamedTuple):
    """Latency constants and limits of an engine.

    Attributes:
        name: as it stands in tables.
        truth: step times without their noise.
        believed: what planners start from, without head-room.
        engine: limits.
        words: what it stands for.
    """

    name: str
    truth: LatencyModel
    believed: LatencyModel
    engine: EngineConfig
    words: str


_SMALL = LinearLatency(a=0.009, b=8e-5, c=7e-8, d=2e-9)
_FAST = LinearLatency(a=0.005, b=2.5e-5, c=3.5e-8, d=6e-10)
_LARGE = LinearLatency(a=0.028, b=2.5e-4, c=5e-8, d=3e-9)

SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup(
            "8b",
            _SMALL,
            LinearLatency(a=0.009, b=8.6e-5, c=7e-8),
            EngineConfig(kv_blocks=16_384),
            "8B parameters on one GPU of 2 TB/s, ample KV (262,144 tokens); the planner's model "
            "lacks the quadratic term",
        ),
        Setup(
            "8b-short",
            _SMALL,
            _SMALL,
            EngineConfig(kv_blocks=4_096),
            "the same with KV for 65,536 tokens",
        ),
        Setup(
            "70b-short",
            _LARGE,
            _LARGE,
            EngineConfig(kv_blocks=2_048),
            "70B parameters over 4 such GPUs: a large fixed part, KV for 32,768 tokens",
        ),
        Setup(
            "70b",
            _LARGE,
            LinearLatency(a=0.031, b=2.3e-4, c=5e-8, d=3e-9),
            EngineConfig(kv_blocks=16_384),
            "the same with ample KV; the planner's fixed part is 11 % too large, its token "
            "time 8 % too small",
        ),
        Setup(
            "8b-fast",
            _FAST,
            _FAST,
            EngineConfig(kv_blocks=32_768, max_sequences=512),
            "8B parameters on one GPU of 3.3 TB/s, 512 sequences, KV for 524,288 tokens",
        ),
    )
}


class Contender(NamedTuple):
    """A policy with its options, as it stands in tables.

    Attributes:
        label: its name there.
        policy: registered name.
        options: its options.
        rejecting: whether requests that the prefill admission budget does not hold are refused at
            their arrival (FairBatching-PAB on one node).
    """

    label: str
    policy: str
    options: Mapping[str, Any] = {}
    rejecting: bool = False

    def make(self) -> BatchPolicy:
        """A new one."""
        policy = make_policy(self.policy, self.options)
        return Rejecting(policy) if self.rejecting else policy


def run(workload: Workload, contender: Contender, setup: Setup, seed: int) -> Result:
    """One run. Output lengths are learnt per task class from what has finished."""
    return simulate(
        workload,
        contender.make(),
        Truth(setup.truth, NOISE),
        Belief(setup.believed.with_headroom(HEADROOM)),
        setup.engine,
        seed,
        TaskLengths(),
    )


def figures(result: Result) -> dict[str, float]:
    """What experiments show of a run: attainment by each TPOT metric, the TDG ratio (envelope),
    tail latencies, the longest wait for a first token, preemptions per request."""
    requests = result.requests
    measured = stages(requests)
    arrival_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    first_s = measured.ttft_s[requests.first_stage[:-1]]
    waited_s = np.where(np.isnan(first_s), result.end_s - arrival_s, first_s)
    found: dict[str, float] = {}
    priority = column(requests, 3)[requests.first_stage[:-1]]
    for metric in TPOTMetric:
        met = attained(requests, measured, metric)
        found[f"attainment_{metric.value}"] = float(met.mean())
        if metric is TPOTMetric.MEAN:
            for level in np.unique(priority) if np.ptp(priority) else ():
                found[f"attainment_priority_{level:g}"] = float(met[priority == level].mean())
    tpot_s = measured.tpot_s[TPOTMetric.MEAN]
    return found | {
        "tdg": deadline_gain(requests, measured).ratio,
        "rate": requests.workload.rate,
        "ttft_p99_s": float(np.quantile(waited_s, 0.99)),
        "tpot_p99_s": float(np.nanquantile(tpot_s, 0.99)) if (~np.isnan(tpot_s)).any() else 0.0,
        "longest_wait_s": float(waited_s.max()),
        "preemptions": result.preemptions / len(requests),
        "recomputed_share": result.recomputed_tokens / max(result.computed_tokens, 1),
        "steps": float(sum(result.steps)),
    }
