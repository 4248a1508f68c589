"""One simulated engine under one policy: the setups and figures that experiments share.

The latency constants are the order of magnitude of public figures for the named class of hardware
(weights and KV over memory bandwidth, two operations per weight and token over usable arithmetic);
none was measured. Real step times have 3 % noise; planners have a head-room of 5 % and the online
correction of production.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments.pab_admission import Rejecting
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency import LatencyModel, LinearLatency
from sluice.scheduling.length import OracleLengths, TaskLengths
from sluice.scheduling.speculation import AllDrafts
from sluice.simulation.config import EngineConfig
from sluice.simulation.metrics import (
    Flags,
    Stages,
    TPOTMetric,
    attained,
    column,
    deadline_gain,
    stages,
    worst_by_request,
)
from sluice.simulation.run import HEADROOM, Result, simulate
from sluice.simulation.truth import Belief, Truth
from sluice.simulation.workload import Workload

NOISE = 0.03


class Setup(NamedTuple):
    """Latency constants and limits of an engine.

    Attributes:
        name: as shown in tables.
        truth: real step times without noise.
        believed: step times that planners start from, without head-room.
        engine: limits.
        words: description.
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
    """A policy with its options.

    Attributes:
        label: its name in tables.
        policy: registered name.
        options: its options.
        rejecting: whether requests that exceed the prefill admission budget are refused at their
            arrival (FairBatching-PAB on one node).
        batch_tokens: a token limit of the engine in place of the setup's.
        all_drafts: whether every drafted token is checked; otherwise the policy chooses how many.
    """

    label: str
    policy: str
    options: Mapping[str, Any] = {}
    rejecting: bool = False
    batch_tokens: int | None = None
    all_drafts: bool = False


class Run(NamedTuple):
    """A run, and the keys of the requests that were refused."""

    result: Result
    refused: frozenset[int] = frozenset()


def run(
    workload: Workload, contender: Contender, setup: Setup, seed: int, oracle: bool = False
) -> Run:
    """One run.

    Args:
        workload: what arrives.
        contender: the policy.
        setup: the engine.
        seed: of the noise.
        oracle: whether policies know output lengths; otherwise they are learnt per task class from
            finished requests.
    """
    policy = make_policy(contender.policy, contender.options)
    if contender.all_drafts:
        policy.speculation = AllDrafts()
    rejecting = Rejecting(policy) if contender.rejecting else None
    config = setup.engine
    if contender.batch_tokens is not None:
        config = config.model_copy(update={"max_batch_tokens": contender.batch_tokens})
    lengths = (arrival.output_tokens for arrival in workload.arrivals)
    result = simulate(
        workload,
        rejecting or policy,
        Truth(setup.truth, NOISE),
        Belief(setup.believed.with_headroom(HEADROOM)),
        config,
        seed,
        OracleLengths(lengths, 0.0, seed) if oracle else TaskLengths(),
    )
    return Run(result, frozenset(rejecting.refused if rejecting else ()))


def figures(run: Run) -> dict[str, float]:
    """The figures of a run.

    Attainment by each TPOT metric and the TDG ratio (envelope), both also by priority where there
    are several; latencies of the accepted requests, TPOT by its running maximum; the longest wait
    for a first token; preemptions per request. A refused request attains and gains nothing.
    """
    requests = run.result.requests
    measured = stages(requests)
    accepted = np.ones(len(requests), np.bool_)
    accepted[list(run.refused)] = False
    first = requests.first_stage[:-1]
    priority = column(requests, 3)[first]
    levels = np.unique(priority) if np.ptp(priority) else np.empty(0)
    gain = deadline_gain(requests, measured)
    won = gain.gain * accepted
    found = {"tdg": float(won.sum() / gain.ideal.sum()), "refused": float((~accepted).mean())}
    for level in levels:
        of_level = priority == level
        found[f"tdg_priority_{level:g}"] = float(won[of_level].sum() / gain.ideal[of_level].sum())
    for metric in TPOTMetric:
        met = attained(requests, measured, metric) & accepted
        found[f"attainment_{metric.value}"] = float(met.mean())
        for level in levels if metric is TPOTMetric.MEAN else ():
            found[f"attainment_priority_{level:g}"] = float(met[priority == level].mean())
    return found | _latencies(run.result, measured, accepted)


def _latencies(result: Result, measured: Stages, accepted: Flags) -> dict[str, float]:
    requests = result.requests
    arrival_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    first_s = measured.ttft_s[requests.first_stage[:-1]]
    waited_s = np.where(np.isnan(first_s), result.end_s - arrival_s, first_s)
    pace_s = worst_by_request(requests, measured, measured.tpot_s[TPOTMetric.RUNNING_MAX])
    last_s = result.end_s - float(arrival_s[0])
    found = {
        "rate": requests.workload.rate,
        "throughput": len(requests) / last_s,
        "longest_wait_s": float(waited_s.max()),
        "preemptions": result.preemptions / len(requests),
        "recomputed_share": result.recomputed_tokens / max(result.computed_tokens, 1),
        "steps": float(sum(result.steps)),
    }
    for name, values in (("ttft", waited_s[accepted]), ("tpot", pace_s[accepted])):
        known = values[~np.isnan(values)]
        for percent in (50, 95, 99):
            value = float(np.percentile(known, percent)) if len(known) else nan
            found[f"{name}_p{percent}_s"] = value
    return found
