"""What experiments run, and the figures of a run. The latency constants have the order of public
figures; none was measured."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments.policies import LOCAL, ROUTERS
from sluice.controller.config import ControllerConfig
from sluice.scheduling import admission as admissions
from sluice.scheduling import routing
from sluice.scheduling.autoscaling.role_shares import RoleShares
from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, StepSample
from sluice.scheduling.latency.speculation import AllDrafts
from sluice.scheduling.placement.output_lengths import OracleLengths, TaskLengths
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.roles import Role
from sluice.simulation import metrics, preemption
from sluice.simulation.cluster import REFUSED, Node, simulate_cluster
from sluice.simulation.config import Autoscaling, ClusterConfig, EngineConfig, WhenUnattainable
from sluice.simulation.engine import Belief, Launches, Truth
from sluice.simulation.replica import Incident
from sluice.simulation.requests import Requests
from sluice.simulation.run import HEADROOM, Result, simulate
from sluice.simulation.workload import Workload
from sluice.simulation.wrapped import Note, Noted, Rejecting


class Setup(NamedTuple):
    """An engine: real step times and those that planners start from, limits, noise (log deviation),
    whether planners know the real ones, and the launches of a loop that plans ahead."""

    name: str
    truth: LatencyModel
    believed: LatencyModel
    engine: EngineConfig
    noise: float = 0.03
    exact: bool = False
    launches: Launches | None = None


_SMALL = LinearLatency(a=0.009, b=8e-5, c=7e-8, d=2e-9)
_LARGE = LinearLatency(a=0.028, b=2.5e-4, c=5e-8, d=3e-9)
_NO_SQUARE = LinearLatency(a=0.009, b=8.6e-5, c=7e-8)
_SLOW_START = LinearLatency(a=0.031, b=2.3e-4, c=5e-8, d=3e-9)
_EXPERTS = LinearLatency(a=0.0165, b=3.3e-5, c=2.5e-8, d=1.5e-9)

SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("8b", _SMALL, _NO_SQUARE, EngineConfig(kv_blocks=16_384)),
        Setup("8b-short", _SMALL, _SMALL, EngineConfig(kv_blocks=4_096)),
        Setup("70b-short", _LARGE, _LARGE, EngineConfig(kv_blocks=2_048)),
        Setup("70b", _LARGE, _SLOW_START, EngineConfig(kv_blocks=16_384)),
        Setup("30b-a3b", _EXPERTS, _EXPERTS, EngineConfig(kv_blocks=32_768)),
    )
}
"""8B on one GPU of 2 TB/s, 70B over 4 of them, ``30b-a3b``: 30B with 3.3B
active over 2. KV blocks have 16 tokens; ``short``: little KV. The planner of ``8b`` lacks the
quadratic term; that of ``70b`` errs by +11 % in the fixed part and -8 % in a token's time."""

OPERATORS = {
    "8b": preemption.LLAMA3_8B,
    "70b": preemption.LLAMA3_70B,
    "30b-a3b": preemption.QWEN3_30B_A3B,
}
"""By setup, the operators of a model of this size."""


class Contender(NamedTuple):
    """A batch policy with its options. ``rejecting``: requests above the prefill admission budget
    are refused at arrival (FairBatching-PAB); ``all_drafts``: every drafted token is checked."""

    label: str
    policy: str
    options: Mapping[str, Any] = {}
    rejecting: bool = False
    batch_tokens: int | None = None
    all_drafts: bool = False


DEFAULT = Contender("deadline_triage", "deadline_triage")
ROUTER, ADMISSION = ControllerConfig().policy, ControllerConfig().admission
"""With :data:`DEFAULT` the policies that a replica and a controller have by default."""


class Layout(NamedTuple):
    """The replicas of a cluster, by role, how they report, and what happens to them in the run."""

    name: str
    cluster: ClusterConfig
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
    return Layout(name, ClusterConfig(replicas=mixed, prefillers=prefillers, decoders=decoders))


def disaggregated(replicas: int) -> Layout:
    """``replicas``, a quarter of which only decode: the prefill side is then busier, as in the
    papers."""
    decoders = max(1, replicas // 4)
    return of_roles("disaggregated", prefillers=replicas - decoders, decoders=decoders)


class System(NamedTuple):
    """A router, the policy of every replica behind it, and the admission policy (``None``: nothing
    is promised); ``unattainable``: what happens to a request that no replica can promise."""

    router: str
    local: Contender = DEFAULT
    admission: str | None = None
    unattainable: WhenUnattainable = "best_effort"
    admission_options: Mapping[str, Any] = {}


class Suspending(NamedTuple):
    """An engine that only prefills, and suspends prefills as ``config`` says."""

    label: str
    config: preemption.SuspensionConfig


Kind = Contender | System | Suspending
"""What serves a workload."""


def labels_of(kind: Kind) -> dict[str, str]:
    """The labels of ``kind`` in a grid."""
    if isinstance(kind, System):
        return {"router": kind.router, "policy": kind.local.label}
    return {"policy": kind.label}


class Run(NamedTuple):
    """A run, and the keys of the requests that were refused."""

    result: Result
    refused: frozenset[int] = frozenset()


def node_of(setup: Setup) -> Node:
    """A setup as a simulated replica."""
    believed = setup.believed.with_headroom(HEADROOM)
    belief = Belief(setup.truth, online=False) if setup.exact else Belief(believed)
    return Node(Truth(setup.truth, setup.noise, setup.launches), belief, setup.engine)


def lengths_of(workload: Workload, oracle: bool, seed: int) -> OracleLengths | TaskLengths:
    """How policies know output lengths: an ``oracle``, or learnt per task class."""
    lengths = (arrival.output_tokens for arrival in workload.arrivals)
    return OracleLengths(lengths, 0.0, seed) if oracle else TaskLengths()


def local_policy(contender: Contender, workload: Workload, role: Role = "mixed") -> BatchPolicy:
    """A new policy for a replica of this role, by default with ``workload``'s weights (ProServe
    §5.1)."""
    options = dict(contender.options)
    if "first_weight" in LOCAL[contender.policy].Options.model_fields:
        weights = metrics.workload_weights(workload)
        options.setdefault("first_weight", weights.first / weights.later)
    return LOCAL.make(contender.policy, options, role=role)


def run(
    workload: Workload,
    contender: Contender,
    setup: Setup,
    seed: int,
    oracle: bool = False,
    note: Note | None = None,
) -> Run:
    """One run of an engine; ``seed`` is that of the noise."""
    policy = local_policy(contender, workload)
    if contender.all_drafts:
        policy.speculation = AllDrafts()
    rejecting = Rejecting(policy) if contender.rejecting else None
    config, node = setup.engine, node_of(setup)
    if contender.batch_tokens is not None:
        config = config.model_copy(update={"max_batch_tokens": contender.batch_tokens})
    lengths = lengths_of(workload, oracle, seed)
    chosen = rejecting or (Noted(policy, note) if note is not None else policy)
    result = simulate(workload, chosen, node.truth, node.belief, config, seed, lengths)
    return Run(result, frozenset(rejecting.refused if rejecting else ()))


def make_router(name: str, seed: int) -> routing.RoutingPolicy:
    """A router with its default options; a randomized one gets the run's seed."""
    draws = "seed" in ROUTERS[name].Options.model_fields
    return ROUTERS.make(name, {"seed": seed} if draws else {})


def run_cluster(
    workload: Workload,
    system: System,
    setup: Setup,
    layout: Layout,
    seed: int,
    oracle: bool = False,
    autoscaling: Autoscaling | None = None,
    roles: RoleShares | None = None,
) -> Run:
    """One run behind a router; ``seed`` is of noise, lost reports and randomized routers."""
    local, name = system.local, system.admission
    options = system.admission_options
    classes = {each.slo.service_class for each in workload.arrivals}
    when = dict.fromkeys(classes, system.unattainable)
    result = simulate_cluster(
        workload,
        lambda role: local_policy(local, workload, role),
        make_router(system.router, seed),
        *node_of(setup),
        layout.cluster.model_copy(update={"when_unattainable": when}),
        layout.incidents,
        seed,
        lengths_of(workload, oracle, seed),
        admission=admissions.make_policy(name, options) if name is not None else None,
        autoscaling=autoscaling,
        roles=roles,
    )
    failures = result.requests.failures
    return Run(result, frozenset(key for key, why in failures.items() if why == REFUSED))


def run_suspending(
    workload: Workload, kind: Suspending, setup: Setup, seed: int
) -> preemption.PrefillRun:
    """One run of an engine that suspends prefills."""
    truth, model = Truth(setup.truth, setup.noise), OPERATORS[setup.name]
    return preemption.simulate_prefills(workload, truth, None, kind.config, model, seed)


def figures(run: Run) -> dict[str, float]:
    """The figures of a run: refused requests gain nothing; TPOT by its running maximum."""
    result, requests = run.result, run.result.requests
    measured = metrics.stages(requests)
    first = requests.first_stage[:-1]
    accepted = ~np.isin(np.arange(len(requests)), list(run.refused))
    gain = metrics.deadline_gain(requests, measured)
    arrival_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    waited_s = measured.ttft_s[first]
    waited_s = np.where(np.isnan(waited_s), result.end_s - arrival_s, waited_s)
    found = {
        "tdg": float((gain.gain * accepted).sum() / gain.ideal.sum()),
        "refused": float((~accepted).mean()),
        "rate": requests.workload.rate,
        "throughput": len(requests) / (result.end_s - float(arrival_s[0])),
        "longest_wait_s": float(waited_s.max()),
        "preemptions": result.preemptions / len(requests),
        "batches": sum(result.steps) / len(requests),
        "checked": result.checked_drafts / (requests.workload.mean_output_tokens * len(requests)),
        **_phases(requests, measured),
    }
    for metric in metrics.TPOTMetric:
        met = metrics.attained(requests, measured, metric) & accepted
        found[f"attainment_{metric.value}"] = float(met.mean())
    met = metrics.attained(requests, measured, metrics.TPOTMetric.MEAN) & accepted
    priority = metrics.column(requests, 3)[first]
    for level in np.unique(priority) if np.ptp(priority) else ():
        found[f"attainment_priority_{level:g}"] = float(met[priority == level].mean())
    tpot_s = metrics.worst_by_request(
        requests, measured, measured.tpot_s[metrics.TPOTMetric.RUNNING_MAX]
    )
    for name, values in (("ttft", waited_s[accepted]), ("tpot", tpot_s[accepted])):
        for percent in (50, 95, 99):
            found[f"{name}_p{percent}_s"] = _percentile(values, percent)
    return found


def _phases(requests: Requests, measured: metrics.Stages) -> dict[str, float]:
    """Shares of first tokens in time, and of later ones within the TPOT of the one before."""
    later = np.ones(len(requests.emitted_s), np.bool_)
    later[requests.offsets[:-1]] = False
    gaps_s = np.diff(requests.emitted_s, prepend=nan)[later]
    in_time = gaps_s <= np.repeat(metrics.column(requests, 1), np.diff(requests.offsets))[later]
    return {
        "ttft_met": float((measured.ttft_s <= metrics.column(requests, 0)).mean()),
        "tbt_met": float(in_time.mean()) if len(in_time) else nan,
    }


def _percentile(values: Floats, percent: float) -> float:
    """Of the values that are known."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else nan


def cluster_figures(done: Run) -> dict[str, float]:
    """:func:`figures` and the cluster's. ``promised``, ``best_effort``: shares of all; ``kept``,
    ``best_effort_met``: of these, attained; ``split``: served by P/D pairs."""
    result, requests = done.result, done.result.requests
    measured = metrics.stages(requests)
    met = metrics.attained(requests, measured, metrics.TPOTMetric.MEAN)
    promised = ~np.isnan(requests.promised_s)
    found = {
        **figures(done),
        "split": result.split / len(requests),
        "migrated": float(result.migrated),
        "drain_s": float(np.mean(result.drains_s)) if result.drains_s else nan,
        **_by_tier(done, measured),
    }
    for name, kept, tier in (
        ("promised", "kept", promised),
        ("best_effort", "best_effort_met", requests.best_effort),
    ):
        found[name] = float(tier.mean())
        found[kept] = float(met[tier].mean()) if tier.any() else nan
    over = (measured.ttft_s[requests.first_stage[:-1]] / requests.promised_s)[promised]
    return found | {f"ttft_over_p{each}": _percentile(over, each) for each in (50, 90)}


def _by_tier(done: Run, measured: metrics.Stages) -> dict[str, float]:
    """Most requests of a tier at a time; and P99 of TTFT and TPOT (worst 10 tokens) over the
    objectives of all that is not best effort."""
    requests = done.result.requests
    arrived_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    last = requests.offsets[requests.first_stage[1:]] - 1
    ended_s = np.nan_to_num(requests.emitted_s[last], nan=done.result.end_s)
    standard = ~requests.best_effort
    standard[list(done.refused)] = False
    of = standard[requests.stage_request]
    tpot_s = measured.tpot_s[metrics.TPOTMetric.WINDOW]
    return {
        "standard_most": _most_at_once(arrived_s[standard], ended_s[standard]),
        "best_effort_most": _most_at_once(
            arrived_s[requests.best_effort], ended_s[requests.best_effort]
        ),
        "standard_ttft": _percentile((measured.ttft_s / metrics.column(requests, 0))[of], 99),
        "standard_tpot": _percentile((tpot_s / metrics.column(requests, 1))[of], 99),
    }


def _most_at_once(begun_s: Floats, ended_s: Floats) -> float:
    times_s = np.concatenate((begun_s, ended_s))
    change = np.repeat((1, -1), len(begun_s))
    return float(change[np.argsort(times_s, kind="stable")].cumsum().max(initial=0))


def prefill_figures(served: preemption.PrefillRun, believed: LatencyModel) -> dict[str, float]:
    """Figures of suspensions. ``near_10``: share with a TTFT within 10 % of what is
    ``believed``."""
    requests, counts = served.requests, served.counts
    measured = metrics.stages(requests)
    tokens = (arrival.prompt_tokens for arrival in requests.arrivals)
    alone_s = np.array([believed.step_s(StepSample.of([(each, 0)])) for each in tokens])
    return {
        "attainment_mean": float(
            metrics.attained(requests, measured, metrics.TPOTMetric.MEAN).mean()
        ),
        "throughput": len(requests) / (counts.end_s - requests.arrivals[0].arrival_s),
        "suspensions": counts.suspensions / len(requests),
        "suspended_tokens": float(counts.suspended_tokens),
        "blocked_ms": 1e3 * float(np.mean(counts.blocked_s or [0.0])),
        "batches": counts.tasks / len(requests),
        "near_10": float((np.abs(measured.ttft_s / alone_s - 1) <= 0.1).mean()),
        **_phases(requests, measured),
    }
