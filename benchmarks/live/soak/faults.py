"""Random faults of a running application, one after the other: its processes are killed or frozen.

A frozen process (SIGSTOP) is alive and does nothing: its connections stay open and no peer gets an
error. To its peers, a hung driver, a paused virtual machine and a lost network look the same.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Final, NamedTuple

import psutil

from sluice.benchmarks.live.resources import processes
from sluice.deploy.config import SluiceConfig

PAUSE_S: Final = (10.0, 20.0)
"""Shortest and longest time between the beginnings of two faults, seconds."""

FROZEN_S: Final = (2.0, 8.0)
"""How long a process is frozen, seconds."""

KILL_ROUTER: Final = ("kill", "routers")
FAULTS: Final = (
    KILL_ROUTER,
    *(("kill", "replicas"), ("kill", "controller"), ("kill", "Serve controller")),
    *(("freeze", "replicas"), ("freeze", "controller")),
)
"""What happens to one process of a kind, see :mod:`sluice.benchmarks.live.resources`."""

_CALM_S = 15.0  # without faults at the beginning and at the end; less in a short run
_READY_S = 60.0
_LOOK_S = 0.5


class Fault(NamedTuple):
    """An injected fault: time from the load's start, kind, and duration, seconds."""

    at_s: float
    what: tuple[str, str]
    seconds: float = 0.0


class Chaos:
    """Draws and injects faults by ``seed`` until ``stop`` is set; ``done`` has those so far."""

    def __init__(self, seed: int, config: SluiceConfig, stop: threading.Event) -> None:
        self.done: list[Fault] = []
        self._chance = random.Random(seed)
        self._config = config
        self._stop = stop

    async def run(self, seconds: float) -> None:
        """Inject faults during a load that lasts for ``seconds`` from now, each once the
        application has recovered from the one before."""
        started_s = time.monotonic()
        calm_s = min(_CALM_S, seconds / 6)
        await asyncio.sleep(calm_s)
        while (begun_s := time.monotonic()) - started_s < seconds - calm_s:
            if await asyncio.to_thread(self.wait_until_well):
                await asyncio.to_thread(self._inject, started_s)
            pause_s = self._chance.uniform(*PAUSE_S)
            await asyncio.sleep(max(0.0, begun_s + pause_s - time.monotonic()))

    def wait_until_well(self) -> bool:
        """Wait until the expected number of replicas and routers run; ``False`` after a timeout."""
        # They import Ray, which reads its environment then.
        from ray import serve

        from sluice.deploy.app import REPLICA_DEPLOYMENTS, ROUTER_DEPLOYMENT

        wanted = {
            REPLICA_DEPLOYMENTS["mixed"]: self._config.replica.first,
            ROUTER_DEPLOYMENT: self._config.router.replicas,
        }
        deadline_s = time.monotonic() + _READY_S
        while not self._stop.is_set() and time.monotonic() < deadline_s:
            application = serve.status().applications.get(self._config.name)
            found = {} if application is None else application.deployments
            running = {name: each.replica_states.get("RUNNING", 0) for name, each in found.items()}
            if all(running.get(name, 0) >= count for name, count in wanted.items()):
                return True
            self._stop.wait(_LOOK_S)
        return False

    def _inject(self, started_s: float) -> None:
        what, at_s = self._chance.choice(FAULTS), time.monotonic() - started_s
        pids = [pid for pid, each in processes().items() if each.kind == what[1]]
        try:
            process = psutil.Process(self._chance.choice(pids))
            if what[0] == "kill":
                process.kill()
                self.done.append(Fault(round(at_s, 1), what))
                return
            seconds = self._chance.uniform(*FROZEN_S)
            process.suspend()
            try:
                self._stop.wait(seconds)
            finally:
                process.resume()
            self.done.append(Fault(round(at_s, 1), what, round(seconds, 1)))
        except (psutil.NoSuchProcess, IndexError):
            return  # it has just ended by itself
