"""The controller's own decisions that no replica has confirmed yet.

A mirror is as old as the last report. Without this ledger every request that arrives between two
reports would go to the same, seemingly idle replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Load(NamedTuple):
    """What is on its way to one replica: requests, and the prompt tokens of them."""

    requests: int
    tokens: int


class Reservation(NamedTuple):
    """One decision: where the request goes, its prompt tokens, and when that was decided."""

    replica_id: str
    tokens: int
    made_s: float


NO_LOAD = Load(0, 0)


class Ledger:
    """Reservations by request key, with a running total per replica.

    A reservation ends when the replica reports the request (:meth:`release`), when the router
    gives up (:meth:`release`), when the replica leaves (:meth:`drop_replica`), or by age
    (:meth:`expire`). Every method that changes totals names the replicas whose total changed.

    All times are seconds on one monotonic clock of the caller's; they must not run backwards.
    ``O(1)`` amortised per reservation.

    Args:
        ttl_s: age at which a reservation expires, seconds.
        limit: most reservations; the oldest goes when another one is made.

    Raises:
        ValueError: ``ttl_s`` or ``limit`` is not positive.
    """

    def __init__(self, ttl_s: float, limit: int = 100_000) -> None:
        if ttl_s <= 0 or limit <= 0:
            raise ValueError(f"ttl_s and limit must be positive, got {ttl_s} and {limit}")
        self._ttl_s = ttl_s
        self._limit = limit
        # An OrderedDict, not a dict: taking the oldest of a dict again and again is quadratic.
        self._entries: OrderedDict[int, Reservation] = OrderedDict()
        self._keys: dict[str, set[int]] = {}
        self._loads: dict[str, Load] = {}
        self.expired = 0
        """Reservations that ended by age or because the ledger was full, since the start."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def load(self, replica_id: str) -> Load:
        """What is reserved at a replica."""
        return self._loads.get(replica_id, NO_LOAD)

    def reserve(self, key: int, replica_id: str, tokens: int, now_s: float) -> set[str]:
        """Reserve ``tokens`` (>= 0) at a replica; an earlier reservation of ``key`` ends.

        Raises:
            ValueError: negative tokens.
        """
        if tokens < 0:
            raise ValueError(f"a reservation needs tokens >= 0, got {tokens}")
        changed = {replica_id}
        earlier = self._end(key)
        if earlier is not None:
            changed.add(earlier)
        elif len(self._entries) >= self._limit:
            oldest = self._end(next(iter(self._entries)))
            self.expired += 1
            if oldest is not None:
                changed.add(oldest)
        self._entries[key] = Reservation(replica_id, tokens, now_s)
        self._keys.setdefault(replica_id, set()).add(key)
        before = self.load(replica_id)
        self._loads[replica_id] = Load(before.requests + 1, before.tokens + tokens)
        return changed

    def release(self, keys: Iterable[int]) -> set[str]:
        """End the reservations of ``keys``; unknown ones are ignored. ``O(len(keys))``."""
        if not self._entries:
            return set()
        entries = self._entries
        ended = (self._end(key) for key in keys if key in entries)
        return {replica_id for replica_id in ended if replica_id is not None}

    def drop_replica(self, replica_id: str) -> int:
        """End every reservation at a replica and return how many there were."""
        keys = self._keys.pop(replica_id, set())
        for key in keys:
            del self._entries[key]
        self._loads.pop(replica_id, None)
        return len(keys)

    def expire(self, now_s: float) -> set[str]:
        """End the reservations that are ``ttl_s`` old or older."""
        changed: set[str] = set()
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            if now_s - oldest.made_s < self._ttl_s:
                break
            self._end(key)
            self.expired += 1
            changed.add(oldest.replica_id)
        return changed

    def entries(self) -> dict[int, Reservation]:
        """A copy of all reservations by key, oldest first. ``O(n)``."""
        return dict(self._entries)

    def _end(self, key: int) -> str | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        replica_id = entry.replica_id
        load = self._loads[replica_id]
        if load.requests == 1:
            del self._loads[replica_id], self._keys[replica_id]
        else:
            self._loads[replica_id] = Load(load.requests - 1, load.tokens - entry.tokens)
            self._keys[replica_id].discard(key)
        return replica_id
