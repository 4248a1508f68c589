"""What tests of simulated clusters share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sluice.scheduling import routing
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import RoutingPolicy
from sluice.simulation.config import (
    ClusterConfig,
)
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import stages
from sluice.simulation.run import Result
from sluice.simulation.workload import Workload
from tests.simulation.loads import MODEL, workload

EXACT = Truth(MODEL, noise=0)


def batch(name: str = "fcfs") -> Callable[[Role], BatchPolicy]:
    return lambda role: make_policy(name)


def route(name: str = "least_tokens") -> RoutingPolicy:
    return routing.make_policy(name, {"seed": 1} if name == "power_of_two" else {})


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
