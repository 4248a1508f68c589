"""What operators said of replicas, for as long as it matters: who is drained, who was taken back.

Within one life of the controller its own word is the truth. Over a restart the replicas carry it:
each knows what it was last told, and says so in its hello. So a replica's memory counts where this
controller has said nothing of it, and nowhere else: what was taken back while the replica was out
of reach stays taken back, whatever the replica remembers.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.fleet import Fleet

KEPT_S = 3600.0
"""How long the word on a replica that fell silent is kept after the mirror forgot it, seconds. Most
such replicas are dead and never come back; one that does later counts by what it remembers."""

MOST_SILENT = 1024
"""Most silent replicas of which a word is kept; of more, the one silent for longest is forgotten.
The closed ones of them travel with every answer to a router."""


class Drains:
    """The operators' words, by replica. All methods are ``O(1)``, amortised.

    Args:
        fleet: what is closed there is what is drained.
        kept_s, most_silent: see the module.
    """

    def __init__(
        self, fleet: Fleet, kept_s: float = KEPT_S, most_silent: int = MOST_SILENT
    ) -> None:
        self._fleet = fleet
        self._kept_s = kept_s
        self._most_silent = most_silent
        self._words: dict[str, bool] = {}
        self._silent_since_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._words)

    def drain(self, replica_id: str) -> None:
        """Close a replica to new requests."""
        self._fleet.close(replica_id)
        self._words[replica_id] = True

    def take_back(self, replica_id: str) -> bool:
        """Open a replica again; whether it was drained."""
        drained = self._fleet.reopen(replica_id)
        if drained:
            self._words[replica_id] = False
        return drained

    def greet(self, replica_id: str, closed: bool) -> None:
        """A replica said hello, and that it was last told this."""
        self._silent_since_s.pop(replica_id, None)
        if closed and replica_id not in self._words:
            self.drain(replica_id)

    def silent(self, replica_ids: Iterable[str], now_s: float) -> None:
        """The mirror has forgotten these; and forget what was said of those long silent."""
        since_s = self._silent_since_s
        since_s.update({each: now_s for each in replica_ids if each in self._words})
        while since_s:
            oldest = next(iter(since_s))
            if now_s - since_s[oldest] < self._kept_s and len(since_s) <= self._most_silent:
                return
            self.forget(oldest)

    def forget(self, replica_id: str) -> None:
        """A replica has ended."""
        self._words.pop(replica_id, None)
        self._silent_since_s.pop(replica_id, None)
        self._fleet.reopen(replica_id)
