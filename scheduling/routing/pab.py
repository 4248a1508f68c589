"""PAB load balancing: the replica that can still take the most prefill within its objectives."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.routing.base import ReplicaView, RouteQuery, RoutingPolicy


class PABBalancing(RoutingPolicy):
    """Takes the replica with the largest prefill admission budget. ``O(replicas)``.

    The paper sends a request to "a suitable node with sufficient budget" and leaves open which
    node, if several suffice, and what happens if none does. We take the one with the most budget
    left in both cases: if any suffices, that one does, and it keeps the others' head-room even; if
    none does, it is the one that will be late by least. Ties go to fewer requests, then to the
    first in the list. The caller subtracts the prompt from the chosen budget at once.
    """

    name = "pab"
    source = "FairBatching §3.4 (PAB-LB)"

    def choose(self, query: RouteQuery, replicas: Sequence[ReplicaView]) -> int:
        """The replica with the largest prefill admission budget."""
        best = 0
        top = replicas[0]
        for index in range(1, len(replicas)):
            replica = replicas[index]
            if replica.pab_tokens > top.pab_tokens or (
                replica.pab_tokens == top.pab_tokens and replica.requests < top.requests
            ):
                best, top = index, replica
        return best
