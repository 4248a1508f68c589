"""Short ways to write workloads and clusters, and hypothesis strategies of loads and engines."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sluice.scheduling import routing
from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import RoutingPolicy
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.replica import Incident
from sluice.simulation.run import Result
from sluice.simulation.workload import Arrival, Stage, Workload

MODEL = LinearLatency(a=0.004, b=5e-5, c=2e-7, d=1e-9)
OBJECTIVE = SLO(ttft_s=0.5, tpot_s=0.05)
HASHED = 32
"""Tokens per hash of :func:`families`."""


def workload(*arrivals: tuple[float, int, int], slo: SLO = OBJECTIVE) -> Workload:
    """Requests of ``(arrival_s, prompt_tokens, output_tokens)``."""
    return of(Arrival(when, prompt, output, slo) for when, prompt, output in arrivals)


def of(arrivals: Iterable[Arrival]) -> Workload:
    """A workload of ``arrivals``, sorted."""
    return Workload("test", tuple(sorted(arrivals, key=lambda arrival: arrival.arrival_s)))


objectives = st.sampled_from(
    [
        SLO(ttft_s=0.2, tpot_s=0.02),
        SLO(ttft_s=1.0, tpot_s=0.05, priority=2),
        SLO(e2e_s=1.0),
        SLO(tpot_s=0.03),
        SLO(),
    ]
)


@st.composite
def staged(draw: st.DrawFn, arrival_s: float, prompt: int) -> Arrival:
    """A request of two or three stages."""
    count = draw(st.integers(2, 3))
    stages = [
        Stage(
            draw(st.integers(1, 12)),
            draw(objectives),
            draw(st.sampled_from([0, 0, 5, 40])) if index else 0,
        )
        for index in range(count)
    ]
    return Arrival.of_stages(arrival_s, prompt, stages, task="tools")


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """A small request of one or several stages, some longer than a small KV cache."""
    arrival_s = draw(st.floats(0, 1))
    prompt = draw(st.one_of(st.integers(1, 120), st.integers(1, 500)))
    if draw(st.integers(0, 4)) == 0:
        return draw(staged(arrival_s, prompt))
    return Arrival(arrival_s, prompt, draw(st.integers(1, 40)), draw(objectives), task="chat")


@st.composite
def families(draw: st.DrawFn) -> Workload:
    """Prompts that are beginnings of a few long ones, some with an end of their own."""
    made = []
    for index in range(draw(st.integers(1, 16))):
        family = draw(st.integers(1, 3))
        shared, own = draw(st.integers(0, 6)), draw(st.integers(0, 2))
        blocks = tuple(family * 100 + i for i in range(shared))
        blocks += tuple(10_000 + index * 10 + i for i in range(own))
        prompt = max(1, len(blocks) * HASHED + draw(st.integers(-5, 20)))
        arrival_s = draw(st.floats(0, 1))
        output = draw(st.integers(1, 60))
        made.append(Arrival(arrival_s, prompt, output, draw(objectives), block_hashes=blocks))
    made.sort(key=lambda arrival: arrival.arrival_s)
    return Workload("families", tuple(made), block_tokens=HASHED)


workloads = st.lists(arrivals(), min_size=1, max_size=14).map(of)

configs = st.builds(
    EngineConfig,
    kv_blocks=st.integers(20, 80),
    block_tokens=st.sampled_from([1, 8, 16]),
    max_batch_tokens=st.integers(16, 300),
    max_sequences=st.integers(1, 8),
    reserve_prompt=st.booleans(),
)


EXACT = Truth(MODEL, noise=0)


def batch(name: str = "fcfs") -> Callable[[Role], BatchPolicy]:
    return lambda role: make_policy(name)


def route(name: str = "least_tokens") -> RoutingPolicy:
    return routing.make_policy(name, {"seed": 1} if name == "power_of_two" else {})


def clustered(
    load: Workload,
    cluster: ClusterConfig | None = None,
    *incidents: Incident,
    policy: str = "fcfs",
    router: str = "least_tokens",
    admission: str | None = None,
    truth: Truth | LinearLatency = EXACT,
    **more: Any,
) -> Result:
    """A run through a cluster, by default without noise and admission."""
    admits = make_admission(admission) if admission is not None else None
    makers = batch(policy), route(router)
    return simulate_cluster(
        load, *makers, truth, cluster=cluster, incidents=incidents, admission=admits, **more
    )


def met(result: Result) -> np.ndarray:
    """By request, whether it attained every objective, by the mean TPOT."""
    return attained(result.requests, stages(result.requests), TPOTMetric.MEAN)


def pools(
    prefillers: int = 1, decoders: int = 1, replicas: int = 0, **config: Any
) -> ClusterConfig:
    return ClusterConfig(replicas=replicas, prefillers=prefillers, decoders=decoders, **config)


def steady(count: int = 200, gap_s: float = 0.01, prompt: int = 300, output: int = 10) -> Workload:
    return workload(*((gap_s * index, prompt, output) for index in range(count)))


def ended_well(result: Result) -> np.ndarray:
    """By request, whether all its tokens left."""
    requests = result.requests
    measured = stages(requests)
    whole = np.ones(len(requests), bool)
    np.logical_and.at(whole, measured.request, measured.complete)
    return whole
