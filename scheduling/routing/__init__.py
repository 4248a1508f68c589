"""Routing policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduling.policy import Registry
from scheduling.routing.base import Job, RouteQuery, RoutingPolicy, Tier
from scheduling.routing.go_routing import GoRouting
from scheduling.routing.least_memory import LeastMemory
from scheduling.routing.least_tokens import LeastTokens
from scheduling.routing.least_work import LeastWork
from scheduling.routing.min_load import MinLoad
from scheduling.routing.most_gain import MostGain
from scheduling.routing.pab import PABBalancing
from scheduling.routing.power_of_two import PowerOfTwo
from scheduling.routing.round_robin import RoundRobin
from scheduling.routing.session_affinity import SessionAffinity
from scheduling.routing.slos_serve import SLOsServe
from scheduling.routing.vllm import VLLM

__all__ = [
    "POLICIES",
    "Job",
    "RouteQuery",
    "RoutingPolicy",
    "Tier",
    "make_policy",
]

POLICIES: Registry[RoutingPolicy] = Registry(
    "routing",
    RoutingPolicy,
    (
        RoundRobin,
        PowerOfTwo,
        MinLoad,
        VLLM,
        LeastTokens,
        LeastWork,
        LeastMemory,
        PABBalancing,
        GoRouting,
        SLOsServe,
        SessionAffinity,
        MostGain,
    ),
)


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> RoutingPolicy:
    """Build the routing policy called ``name`` with its options.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range.
    """
    return POLICIES.make(name, options)
