"""What experiments run, and the figures of a run: one simulated engine, several behind a router, or
one that suspends prefills.

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
from sluice.controller.config import ControllerConfig
from sluice.scheduling import admission as admissions
from sluice.scheduling import routing
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.latency.speculation import AllDrafts
from sluice.scheduling.placement.length import OracleLengths, TaskLengths
from sluice.scheduling.request.objective import SLO, GainWeights
from sluice.simulation.cluster import REFUSED, Incident, Node, simulate_cluster
from sluice.simulation.config import Autoscaling, ClusterConfig, EngineConfig, WhenUnattainable
from sluice.simulation.forward import LLAMA3_8B, LLAMA3_70B
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
from sluice.simulation.preemption import PreemptionConfig
from sluice.simulation.prefill_run import PrefillRun, simulate_prefills
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
    """

    name: str
    truth: LatencyModel
    believed: LatencyModel
    engine: EngineConfig


_SMALL = LinearLatency(a=0.009, b=8e-5, c=7e-8, d=2e-9)
_FAST = LinearLatency(a=0.005, b=2.5e-5, c=3.5e-8, d=6e-10)
_LARGE = LinearLatency(a=0.028, b=2.5e-4, c=5e-8, d=3e-9)
_NO_SQUARE = LinearLatency(a=0.009, b=8.6e-5, c=7e-8)
_SLOW_START = LinearLatency(a=0.031, b=2.3e-4, c=5e-8, d=3e-9)

SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("8b", _SMALL, _NO_SQUARE, EngineConfig(kv_blocks=16_384)),
        Setup("8b-short", _SMALL, _SMALL, EngineConfig(kv_blocks=4_096)),
        Setup("70b-short", _LARGE, _LARGE, EngineConfig(kv_blocks=2_048)),
        Setup("70b", _LARGE, _SLOW_START, EngineConfig(kv_blocks=16_384)),
        Setup("8b-fast", _FAST, _FAST, EngineConfig(kv_blocks=32_768, max_sequences=512)),
    )
}
"""An 8B model on one GPU of 2 TB/s (``8b-fast``: 3.3 TB/s), and a 70B model over 4 of the former,
with a large fixed part. KV blocks have 16 tokens; ``short``: KV for few sequences. The planner of
``8b`` lacks the quadratic term; that of ``70b`` has a fixed part 11 % too large, and a token time
8 % too small."""

OPERATORS = {"8b": LLAMA3_8B, "70b": LLAMA3_70B}
"""By setup, the operators of a model of this size."""


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

    @property
    def labels(self) -> dict[str, str]:
        """Its labels in a grid."""
        return {"policy": self.label}


DEFAULT = Contender("deadline_triage", "deadline_triage")
"""The default local policy."""

ROUTER = ControllerConfig().policy
"""The router that a controller has by default."""

ADMISSION = ControllerConfig().admission
"""The admission policy that a controller has by default."""


class Layout(NamedTuple):
    """The replicas of a cluster.

    Attributes:
        name: as shown in tables.
        cluster: how many of each role, and how they report to the router.
        nodes: the setups of the first replicas, where they differ from the experiment's.
        incidents: what happens to replicas during the run.
    """

    name: str
    cluster: ClusterConfig
    nodes: tuple[Setup, ...] = ()
    incidents: tuple[Incident, ...] = ()

    @property
    def size(self) -> int:
        """Replicas at the start."""
        return sum(self.cluster.counts.values())


def colocated(replicas: int, **changes: Any) -> Layout:
    """``replicas`` that prefill and decode, with ``changes`` to the cluster's configuration."""
    return Layout("co-located", ClusterConfig(replicas=replicas, **changes))


def of_roles(name: str, mixed: int = 0, prefillers: int = 0, decoders: int = 0) -> Layout:
    """The given number of replicas of each role."""
    cluster = ClusterConfig(replicas=mixed, prefillers=prefillers, decoders=decoders)
    return Layout(name, cluster)


def disaggregated(replicas: int) -> Layout:
    """``replicas``, a quarter of which only decode: with these workloads the prefill side is then
    the busier one, as in the papers' runs."""
    decoders = max(1, replicas // 4)
    return of_roles("disaggregated", prefillers=replicas - decoders, decoders=decoders)


class System(NamedTuple):
    """A router, and the policy of every replica behind it.

    Attributes:
        router: registered name.
        local: the replicas' policy.
        admission: registered name of the admission policy; ``None``: no request is guaranteed.
        unattainable: what happens to a request whose objective no replica can guarantee.
    """

    router: str
    local: Contender = DEFAULT
    admission: str | None = None
    unattainable: WhenUnattainable = "best_effort"

    @property
    def labels(self) -> dict[str, str]:
        """Its labels in a grid."""
        return {"router": self.router, "policy": self.local.label}


class Suspending(NamedTuple):
    """An engine that only prefills, and suspends prefills.

    Attributes:
        label: its name in tables.
        config: where prefills stop.
        admission: registered name of the admission policy; empty: every request is served.
        refuses: whether requests without a guarantee are refused.
    """

    label: str
    config: PreemptionConfig
    admission: str = ""
    refuses: bool = False

    @property
    def labels(self) -> dict[str, str]:
        """Its labels in a grid."""
        return {"policy": self.label}


Kind = Contender | System | Suspending
"""What serves a workload."""


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


def make_router(name: str, seed: int) -> routing.RoutingPolicy:
    """A router with its default options; a randomized one gets the run's seed."""
    draws = "seed" in routing.POLICIES[name].Options.model_fields
    return routing.make_policy(name, {"seed": seed} if draws else {})


def node_of(setup: Setup) -> Node:
    """A setup with the experiments' noise and head-room."""
    belief = Belief(setup.believed.with_headroom(HEADROOM))
    return Node(Truth(setup.truth, NOISE), belief, setup.engine)


def run_cluster(
    workload: Workload,
    system: System,
    setup: Setup,
    layout: Layout,
    seed: int,
    oracle: bool = False,
    autoscaling: Autoscaling | None = None,
) -> Run:
    """One run behind a router.

    Args:
        workload: what arrives.
        system: router, local policy and admission policy.
        setup: of the replicas that ``layout`` does not name.
        layout: the replicas.
        seed: of the noise, of lost reports and of randomized routers.
        oracle: see :func:`run`.
        autoscaling: changes the numbers of replicas that ``layout`` begins with; ``None``: they
            are fixed.
    """
    local, admission = system.local, system.admission
    # Workloads name no service class: all requests are of the usual one.
    when = {SLO().service_class: system.unattainable}
    usual = node_of(setup)
    lengths = (arrival.output_tokens for arrival in workload.arrivals)
    result = simulate_cluster(
        workload,
        lambda role: make_policy(local.policy, local.options),
        make_router(system.router, seed),
        usual.truth,
        usual.belief,
        usual.engine,
        layout.cluster.model_copy(update={"when_unattainable": when}),
        layout.incidents,
        seed,
        OracleLengths(lengths, 0.0, seed) if oracle else TaskLengths(),
        admission=admissions.make_policy(admission) if admission is not None else None,
        nodes=[node_of(own) for own in layout.nodes],
        autoscaling=autoscaling,
    )
    failures = result.requests.failures
    return Run(result, frozenset(key for key, why in failures.items() if why == REFUSED))


def run_suspending(workload: Workload, kind: Suspending, setup: Setup, seed: int) -> PrefillRun:
    """One run of an engine that suspends prefills."""
    return simulate_prefills(
        workload,
        Truth(setup.truth, NOISE),
        config=kind.config,
        model=OPERATORS[setup.name],
        seed=seed,
        admission=admissions.make_policy(kind.admission) if kind.admission else None,
        refuses=kind.refuses,
    )


def served(
    workload: Workload, kind: Kind, setup: Setup, layout: Layout | None, oracle: bool, seed: int
) -> dict[str, float]:
    """The figures of one run of whatever ``kind`` is; a :class:`System` needs a layout."""
    if isinstance(kind, Suspending):
        return prefill_figures(run_suspending(workload, kind, setup, seed))
    if isinstance(kind, Contender):
        return figures(run(workload, kind, setup, seed, oracle))
    assert layout is not None
    return cluster_figures(run_cluster(workload, kind, setup, layout, seed, oracle))


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


def cluster_figures(done: Run) -> dict[str, float]:
    """:func:`figures`, the TDG ratio of first tokens alone, the requests in time per second of a
    replica, the KV transfers per request, and the figures of admission.

    ``promised``, ``best_effort``: shares of all requests; ``kept``, ``best_effort_met``: of these,
    the shares that attained; ``ttft_over_p50``, ``ttft_over_p90``: quantiles of the TTFT over the
    TTFT predicted at admission. nan where there are none.
    """
    requests = done.result.requests
    measured = stages(requests)
    first = deadline_gain(requests, measured, GainWeights(first=1.0, later=0.0))
    found = {**figures(done), "tdg_first": first.ratio, "moved": float(done.result.moved)}
    met = attained(requests, measured, TPOTMetric.MEAN)
    found["goodput"] = float(met.sum()) / done.result.up_s
    found["split"] = done.result.split / len(requests)
    ttft_s = measured.ttft_s[requests.first_stage[:-1]]
    promised = ~np.isnan(requests.promised_s)
    for name, kept, tier in (
        ("promised", "kept", promised),
        ("best_effort", "best_effort_met", requests.best_effort),
    ):
        found[name] = float(tier.mean())
        found[kept] = float(met[tier].mean()) if tier.any() else nan
    over = (ttft_s / requests.promised_s)[promised & ~np.isnan(ttft_s)]
    for percent in (50, 90):
        found[f"ttft_over_p{percent}"] = float(np.percentile(over, percent)) if len(over) else nan
    return found


def prefill_figures(served: PrefillRun) -> dict[str, float]:
    """Attainment of all requests, of the guaranteed ones, and by prompt tokens; throughput; the
    cost of suspensions. A refused request attains nothing."""
    requests, counts = served.requests, served.counts
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    promised = ~requests.best_effort
    promised[list(requests.failures)] = False
    tokens = np.array([arrival.prompt_tokens for arrival in requests.arrivals])
    blocked_s = np.array(counts.blocked_s or [0.0])
    return {
        "attainment_mean": float(met.mean()),
        "kept": float(met[promised].mean()) if promised.any() else 1.0,
        "promised": float(promised.mean()),
        "attained_tokens": float(tokens[met].sum() / tokens.sum()),
        "throughput": len(requests) / (counts.end_s - requests.arrivals[0].arrival_s),
        "suspensions": counts.suspensions / len(requests),
        "rounds": counts.rounds / len(requests),
        "deepest": float(counts.deepest),
        "suspended_tokens": float(counts.suspended_tokens),
        "held_tokens": float(counts.held_tokens),
        "blocked_ms": 1e3 * float(blocked_s.mean()),
        "blocked_p99_ms": 1e3 * float(np.percentile(blocked_s, 99)),
        "idle_share": counts.idle_s / counts.end_s,
    }
