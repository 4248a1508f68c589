"""Decisions of a real controller actor, while a process reports."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import ray

from sluice.benchmarks.live.report import OWN, Meter
from sluice.benchmarks.micro.decision_fleet import Figures, FleetMessages, figures
from sluice.controller.client import ControllerClient, ensure_controller, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.deploy.ray_start import start_ray
from sluice.protocol.messages import RouteReply
from sluice.scheduling.request.job import RouteDecision, RouteQuery

REPORTS_PER_S, QUERIES_PER_S = 50, 200
"""Of each replica, and of one caller at a steady rate."""

CALLERS, AT_ONCE = 256, 64
"""Concurrent callers, and replicas per report: one process with all messages would be late."""

Ask = Callable[[RouteQuery], Awaitable[RouteDecision | None]]

_TIMEOUT_S = 30.0


class Replicas:
    """A process that reports for all replicas; a Ray actor."""

    def __init__(self, app_name: str, config: ControllerConfig, replicas: int) -> None:
        self._client = ControllerClient(app_name, config, _TIMEOUT_S)
        self._messages = FleetMessages(replicas)
        self._epochs: list[int | None] = [None] * replicas
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._answered = 0

    async def hello(self) -> None:
        """Register all; raises :class:`RuntimeError` if the controller does not answer."""
        give_up_s = time.monotonic() + _TIMEOUT_S
        for index in range(self._messages.replicas):
            while (reply := await self._client.hello(self._messages.hello(index))) is None:
                if time.monotonic() > give_up_s:
                    raise RuntimeError("the controller did not answer a hello")
                await asyncio.sleep(0.1)
            self._epochs[index] = reply.epoch

    async def report(self, seconds: float) -> float:
        """Report for all, :data:`REPORTS_PER_S` times a second each; reports answered a second."""
        self._answered = 0
        end_s = time.monotonic() + seconds
        await asyncio.gather(
            *(self._report_for(index, end_s) for index in range(self._messages.replicas))
        )
        return self._answered / seconds

    async def _report_for(self, index: int, end_s: float) -> None:
        epoch = self._epochs[index]
        due_s = time.monotonic() + random.random() / REPORTS_PER_S
        while due_s < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            async with self._turns:
                if epoch is None:
                    reply = await self._client.hello(self._messages.hello(index))
                else:
                    reply = await self._client.report(self._messages.delta(index, epoch))
            self._epochs[index] = epoch = None if reply is None or reply.resync else reply.epoch
            self._answered += epoch is not None
            due_s = max(due_s + 1 / REPORTS_PER_S, time.monotonic())


class Session:
    """One controller with its fleet, and a client that queries it, until it is closed."""

    def __init__(self, label: str, config: ControllerConfig, replicas: int) -> None:
        # No replica confirms a decision here, so each counts only until a report could arrive.
        config = config.model_copy(update={"reservation_ttl_s": 0.25})
        self._app_name = f"benchmark-{label.replace('_', '-')}"
        self._client = ControllerClient(self._app_name, config, _TIMEOUT_S)
        self._actor = ensure_controller(self._app_name, config)
        self._messages = FleetMessages(replicas)
        fleet = self._app_name, config, replicas
        self._replicas = ray.remote(Replicas).options(num_cpus=0).remote(*fleet)
        self._key = 1 << 50

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Figures of callers, each for ``seconds``. ``batched``: :data:`CALLERS` that send the next
        query at once; ``actor_calls``: by actor calls in place of the connection."""
        await self._replicas.hello.remote()
        # The first queries are sent as actor calls, until the connection is open.
        await self._ask(1, 0.5, QUERIES_PER_S)
        found: dict[str, Any] = {"alone": await self._ask(1, seconds, QUERIES_PER_S)}
        found["actor_calls"] = await self._ask(1, seconds, QUERIES_PER_S, self._call)
        batched = CALLERS, inf
        modes = {"batched": batched, "with_reports": (1, QUERIES_PER_S), "both": batched}
        for name, (callers, per_s) in modes.items():
            reporting = name != "batched" and self._replicas.report.remote(seconds)
            meter = Meter()
            answers = await self._ask(callers, seconds, per_s)
            used = meter.stop().kinds
            own = {"cores": used["controller"].cores, "caller_cores": used[OWN].cores}
            found[name] = {
                **answers,
                **own,
                "reports_per_s": round(await reporting) if reporting else 0,
            }
        return {**found, "memory_mib": round(used["controller"].memory_mib)}

    async def aclose(self) -> None:
        """End its processes."""
        await self._client.close()
        ray.kill(self._replicas)
        await asyncio.to_thread(stop_controller, self._app_name)

    async def _call(self, query: RouteQuery) -> RouteDecision | None:
        reply: RouteReply = await self._actor.route.remote([query])
        return reply.decisions[0]

    async def _ask(
        self, callers: int, seconds: float, per_s: float = inf, ask: Ask | None = None
    ) -> Figures:
        """Figures of ``callers`` that each query ``per_s`` times a second, or without a pause."""
        ask = ask or self._client.route
        times_ns: list[int] = []
        begun_s = time.monotonic()

        async def caller() -> None:
            due_s = begun_s
            while due_s < begun_s + seconds:
                self._key += 1
                query = self._messages.query(self._key)
                started = time.perf_counter_ns()
                decision = await ask(query)
                times_ns.append(time.perf_counter_ns() - started)
                if decision is None or decision.replica_id is None:
                    raise RuntimeError(f"no replica was chosen: {decision}")
                due_s = max(due_s + 1 / per_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())

        await asyncio.gather(*(caller() for _ in range(callers)))
        return figures(times_ns, time.monotonic() - begun_s)


@contextmanager
def own_ray() -> Iterator[None]:
    """A Ray instance on this machine until the block ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        start_ray(Path(folder), num_cpus=8, object_store_memory=80 << 20)
        try:
            yield
        finally:
            ray.shutdown()
