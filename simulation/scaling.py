"""Sizes one role's replicas, and changes roles, while a simulated cluster runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sluice.scheduling.autoscaling import Load, Pool, State
from sluice.scheduling.autoscaling.role_shares import (
    LOOK_EVERY_S,
    Means,
    members_of,
    split_of,
)
from sluice.scheduling.roles import ROLES, Role
from sluice.simulation.config import Autoscaling, ElasticRoles
from sluice.simulation.mirror import VirtualMirror
from sluice.simulation.replica import Events, VirtualReplica
from sluice.simulation.run import Size


class Scaler:
    """Samples a role's load every ``interval_s`` and applies its policy's decision.

    A replica that is ordered serves ``startup_s`` later. To scale down, orders that do not serve
    yet are cancelled first, the latest first; then replicas drain.

    Args:
        config: policy, bounds and times.
        role: role of the replicas.
        events: the clock.
        load: returns their load at a time.
        change: adds this many replicas that serve at once; a negative number leave.
        replicas: number of replicas at the start; they serve.
    """

    def __init__(
        self,
        config: Autoscaling,
        role: Role,
        events: Events,
        load: Callable[[float], Load],
        change: Callable[[int], None],
        replicas: int,
    ) -> None:
        self.role = role
        self.sizes = [Size(events.now_s, replicas, "at the start")]
        """The wanted numbers of replicas, with the times from which they are wanted."""
        self._config = config
        self._policy = config.make(role)
        self._events = events
        self._load = load
        self._change = change
        self._state: State = {}
        # Orders that do not serve yet, by number: when they were made.
        self._ordered: dict[int, float] = {}
        self._orders = 0
        self._started_s = 0.0
        events.after(config.interval_s, self._look)

    @property
    def target(self) -> int:
        """How many replicas there should be."""
        return self.sizes[-1].replicas

    def started_s(self, end_s: float) -> float:
        """Sum until ``end_s`` of the times for which orders did not serve yet."""
        return self._started_s + sum(end_s - at_s for at_s in self._ordered.values())

    def _look(self) -> None:
        config, now_s = self._config, self._events.now_s
        pool = Pool(self.target, config.least, config.most)
        decision = self._policy.decide(self._load(now_s), pool, self._state)
        self._state = decision.state
        change = decision.replicas - self.target
        if change:
            self.sizes.append(Size(now_s, decision.replicas, decision.reason))
        for _ in range(change):
            self._order()
        for _ in range(-change):
            self._give_up()
        self._events.after(config.interval_s, self._look)

    def _order(self) -> None:
        number, self._orders = self._orders, self._orders + 1
        self._ordered[number] = self._events.now_s
        self._events.after(self._config.startup_s, lambda: self._ready(number))

    def _ready(self, number: int) -> None:
        if number in self._ordered:
            self._end_order(number)
            self._change(1)

    def _give_up(self) -> None:
        if self._ordered:
            self._end_order(max(self._ordered))
        else:
            self._change(-1)

    def _end_order(self, number: int) -> None:
        self._started_s += self._events.now_s - self._ordered.pop(number)


class RoleChanger:
    """Looks at the load of all replicas and changes roles, as the controller does
    (:mod:`sluice.controller.state.roles`).

    Args:
        config: the policies.
        events: the clock.
        mirror: of the replicas.
        replicas: by name; more may come.
    """

    def __init__(
        self,
        config: ElasticRoles,
        events: Events,
        mirror: VirtualMirror,
        replicas: Mapping[str, VirtualReplica],
    ) -> None:
        self.sizes: dict[str, list[Size]] = {role: [] for role in ROLES}
        """The number of replicas of each role, with the times from which they had it."""
        self._config = config
        self._events = events
        self._mirror = mirror
        self._replicas = replicas
        self._means: Means | None = None
        events.after(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now_s, fleet = self._events.now_s, self._mirror.fleet
        load = self._mirror.load_of_all(now_s)
        change = self._config.shares.decide(load, members_of(fleet, now_s), self._means)
        self._means = change.means
        for name, role in change.roles.items():
            self._mirror.assign(name, role)
            self._replicas[name].follow(role, self._config.make_batch(role))
        for role, count in zip(ROLES, split_of(members_of(fleet, now_s)), strict=True):
            sizes = self.sizes[role]
            if not sizes or sizes[-1].replicas != count:
                sizes.append(Size(now_s, count, change.reason))
        self._events.after(LOOK_EVERY_S, self._look)
