"""Random faults of a running application, one after the other: some replicas always remain."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final

import ray
from ray import serve

from sluice.benchmarks.live import injuries
from sluice.benchmarks.live.soak.report import Injury
from sluice.deploy.app import REPLICA_DEPLOYMENTS, ROUTER_DEPLOYMENT

PAUSE_S: Final = (10.0, 20.0)
"""Shortest and longest time between the beginnings of two faults, seconds."""

_FROZEN_S = (2.0, 8.0)
_DRAINED_S = (3.0, 8.0)
_CONTROLLER_FROZEN_S = 5.0
_READY_S = 60.0
_LOOK_S = 0.5


class Chaos:
    """Draws and injects faults, each of which may take some seconds.

    Args:
        seed: of the random faults.
        app: name of the application.
        replicas: how many it has.
        routers: how many there are.
        clock: seconds from the load's start.
        stop: ends long faults early.
    """

    def __init__(
        self,
        seed: int,
        app: str,
        replicas: int,
        routers: int,
        clock: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        self.done: list[Injury] = []
        self._chance = random.Random(seed)
        self._app = app
        self._replicas = replicas
        self._routers = routers
        self._clock = clock
        self._stop = stop
        self._kinds: dict[str, Callable[[], tuple[str, float]]] = {
            "kill replica": self._kill_replica,
            "freeze replica": self._freeze_replica,
            "drain replica": self._drain_replica,
            "kill router": self._kill_router,
            "kill controller": self._kill_controller,
            "freeze controller": self._freeze_controller,
            "kill Serve's controller": self._kill_serve_controller,
            "scale": self._scale,
        }

    def pause_s(self) -> float:
        """Time until the next fault."""
        return self._chance.uniform(*PAUSE_S)

    def hurt(self) -> Injury | None:
        """Inject one fault, once the application has recovered from those before; ``None`` if
        recovery takes too long, or the target has just ended by itself."""
        if not self.wait_until_well():
            return None
        what = self._chance.choice(sorted(self._kinds))
        at_s = self._clock()
        try:
            target, seconds = self._kinds[what]()
        except (injuries.MissingError, ray.exceptions.RayError, ValueError):
            return None
        injury = Injury(at_s, what, target, seconds)
        self.done.append(injury)
        return injury

    def wait_until_well(self, seconds: float = _READY_S) -> bool:
        """Wait until the expected number of replicas run; ``False`` after a timeout."""
        deadline_s = self._clock() + seconds
        while not self._stop.is_set() and self._clock() < deadline_s:
            if self._is_well():
                return True
            self._stop.wait(_LOOK_S)
        return False

    def mend(self) -> None:
        """Undo lasting changes: the original number of replicas, none of them drained.

        Raises:
            TimeoutError: the changes could not be undone.
        """
        for _ in range(round(_READY_S / _LOOK_S)):
            try:
                injuries.scale(self._replicas, self._app)
                for replica_id in injuries.replica_ids(self._app):
                    injuries.drain(replica_id, False, self._app)
                return
            except (ray.exceptions.RayError, ValueError):  # a controller is not back yet
                self._stop.wait(_LOOK_S)
        raise TimeoutError("the controllers do not answer: no change was undone")

    def _is_well(self) -> bool:
        application = serve.status().applications.get(self._app)
        if application is None:
            return False
        running = {
            name: sum(count for state, count in each.replica_states.items() if state == "RUNNING")
            for name, each in application.deployments.items()
        }
        wanted = {
            REPLICA_DEPLOYMENTS["mixed"]: self._replicas,
            ROUTER_DEPLOYMENT: self._routers,
        }
        return all(running.get(name, 0) >= count for name, count in wanted.items())

    def _replica(self) -> str:
        return self._chance.choice(injuries.replica_ids(self._app))

    def _kill_replica(self) -> tuple[str, float]:
        replica_id = self._replica()
        injuries.replica(replica_id).kill()
        return replica_id, 0.0

    def _freeze_replica(self) -> tuple[str, float]:
        replica_id, seconds = self._replica(), self._chance.uniform(*_FROZEN_S)
        with injuries.replica(replica_id).frozen():
            self._stop.wait(seconds)
        return replica_id, seconds

    def _drain_replica(self) -> tuple[str, float]:
        replica_id, seconds = self._replica(), self._chance.uniform(*_DRAINED_S)
        injuries.drain(replica_id, True, self._app)
        try:
            self._stop.wait(seconds)
        finally:
            injuries.drain(replica_id, False, self._app)
        return replica_id, seconds

    def _kill_router(self) -> tuple[str, float]:
        router = self._chance.choice(injuries.routers(self._app))
        router.kill()
        return str(router.pid), 0.0

    def _kill_controller(self) -> tuple[str, float]:
        injuries.controller(self._app).kill()
        return "", 0.0

    def _freeze_controller(self) -> tuple[str, float]:
        with injuries.controller(self._app).frozen():
            self._stop.wait(_CONTROLLER_FROZEN_S)
        return "", _CONTROLLER_FROZEN_S

    def _kill_serve_controller(self) -> tuple[str, float]:
        injuries.serve_controller().kill()
        return "", 0.0

    def _scale(self) -> tuple[str, float]:
        """Add one replica, or remove it again."""
        running = len(injuries.replica_ids(self._app))
        number = self._replicas + (running <= self._replicas)
        injuries.scale(number, self._app)
        return f"to {number}", 0.0
