"""The replicas that may be chosen now, as routing policies see them.

The views are kept between decisions: a decision or a report changes one of them, so a decision
costs what its policy costs, not the making of hundreds of tuples.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from controller.ledger import Ledger
from controller.mirror import Mirror, MirroredReplica
from scheduling.routing.base import ReplicaView


class Candidates:
    """The list of views over a mirror and a ledger.

    Whoever changes either must say so with :meth:`touch`. ``O(1)`` per touched replica;
    ``O(replicas)`` when the membership changed or a replica may have gone stale.
    """

    def __init__(self, mirror: Mirror, ledger: Ledger) -> None:
        self._mirror = mirror
        self._ledger = ledger
        self._views: list[ReplicaView] = []
        self._places: dict[str, int] = {}
        self._valid_until_s = -inf

    def touch(self, replica_ids: Iterable[str], now_s: float) -> None:
        """Something about these replicas changed."""
        for replica_id in replica_ids:
            replica = self._mirror.replicas.get(replica_id)
            usable = replica is not None and self._mirror.condition(replica, now_s) == "fresh"
            place = self._places.get(replica_id)
            if usable != (place is not None):
                self._valid_until_s = -inf
            elif place is not None and replica is not None:
                self._views[place] = self._view(replica_id, replica)

    def at(self, now_s: float) -> list[ReplicaView]:
        """The views at ``now_s``, in order of registration. Not to be changed by the caller."""
        if now_s >= self._valid_until_s:
            self._rebuild(now_s)
        return self._views

    def _rebuild(self, now_s: float) -> None:
        mirror = self._mirror
        self._views = []
        self._places = {}
        valid_until_s = inf
        for replica_id, replica in mirror.replicas.items():
            condition = mirror.condition(replica, now_s)
            if condition == "fresh":
                self._places[replica_id] = len(self._views)
                self._views.append(self._view(replica_id, replica))
                valid_until_s = min(valid_until_s, mirror.stale_at_s(replica))
            elif condition == "gone":
                valid_until_s = min(valid_until_s, replica.gone_until_s)
        self._valid_until_s = valid_until_s

    def _view(self, replica_id: str, replica: MirroredReplica) -> ReplicaView:
        reported = replica.aggregates
        reserved = self._ledger.load(replica_id)
        return ReplicaView(
            replica_id,
            reported.waiting,
            reported.running,
            reserved.requests,
            reported.prefill_tokens + reserved.tokens,
            reported.context_tokens,
            reported.free_kv_blocks,
            reported.pab_tokens - reserved.tokens,
        )
