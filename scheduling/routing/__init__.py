"""Routing policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from sluice.scheduling.policy import Registry
from sluice.scheduling.routing.balancing import (
    LeastMemory,
    LeastTokens,
    LeastWork,
    MinLoad,
    PABBalancing,
    PowerOfTwo,
    RoundRobin,
)
from sluice.scheduling.routing.base import Job, RouteQuery, RoutingPolicy, Tier
from sluice.scheduling.routing.go_routing import GoRouting
from sluice.scheduling.routing.most_gain import MostGain
from sluice.scheduling.routing.session_affinity import SessionAffinity
from sluice.scheduling.routing.slos_serve import SLOsServeRouting

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
        LeastTokens,
        LeastWork,
        LeastMemory,
        PABBalancing,
        GoRouting,
        SLOsServeRouting,
        SessionAffinity,
        MostGain,
    ),
)

make_policy = POLICIES.make
