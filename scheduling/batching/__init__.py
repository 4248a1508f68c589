"""Local policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduling.batching.base import (
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    BatchPolicy,
    PlannedTokens,
    PolicyOptions,
)
from scheduling.batching.fairbatching import FairBatching
from scheduling.batching.fcfs import FCFS
from scheduling.batching.sarathi import Sarathi
from scheduling.batching.slidebatching import SlideBatching
from scheduling.policy import make

__all__ = [
    "POLICIES",
    "BatchBudget",
    "BatchBuilder",
    "BatchPlan",
    "BatchPolicy",
    "PlannedTokens",
    "PolicyOptions",
    "make_policy",
]

POLICIES: dict[str, type[BatchPolicy]] = {
    policy.name: policy for policy in (FCFS, Sarathi, FairBatching, SlideBatching)
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> BatchPolicy:
    """Build the batch policy called ``name`` with its options.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range.
    """
    return make("batch", POLICIES, name, options)
