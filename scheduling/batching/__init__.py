"""Local policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduling.batching.annealing import Annealing
from scheduling.batching.base import (
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    BatchPolicy,
    PlannedTokens,
    PolicyOptions,
)
from scheduling.batching.best_effort import BestEffort, BestEffortOptions
from scheduling.batching.d_edf import DEDF
from scheduling.batching.deadline_triage.policy import DeadlineTriage
from scheduling.batching.edf import EDF
from scheduling.batching.fairbatching import FairBatching
from scheduling.batching.fcfs import FCFS
from scheduling.batching.s_edf import SEDF
from scheduling.batching.sarathi import Sarathi
from scheduling.batching.sarathi_priority import SarathiPriority
from scheduling.batching.sjf import SJF
from scheduling.batching.slidebatching import SlideBatching
from scheduling.batching.slos_serve import SLOsServe
from scheduling.batching.weighted_vtc import WeightedVTC
from scheduling.policy import Registry

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
        WeightedVTC,
        Sarathi,
        SarathiPriority,
        EDF,
        SJF,
        DEDF,
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
) -> BatchPolicy:
    """Build the batch policy called ``name`` with its options and with the best-effort options,
    which are the same for every policy.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range.
    """
    policy = POLICIES.make(name, options)
    policy.best_effort = BestEffort(best_effort)
    return policy
