"""The replicas of a simulated cluster: which there are, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np

from sluice.scheduling.roles import Role
from sluice.simulation.cells import CellMirrors
from sluice.simulation.config import ClusterConfig, Failure, Resize, Slowdown
from sluice.simulation.engine import VirtualEngine
from sluice.simulation.events import Events
from sluice.simulation.mirror import VirtualMirror
from sluice.simulation.replica import VirtualReplica

Incident = Failure | Resize | Slowdown
"""What happens to replicas in a run."""


class Replicas:
    """Starts the replicas of ``config``, and later what incidents and autoscaling add.

    Args:
        config: how many there are at first.
        make_engine: a new engine for a role and a replica's number in order of start.
        events: the clock.
        mirror: where they report.
        rng: source of lost reports.
        finished: see :class:`~sluice.simulation.replica.VirtualReplica`.
        noticed: called when the router notices that a replica failed, with what it held.
    """

    def __init__(
        self,
        config: ClusterConfig,
        make_engine: Callable[[Role, int], VirtualEngine],
        events: Events,
        mirror: VirtualMirror | CellMirrors,
        rng: np.random.Generator,
        finished: Callable[[VirtualReplica, list[int]], None],
        noticed: Callable[[VirtualReplica, list[int]], None],
    ) -> None:
        self.started: list[VirtualReplica] = []
        """Every replica that there was, in order of start."""
        self.named: dict[str, VirtualReplica] = {}
        """The same by name."""
        self.roles = tuple(role for role, count in config.counts.items() if count)
        """Those of ``config``."""
        self._config = config
        self._make_engine = make_engine
        self._events = events
        self._mirror = mirror
        self._rng = rng
        self._finished = finished
        self._noticed = noticed
        for role in self.roles:
            self._grow(role, config.counts[role])

    def change(self, role: Role, change: int) -> None:
        """Add ``change`` replicas of a role; if negative, the youngest leave."""
        if change >= 0:
            self._grow(role, change)
            return
        serving = [r for r in self.started if r.role == role and r.alive and not r.draining]
        for replica in serving[change:]:
            replica.drain()

    def happening(self, incident: Incident) -> Callable[[], None]:
        """What to do when ``incident`` happens.

        Raises:
            ValueError: it names a role that the cluster has not, or a factor that is not positive.
        """
        match incident:
            case Failure():
                return partial(self._fail, incident)
            case Slowdown():
                if not 0 < incident.factor < inf:
                    words = f"a slowdown's factor must be positive, got {incident.factor}"
                    raise ValueError(words)
                return partial(self._slow_down, incident)
            case Resize():
                if incident.role not in self.roles:
                    known = ", ".join(self.roles)
                    words = f"no replica has the role {incident.role!r}; there are: {known}"
                    raise ValueError(words)
                return partial(self.change, incident.role, incident.change)

    def _grow(self, role: Role, count: int) -> None:
        for _ in range(count):
            name = f"{role}-{len(self.started)}"
            replica = VirtualReplica(
                name,
                role,
                self._make_engine(role, len(self.started)),
                self._events,
                self._mirror,
                self._config,
                self._rng,
                self._finished,
            )
            self.started.append(replica)
            self.named[name] = replica

    def _alive(self, number: int) -> VirtualReplica | None:
        """The replica with a number, if it is there."""
        known = 0 <= number < len(self.started)
        return self.started[number] if known and self.started[number].alive else None

    def _slow_down(self, slowdown: Slowdown) -> None:
        replica = self._alive(slowdown.replica)
        if replica is not None:
            replica.engine.slowness = slowdown.factor

    def _fail(self, failure: Failure) -> None:
        replica = self._alive(failure.replica)
        if replica is None:
            return
        keys = replica.fail()
        self._events.after(self._config.detect_s, partial(self._noticed, replica, keys))
        if failure.down_s is not None:
            self._events.after(failure.down_s, partial(self._grow, replica.role, 1))
