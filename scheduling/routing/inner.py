"""Fallback policies, for routing policies that decide only some requests."""

from __future__ import annotations

from typing import Literal

from sluice.scheduling.routing.base import RoutingPolicy
from sluice.scheduling.routing.least_tokens import LeastTokens
from sluice.scheduling.routing.least_work import LeastWork
from sluice.scheduling.routing.min_load import MinLoad
from sluice.scheduling.routing.pab import PABBalancing

Inner = Literal["least_tokens", "least_work", "min_load", "pab"]

_POLICIES: dict[Inner, type[RoutingPolicy]] = {
    "least_tokens": LeastTokens,
    "least_work": LeastWork,
    "min_load": MinLoad,
    "pab": PABBalancing,
}


def make_inner(name: Inner) -> RoutingPolicy:
    """A new policy with its default options."""
    return _POLICIES[name]()
