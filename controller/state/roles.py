"""The roles of replicas that may change them while they run.

While a controller runs, its own settings are authoritative, as with drains
(:mod:`sluice.controller.state.drains`): a replica follows the role in each answer to its reports,
and carries it in its hello to a restarted controller. Decisions use a new role at once; the replica
finishes its requests of the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from sluice.controller.state.mirror import Mirror
from sluice.protocol.messages import ReplicaHello
from sluice.scheduling.autoscaling import Demand
from sluice.scheduling.autoscaling.role_shares import (
    LOOK_EVERY_S,
    Means,
    RoleShares,
    members_of,
)
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.roles import Role

logger = logging.getLogger(__name__)


class Roles:
    """The roles by replica, and when they change.

    Args:
        mirror, fleet: of the replicas; they get the roles.
        demand: counts the load.
        changed: called with the new role at each change.
    """

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
