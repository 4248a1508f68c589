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
    """Build the policy called ``name`` with its options.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range (pydantic's
            ``ValidationError``, which is a ``ValueError``).
    """
    if name not in POLICIES:
        raise ValueError(f"unknown batch policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    policy = POLICIES[name]
    return policy(policy.Options.model_validate(dict(options or {})))
