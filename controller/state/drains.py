"""The operators' drain settings: which replicas are drained, and which were reopened.

A replica remembers its last setting and sends it in its hello, which counts only if this
controller has none for it: a replica that was reopened while unreachable stays open. The replica
gets a setting with the answer to its next report; ``Drains.remembered`` says whether it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from sluice.controller.state.mirror import Mirror
from sluice.protocol.messages import ReplicaHello
from sluice.scheduling.autoscaling import Demand
from sluice.scheduling.autoscaling.role_shares import (
    LOOK_EVERY_S,
    Means,
    RoleShares,
    members_of,
)
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.roles import Role

# The roles of replicas that may change them while they run.
#
# While a controller runs, its own settings are authoritative, as with drains
# (:mod:`sluice.controller.state.drains`): a replica follows the role in each answer to its
# reports, and carries it in its hello to a restarted controller. Decisions use a new role at once;
# the replica finishes its requests of the old one.

logger = logging.getLogger(__name__)


class Roles:
    """The roles by replica, and when they change; ``changed`` gets the new role at each change."""

    def __init__(
        self,
        mirror: Mirror,
        fleet: Fleet,
        demand: Demand,
        changed: Callable[[Role], None],
    ) -> None:
        self._changed = changed
        self._mirror = mirror
        self._fleet = fleet
        self._demand = demand
        self._policy = RoleShares()
        self._words: dict[str, Role] = {}
        self._means: Means | None = None
        self._look_s = -inf

    def of(self, replica_id: str) -> Role | None:
        """The role that a replica should have; ``None`` for one whose role is fixed."""
        return self._words.get(replica_id)

    def greet(self, hello: ReplicaHello) -> None:
        """A replica has registered. Its own memory of its role counts if there is no setting."""
        if not hello.elastic:
            self.forget(hello.replica_id)
        elif (role := self._words.setdefault(hello.replica_id, hello.role)) != hello.role:
            self._mirror.assign(hello.replica_id, role)

    def forget(self, replica_id: str) -> None:
        """A replica has ended, or has been silent for long."""
        self._words.pop(replica_id, None)

    def advance(self, now_s: float) -> None:
        """Change roles if it is time to. ``O(n log n)`` with ``n`` replicas, every
        :data:`LOOK_EVERY_S <sluice.scheduling.autoscaling.role_shares.LOOK_EVERY_S>`."""
        if now_s < self._look_s or not self._words:
            return
        self._look_s = now_s + LOOK_EVERY_S
        members = [
            each for each in members_of(self._fleet, now_s) if each.replica_id in self._words
        ]
        load = self._demand.load(self._fleet, now_s)
        change = self._policy.decide(load, members, self._means)
        self._means = change.means
        for replica_id, role in change.roles.items():
            before, self._words[replica_id] = self._words[replica_id], role
            self._mirror.assign(replica_id, role)
            self._changed(role)
            logger.info("replica %s: %s -> %s, %s", replica_id, before, role, change.reason)


OPERATOR = "operator"
REPLICA = "replica"
"""What drains a replica: an operator's request, or the replica's own shutdown."""

KEPT_S = 3600.0
"""Seconds that a silent replica's setting outlives its place in the mirror. Most never return;
for one that returns later, its own memory counts."""

MAX_SILENT = 1024
"""Most silent replicas whose setting is kept; of more, the one silent for longest is forgotten.
Every answer to a router lists the closed replicas among them."""

_HEARD: Final = 2
"""Answers after which the first of them has arrived: reports come one after the other."""


class Drains:
    """The drain settings by replica; drained ones are closed in ``fleet``. ``O(1)``, amortised."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._words: dict[str, bool] = {}
        self._answers: dict[str, int] = {}
        self._silent_since_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._words)

    def drain(self, replica_id: str) -> None:
        """Close a replica to new requests."""
        self._fleet.close(replica_id)
        self._set(replica_id, True)

    def take_back(self, replica_id: str) -> bool:
        """Open a replica again. Returns whether it was drained."""
        drained = self._fleet.reopen(replica_id)
        if drained:
            self._set(replica_id, False)
        return drained

    def _set(self, replica_id: str, word: bool) -> None:
        if self._words.get(replica_id) is not word:
            self._words[replica_id], self._answers[replica_id] = word, 0

    def answered(self, replica_id: str) -> None:
        """A report of a replica was answered with its setting."""
        if replica_id in self._answers:
            self._answers[replica_id] += 1

    def remembered(self, replica_id: str) -> bool:
        """Whether the replica surely remembers its setting: it has reported again since an answer
        brought it."""
        return self._answers.get(replica_id, _HEARD) >= _HEARD

    def greet(self, replica_id: str, closed: bool) -> None:
        """A replica registered; ``closed`` is the setting that it remembers."""
        self._silent_since_s.pop(replica_id, None)
        if closed and replica_id not in self._words:
            self.drain(replica_id)
        if replica_id in self._words:
            # After a lost answer a replica greets again, and says what it remembers.
            self._answers[replica_id] = _HEARD if self._words[replica_id] is closed else 1

    def silent(self, replica_ids: Iterable[str], now_s: float) -> None:
        """The mirror has forgotten these replicas. Drops the settings of those silent for long."""
        since_s = self._silent_since_s
        since_s.update({each: now_s for each in replica_ids if each in self._words})
        while since_s:
            oldest = next(iter(since_s))
            if now_s - since_s[oldest] < KEPT_S and len(since_s) <= MAX_SILENT:
                return
            self.forget(oldest)

    def forget(self, replica_id: str) -> None:
        """A replica has ended."""
        self._words.pop(replica_id, None)
        self._answers.pop(replica_id, None)
        self._silent_since_s.pop(replica_id, None)
        self._fleet.reopen(replica_id)


def drain_of(mirror: Mirror, fleet: Fleet, replica_id: str) -> str | None:
    """What drains a known replica: :data:`OPERATOR`, :data:`REPLICA`, or ``None``."""
    if replica_id in fleet.closed:
        return OPERATOR
    return REPLICA if mirror.replicas[replica_id].draining else None


def leaving(mirror: Mirror, fleet: Fleet) -> tuple[str, ...]:
    """The known replicas that are drained, whoever drains them. ``O(replicas)``."""
    return tuple(each for each in mirror.replicas if drain_of(mirror, fleet, each) is not None)


def left_at(fleet: Fleet, replica_id: str) -> dict[str, int]:
    """Requests that a replica has yet to finish; 0 for an unknown replica."""
    row = fleet.row_of.get(replica_id)
    waiting = running = reserved = 0
    if row is not None:
        figures = fleet.figures[row]
        waiting, running = int(figures[figure.WAITING]), int(figures[figure.RUNNING])
        reserved = int(figures[figure.RESERVED])
    return {
        "left": waiting + running + reserved,
        "waiting": waiting,
        "running": running,
        "reserved": reserved,
    }
