"""Decisions that no replica has confirmed yet.

What is known of a replica is as old as its last report. Without this ledger every request that
arrives between two reports would go to the same, seemingly idle replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np

_MOST_STALE = 1_024
"""Ended reservations whose ends may be kept beside those of the others."""


class Reservation(NamedTuple):
    """What one decision takes of a replica.

    Attributes:
        replica_id: where the request goes.
        made_s: when that was decided.
        promised: whether it is a guaranteed request; a best-effort one takes only what is left.
        new_tokens: prompt tokens to prefill there; ``cached_tokens`` more are in its cache.
        kv_tokens: tokens for which it needs KV blocks that it does not share.
        due_s: when its first token is due; infinite if no time is stated.
        tpot_s: its time per later token; infinite if none is stated.
        priority: its weight.
        output_tokens: expected length of its output.
        awaited_s: until when nothing need be heard of it there, because another replica computes
            its prompt first.
        later_stages: how many of its stages follow the first.
        later_tokens: of prompt, that enter before the next of them that has any.
    """

    replica_id: str
    made_s: float
    promised: bool
    new_tokens: float
    cached_tokens: float
    kv_tokens: float
    due_s: float
    tpot_s: float
    priority: float
    output_tokens: float
    awaited_s: float = -inf
    later_stages: int = 0
    later_tokens: int = 0

    @property
    def record(self) -> np.ndarray:
        """The same without ``replica_id``, :data:`RESERVATION` ``[1]``."""
        return np.array([self[1:]], RESERVATION)


RESERVATION = np.dtype(
    [
        (name, "?" if name == "promised" else "<f8")
        for name in Reservation._fields
        if name != "replica_id"
    ],
    align=True,
)
"""A :class:`Reservation`, for compiled loops."""


class Ledger:
    """Reservations by request key, and by replica in the order in which they were made.

    A reservation ends when the replica reports the request or the router gives it up
    (:meth:`release`), when the replica leaves (:meth:`drop_replica`), or by age (:meth:`expire`).
    Methods name the replicas whose reservations changed.

    All times are seconds on one monotonic clock of the caller's; they must not run backwards.
    ``O(log n)`` amortised per reservation, ``O(1)`` where they expire in the order in which they
    are made.

    Args:
        ttl_s: age at which a reservation expires, seconds; of one that is awaited later, counted
            from then.
        limit: most reservations; the one that would expire first goes when another one is made.

    Raises:
        ValueError: ``ttl_s`` or ``limit`` is not positive.
    """

    def __init__(self, ttl_s: float, limit: int = 100_000) -> None:
        if ttl_s <= 0 or limit <= 0:
            raise ValueError(f"ttl_s and limit must be positive, got {ttl_s} and {limit}")
        self._ttl_s = ttl_s
        self._limit = limit
        self._entries: dict[int, Reservation] = {}
        # When each expires, and its key: a heap, which also holds some that have ended already.
        self._ends: list[tuple[float, int]] = []
        self._of_replica: dict[str, dict[int, Reservation]] = {}
        self.expired = 0
        """Reservations that ended by age or because the ledger was full, since the start."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def of(self, key: int) -> Reservation | None:
        """What is reserved for a request, if anything is."""
        return self._entries.get(key)

    def at(self, replica_id: str) -> Iterable[Reservation]:
        """What is reserved at a replica, oldest first."""
        return self._of_replica.get(replica_id, {}).values()

    def reserve(self, key: int, made: Reservation) -> set[str]:
        """Make a reservation; an earlier one of ``key`` ends. Its own replica is not named.

        Raises:
            ValueError: negative tokens.
        """
        if made.new_tokens < 0:
            raise ValueError(f"a reservation needs tokens >= 0, got {made.new_tokens}")
        changed = set()
        earlier = self._end(key)
        if earlier is not None:
            changed.add(earlier)
        elif len(self._entries) >= self._limit:
            changed.add(self._end_next())
        self._entries[key] = made
        heapq.heappush(self._ends, (self._ends_s(made), key))
        if len(self._ends) > 2 * len(self._entries) + _MOST_STALE:
            self._rebuild_ends()
        self._of_replica.setdefault(made.replica_id, {})[key] = made
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
        keys = self._of_replica.pop(replica_id, {})
        for key in keys:
            del self._entries[key]
        return len(keys)

    def expire(self, now_s: float) -> set[str]:
        """End the reservations whose time is up."""
        changed: set[str] = set()
        # What is on top may have ended: only when its time is up does that matter.
        while self._ends and self._ends[0][0] <= now_s:
            if self._next() is not None and self._ends[0][0] <= now_s:
                changed.add(self._end_next())
        return changed

    def postpone(self, by_s: float) -> None:
        """Extend every reservation by ``by_s``, a time in which no report could have confirmed it.
        ``O(n)``."""
        for key, made in self._entries.items():
            later = made._replace(awaited_s=max(made.made_s, made.awaited_s) + by_s)
            self._entries[key] = self._of_replica[made.replica_id][key] = later
        self._rebuild_ends()

    def _rebuild_ends(self) -> None:
        self._ends = [(self._ends_s(each), own) for own, each in self._entries.items()]
        heapq.heapify(self._ends)

    def _ends_s(self, made: Reservation) -> float:
        return max(made.made_s, made.awaited_s) + self._ttl_s

    def _next(self) -> Reservation | None:
        """The one that expires first; it is on top of the heap then."""
        while self._ends:
            ends_s, key = self._ends[0]
            made = self._entries.get(key)
            if made is not None and self._ends_s(made) == ends_s:
                return made
            heapq.heappop(self._ends)
        return None

    def _end_next(self) -> str:
        """End the one that expires first, of which there must be one; name its replica."""
        made = self._next()
        assert made is not None
        self._end(self._ends[0][1])
        self.expired += 1
        return made.replica_id

    def _end(self, key: int) -> str | None:
        made = self._entries.pop(key, None)
        if made is None:
            return None
        of_replica = self._of_replica[made.replica_id]
        del of_replica[key]
        if not of_replica:
            del self._of_replica[made.replica_id]
        return made.replica_id
