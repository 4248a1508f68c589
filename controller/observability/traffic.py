"""Traffic recorded for the shadow policies: sizes, hashes and outcomes of requests, no text.

Only an actor with shadow policies keeps it. One process reads it, and what it has read is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from sluice.controller.observability.recent_decisions import RecentDecisions
from sluice.controller.state.mirror import MirroredReplica
from sluice.protocol.messages import ReplicaHello, RequestEnding
from sluice.scheduling.placement.placer import DecisionInputs
from sluice.scheduling.request.job import RouteDecision, RouteQuery

MAX_KEPT: Final = 8_192
"""Most queries, and most endings, that wait to be read: of more the oldest are lost."""

MAX_READ: Final = 128
"""Most of each in one answer: decisions wait for it."""

T = TypeVar("T")


class Traffic(NamedTuple):
    """What came since the last answer, the oldest first: queries with the time of the decision, and
    endings. ``members``: a number that is another one if replicas came or left; ``replicas``: if
    asked for, each as it registered, with its last summary. ``more``: there is more to read;
    ``lost``: it was not read often enough."""

    now_s: float
    queries: list[tuple[float, RouteQuery]]
    endings: list[RequestEnding]
    members: int
    replicas: dict[str, tuple[ReplicaHello, np.void]]
    more: bool = False
    lost: bool = False


class RecordedDecisions(RecentDecisions):
    """The latest decisions, and the traffic that was not read yet. ``O(1)`` a decision."""

    def __init__(self) -> None:
        super().__init__()
        self._unread_endings: deque[RequestEnding] = deque(maxlen=MAX_KEPT)
        self._unread: deque[tuple[float, RouteQuery]] = deque(maxlen=MAX_KEPT)

    def note(
        self,
        query: RouteQuery,
        decision: RouteDecision,
        decided_s: float,
        took_s: float,
        weighed: DecisionInputs | None,
    ) -> None:
        """A decision was made on a valid query."""
        super().note(query, decision, decided_s, took_s, weighed)
        self._unread.append((decided_s, query))

    def ended(self, endings: Sequence[RequestEnding]) -> None:
        """Requests ended."""
        super().ended(endings)
        self._unread_endings.extend(endings)

    def read(
        self, replicas: Mapping[str, MirroredReplica], now_s: float, with_replicas: bool
    ) -> Traffic:
        """The next of the traffic, which is dropped. ``O(MAX_READ + replicas)``."""
        lost = MAX_KEPT in (len(self._unread), len(self._unread_endings))
        queries = [
            (at_s, query._replace(client_request_id="")) for at_s, query in _taken(self._unread)
        ]
        endings = _taken(self._unread_endings)
        found = {n: (each.hello, each.summary) for n, each in replicas.items() if with_replicas}
        more = bool(self._unread or self._unread_endings)
        return Traffic(now_s, queries, endings, hash(frozenset(replicas)), found, more, lost)


def _taken(unread: deque[T]) -> list[T]:
    return [unread.popleft() for _ in range(min(MAX_READ, len(unread)))]
