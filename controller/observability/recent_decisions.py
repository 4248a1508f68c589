"""The latest decisions with their inputs, as the deciding actor keeps them for the observer."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.placer import DecisionInputs
from sluice.scheduling.request.job import (
    DECLINED,
    INVALID_QUERY,
    NO_REPLICA,
    PLACED,
    STAYS,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
)
from sluice.scheduling.roles import ROLES, Role

# Counts of the deciding actor's operations, as plain numbers.

DECISION_BUCKETS_S: Final = (
    *(0.00001, 0.00003, 0.0001, 0.0003),
    *(0.001, 0.002, 0.005, 0.01, 0.05),
)
"""Upper bounds of the buckets of decision times, seconds; one more bucket has no bound."""

_OUTCOMES = (PLACED, UNATTAINABLE, DECLINED, STAYS, NO_REPLICA, INVALID_QUERY)
_REPORTS = ("hello", "applied", "resync", "refused")


class Counts(NamedTuple):
    """Counts since the start. ``buckets``: decisions by duration, one for each of
    ``DECISION_BUCKETS_S`` and one for longer ones, not cumulative; ``seconds``: duration of all
    decisions together; ``pairs``: requests placed on a P/D pair."""

    decisions: Mapping[str, int]
    reports: Mapping[str, int]
    buckets: tuple[int, ...]
    seconds: float
    pairs: int
    role_changes: Mapping[Role, int]


class Counters:
    """Counts operations. ``O(1)`` and less than a microsecond each: decisions wait for it."""

    def __init__(self) -> None:
        self._decisions = dict.fromkeys(_OUTCOMES, 0)
        self._reports = dict.fromkeys(_REPORTS, 0)
        self._buckets = [0] * (len(DECISION_BUCKETS_S) + 1)
        self._seconds = 0.0
        self._pairs = 0
        self._role_changes = dict.fromkeys(ROLES, 0)

    def decided(self, decision: RouteDecision, seconds: float) -> None:
        """One decision was made in ``seconds``."""
        self._decisions[decision.reason] += 1
        self._buckets[bisect_left(DECISION_BUCKETS_S, seconds)] += 1
        self._seconds += seconds
        self._pairs += decision.prefill_id is not None

    def changed(self, role: Role) -> None:
        """A replica was given another role, this one."""
        self._role_changes[role] += 1

    def reported(self, outcome: str) -> None:
        """One message of a replica was ``hello``, ``applied`` or ``resync``."""
        self._reports[outcome] += 1

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Count the messages that the body refuses with ``ValueError``."""
        try:
            yield
        except ValueError:
            self._reports["refused"] += 1
            raise

    def read(self) -> Counts:
        """A copy of the counts."""
        return Counts(
            dict(self._decisions),
            dict(self._reports),
            tuple(self._buckets),
            self._seconds,
            self._pairs,
            dict(self._role_changes),
        )


# How the latest requests ended, as their routers saw it, for the decision log.
#
# Routers send endings with their metrics
# (:meth:`sluice.controller.client.ControllerClient.ended`), so an ending needs no message of its
# own.

MAX_ENDED: Final = 1_024
"""Most endings kept. The log holds 256 decisions, and an ending arrives about a second late."""


DECISIONS: Final = 256
"""Decisions kept."""


class DecisionRecord(NamedTuple):
    """One decision. ``decided_s`` is on the deciding actor's clock; ``asked`` counts the queries
    of this request, as a waiting one asks again; ``weighed`` is ``None`` if no replica could be
    chosen, ``ending`` if no router has reported one."""

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
    """The last decision of each of the latest ``DECISIONS`` requests, and how the latest ones
    ended. Adding is ``O(1)``, amortised. Entries keep arrays with one number per replica."""

    def __init__(self) -> None:
        # The fields of entries by key, the latest last; up to twice the limit. Bare tuples and a
        # bare dict, because decisions wait for this.
        self._entries: dict[int, _Fields] = {}
        self._endings: dict[str, RequestEnding] = {}

    def __len__(self) -> int:
        return min(DECISIONS, len(self._entries))

    def note(
        self,
        query: RouteQuery,
        decision: RouteDecision,
        decided_s: float,
        took_s: float,
        weighed: DecisionInputs | None,
    ) -> None:
        """A decision was made on a valid query."""
        entries = self._entries
        earlier = entries.pop(query.key, None)
        asked = 1 if earlier is None else DecisionRecord(*earlier).asked + 1
        entries[query.key] = (query, decision, decided_s, took_s, asked, weighed)
        if len(entries) > 2 * DECISIONS:
            self._entries = dict(islice(entries.items(), len(entries) - DECISIONS, None))

    def ended(self, endings: Sequence[RequestEnding]) -> None:
        """Requests ended. An ending that is reported twice counts once."""
        for ending in endings:
            self._endings.pop(ending.request_id, None)
            self._endings[ending.request_id] = ending
        for request_id in list(islice(self._endings, max(0, len(self._endings) - MAX_ENDED))):
            del self._endings[request_id]

    def latest(self, limit: int) -> Iterator[DecisionRecord]:
        """The last decisions, the latest first. Decisions made during the iteration are not
        included."""
        for entry in list(islice(self._kept(), limit)):
            yield entry._replace(ending=self._endings.get(entry.query.request_id))

    def took_s(self) -> list[float]:
        """How long these decisions took, seconds."""
        return [entry.took_s for entry in self._kept()]

    def _kept(self) -> Iterator[DecisionRecord]:
        """The latest first."""
        entries = islice(reversed(self._entries.values()), DECISIONS)
        return (DecisionRecord(*entry) for entry in entries)


UNKNOWN_CLASS = ""
"""Class of a request that this controller did not place, but Serve or the controller before a
restart."""

MAX_CLASSIFIED = 100_000
"""Most requests remembered; of more, the oldest tenth is forgotten."""


class RequestClasses:
    """Remembers classes of requests from decision to end. ``O(1)`` each, amortised."""

    def __init__(self) -> None:
        self._classes: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def note(self, key: int, service_class: str) -> None:
        """A request was placed."""
        self._classes[key] = service_class
        if len(self._classes) > MAX_CLASSIFIED:
            # Many at once: removing the oldest entry of a dict one at a time is quadratic.
            self.ended(list(islice(self._classes, max(1, MAX_CLASSIFIED // 10))))

    def ended(self, keys: Iterable[int]) -> None:
        """Requests ended; unknown ones are ignored."""
        for key in keys:
            self._classes.pop(key, None)

    def of(self, keys: Iterable[int]) -> list[str]:
        """The class of each request, or :data:`UNKNOWN_CLASS`."""
        get = self._classes.get
        return [get(key, UNKNOWN_CLASS) for key in keys]
