"""Fallback policies, for routing policies that decide only some requests."""

from __future__ import annotations

from typing import Literal

from scheduling.routing.base import RoutingPolicy
from scheduling.routing.least_tokens import LeastTokens
from scheduling.routing.least_work import LeastWork
from scheduling.routing.min_load import MinLoad
from scheduling.routing.pab import PABBalancing

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
