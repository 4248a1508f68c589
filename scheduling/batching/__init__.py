"""Local policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.scheduling.batching.annealing import Annealing
from sluice.scheduling.batching.base import BatchPolicy, BestEffort, BestEffortOptions
from sluice.scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, PlannedTokens
from sluice.scheduling.batching.deadline_triage import DeadlineTriage
from sluice.scheduling.batching.fairbatching import FairBatching
from sluice.scheduling.batching.s_edf import SEDF
from sluice.scheduling.batching.slidebatching import SlideBatching
from sluice.scheduling.batching.slos_serve import SLOsServe
from sluice.scheduling.batching.token_budget import EDF, FCFS, Sarathi
from sluice.scheduling.policy import PolicyOptions, Registry
from sluice.scheduling.roles import Role

__all__ = [
    "POLICIES",
    "BatchBudget",
    "BatchBuilder",
    "BatchPlan",
    "BatchPolicy",
    "BestEffortOptions",
    "PlannedTokens",
    "PolicyOptions",
    "make_policy",
]

POLICIES: Registry[BatchPolicy] = Registry(
    "batching",
    BatchPolicy,
    (
        FCFS,
        Sarathi,
        EDF,
        SEDF,
        FairBatching,
        SlideBatching,
        Annealing,
        SLOsServe,
        DeadlineTriage,
    ),
)


def make_policy(
    name: str,
    options: Mapping[str, Any] | None = None,
    best_effort: BestEffortOptions | None = None,
    role: Role = "mixed",
) -> BatchPolicy:
    """The batch policy ``name``; ``role`` decides what ``options`` leave open. Raises ValueError
    for an unknown policy, and for an option that is unknown or out of range."""
    policy = POLICIES.make(name, options, role)
    policy.best_effort = BestEffort(best_effort)
    return policy
