"""Autoscaling policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from sluice.scheduling.autoscaling.base import AutoscalingPolicy, Decision, Pool, State, ToZero
from sluice.scheduling.autoscaling.head_room import HeadRoom
from sluice.scheduling.autoscaling.load import Demand, Load
from sluice.scheduling.autoscaling.ongoing_requests import OngoingRequests
from sluice.scheduling.policy import Registry

__all__ = [
    "POLICIES",
    "AutoscalingPolicy",
    "Decision",
    "Demand",
    "Load",
    "Pool",
    "State",
    "ToZero",
    "make_policy",
]

POLICIES: Registry[AutoscalingPolicy] = Registry(
    "autoscaling",
    AutoscalingPolicy,
    (HeadRoom, OngoingRequests),
)

make_policy = POLICIES.make
