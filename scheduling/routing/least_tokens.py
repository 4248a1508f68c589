"""Least tokens: the replica with the least prefill work ahead."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.routing.base import ReplicaView, RouteQuery, RoutingPolicy


class LeastTokens(RoutingPolicy):
    """Takes the replica with the fewest tokens to prefill. ``O(replicas)``.

    Ties go to fewer running requests, then to less decode context, then to the first in the list.
    """

    name = "least_tokens"
    source = "join the shortest queue, in units of prefill tokens"

    def choose(self, query: RouteQuery, replicas: Sequence[ReplicaView]) -> int:
        """The replica with the least prefill work ahead."""
        best = 0
        best_load = _load(replicas[0])
        for index in range(1, len(replicas)):
            load = _load(replicas[index])
            if load < best_load:
                best, best_load = index, load
        return best


def _load(replica: ReplicaView) -> tuple[int, int, int]:
    return (replica.prefill_tokens, replica.running, replica.context_tokens)
