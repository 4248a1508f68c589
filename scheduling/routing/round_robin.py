"""Round robin: every replica in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.policy import PolicyOptions
from scheduling.routing.base import ReplicaView, RouteQuery, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Takes the replicas in turn, in the order of the given list. ``O(1)``."""

    name = "round_robin"
    source = "folklore; the first hop of SLOs-Serve §4.2"

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._turn = -1

    def choose(self, query: RouteQuery, replicas: Sequence[ReplicaView]) -> int:
        """The replica whose turn it is; a change of the fleet only shifts the turn."""
        self._turn = (self._turn + 1) % len(replicas)
        return self._turn
