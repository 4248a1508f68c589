"""The latest decisions with their inputs, as the deciding actor keeps them for the observer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.placer import DecisionInputs
from sluice.scheduling.request.job import RouteDecision, RouteQuery

# How the latest requests ended, as their routers saw it, for the decision log.
#
# Routers send endings with their metrics
# (:meth:`sluice.controller.client.ControllerClient.ended`), so an ending needs no message of its
# own.

LIMIT = 1_024
"""Most endings kept. The log holds 256 decisions, and an ending arrives about a second late."""


class Endings:
    """The latest endings by request id. ``O(1)`` each, amortised.

    Args:
        limit: most endings.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._endings: dict[str, RequestEnding] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def note(self, endings: Iterable[RequestEnding]) -> None:
        """Requests ended. An ending that is reported twice counts once."""
        for ending in endings:
            self._endings.pop(ending.request_id, None)
            self._endings[ending.request_id] = ending
        over = len(self._endings) - self._limit
        for request_id in list(islice(self._endings, max(0, over))):
            del self._endings[request_id]

    def of(self, request_id: str) -> RequestEnding | None:
        """How a request ended; ``None`` if no router has reported it, or too long ago."""
        return self._endings.get(request_id)


DECISIONS: Final = 256
"""Decisions kept."""


class DecisionRecord(NamedTuple):
    """One decision.

    Attributes:
        query, decision: the question and its answer.
        decided_s: time of the decision, seconds on the deciding actor's clock. took_s: its
            duration.
        asked: number of queries of this request, this one included: a waiting request asks again.
        weighed: the inputs of the decision; ``None`` if no replica could be chosen.
        ending: how the request ended; ``None`` if no router has reported that.
    """

    query: RouteQuery
    decision: RouteDecision
    decided_s: float
    took_s: float
    asked: int
    weighed: DecisionInputs | None
    ending: RequestEnding | None = None


class LatestDecisions(NamedTuple):
    """The latest decisions as of ``now_s`` on the deciding actor's clock, the latest first: each a
    pickled :class:`DecisionRecord`. Pickled one by one, because decisions wait for it."""

    now_s: float
    pickled: list[bytes]


_Fields = tuple[RouteQuery, RouteDecision, float, float, int, DecisionInputs | None]
"""The fields of a :class:`DecisionRecord` without its ending."""


class RecentDecisions:
    """The last decisions, one per request: a request that asks again replaces its last decision.

    Adding a decision is ``O(1)``, amortised. Entries keep references to arrays with one number per
    replica, so memory is proportional to ``limit`` times the number of replicas.

    Args:
        limit: most decisions.
    """

    def __init__(self, limit: int = DECISIONS) -> None:
        self._limit = limit
        # The fields of entries by key, the latest last; up to twice the limit. Bare tuples and a
        # bare dict, because decisions wait for this.
        self._entries: dict[int, _Fields] = {}
        self._weighed: DecisionInputs | None = None
        self.endings = Endings()
        """How the requests ended."""

    def __len__(self) -> int:
        return min(self._limit, len(self._entries))

    def weigh(self, weighed: DecisionInputs) -> None:
        """Take the inputs of the current decision; :meth:`note` follows."""
        self._weighed = weighed

    def note(
        self, query: RouteQuery, decision: RouteDecision, decided_s: float, took_s: float
    ) -> None:
        """A decision was made on a valid query."""
        weighed, self._weighed = self._weighed, None
        # Keys are compared, because the query of the inputs may have an earlier plan than `query`.
        if weighed is not None and weighed.job.query.key != query.key:
            weighed = None  # left by a decision that failed halfway
        entries = self._entries
        earlier = entries.pop(query.key, None)
        asked = 1 if earlier is None else DecisionRecord(*earlier).asked + 1
        entries[query.key] = (query, decision, decided_s, took_s, asked, weighed)
        if len(entries) > 2 * self._limit:
            self._entries = dict(islice(entries.items(), len(entries) - self._limit, None))

    def latest(self, limit: int) -> Iterator[DecisionRecord]:
        """The last decisions, the latest first. Decisions made during the iteration are not
        included."""
        for entry in list(islice(self._kept(), limit)):
            yield entry._replace(ending=self.endings.of(entry.query.request_id))

    def took_s(self) -> list[float]:
        """How long these decisions took, seconds."""
        return [entry.took_s for entry in self._kept()]

    def _kept(self) -> Iterator[DecisionRecord]:
        """The latest first."""
        entries = islice(reversed(self._entries.values()), self._limit)
        return (DecisionRecord(*entry) for entry in entries)
