"""Counts of the deciding actor's operations, as plain numbers."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from sluice.scheduling.request.job import (
    DECLINED,
    INVALID_QUERY,
    NO_REPLICA,
    PLACED,
    STAYS,
    UNATTAINABLE,
)
from sluice.scheduling.roles import ROLES, Role

DECISION_BUCKETS_S: Final = (
    *(0.00001, 0.00003, 0.0001, 0.0003),
    *(0.001, 0.002, 0.005, 0.01, 0.05),
)
"""Upper bounds of the buckets of decision times, seconds; one more bucket has no bound."""

_OUTCOMES = (PLACED, UNATTAINABLE, DECLINED, STAYS, NO_REPLICA, INVALID_QUERY)
_REPORTS = ("hello", "applied", "resync", "refused")


class Counts(NamedTuple):
    """Counts since the start.

    Attributes:
        decisions: by outcome.
        reports: messages of replicas by what became of them.
        buckets: decisions by duration, one count for each of :data:`DECISION_BUCKETS_S` and one for
            longer ones; not cumulative.
        seconds: duration of all decisions together.
        pairs: requests that were placed on a P/D pair.
        role_changes: replicas that changed their role, by the new one.
    """

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

    def decided(self, outcome: str, seconds: float) -> None:
        """One decision was made in ``seconds``."""
        self._decisions[outcome] += 1
        self._buckets[bisect_left(DECISION_BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def paired(self) -> None:
        """A decision placed a request on two replicas."""
        self._pairs += 1

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
