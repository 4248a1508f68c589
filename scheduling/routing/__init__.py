"""Routing policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from sluice.scheduling.policy import Registry
from sluice.scheduling.routing.base import Job, RouteQuery, RoutingPolicy, Tier
from sluice.scheduling.routing.go_routing import GoRouting
from sluice.scheduling.routing.least_memory import LeastMemory
from sluice.scheduling.routing.least_tokens import LeastTokens
from sluice.scheduling.routing.least_work import LeastWork
from sluice.scheduling.routing.min_load import MinLoad
from sluice.scheduling.routing.most_gain import MostGain
from sluice.scheduling.routing.pab import PABBalancing
from sluice.scheduling.routing.power_of_two import PowerOfTwo
from sluice.scheduling.routing.round_robin import RoundRobin
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
