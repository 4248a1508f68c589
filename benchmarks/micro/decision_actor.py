"""Decisions of a real controller actor, queried over its connection, while another process reports
for the fleet."""

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

from sluice.benchmarks.live.resources import Meter
from sluice.benchmarks.micro.decision_fleet import Figures, Voices, figures
from sluice.controller.client import ControllerClient, ensure_controller, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.controller.messages import RouteDecision, RouteQuery, RouteReply
from sluice.deploy.ray_start import start_ray

REPORTS_PER_S = 50
"""Of each replica."""

QUERIES_PER_S = 200
"""Of one caller at a steady rate."""

CALLERS = 256
"""Concurrent callers, whose queries are batched."""

Ask = Callable[[RouteQuery], Awaitable[RouteDecision | None]]

_TIMEOUT_S = 30.0
_WARM_UP_S = 0.5
_RETRY_S = 0.1
_RESERVED_S = 0.25


class Replicas:
    """A process that reports for all replicas; a Ray actor."""

    def __init__(self, app_name: str, config: ControllerConfig, replicas: int) -> None:
        self._client = ControllerClient(app_name, config, _TIMEOUT_S)
        self._voices = Voices(replicas)
        self._answered = 0

    async def hello(self) -> None:
        """Register all.

        Raises:
            RuntimeError: the controller does not answer.
        """
        give_up_s = time.monotonic() + _TIMEOUT_S
        for index in range(self._voices.replicas):
            while await self._client.hello(self._voices.hello(index)) is None:
                if time.monotonic() > give_up_s:
                    raise RuntimeError("the controller did not answer a hello")
                await asyncio.sleep(_RETRY_S)

    async def report(self, seconds: float) -> float:
        """Report for all, :data:`REPORTS_PER_S` times a second each; reports answered a second.

        As in production, a replica whose report is not answered yet reports later, and a replica
        whose report is lost registers again.
        """
        self._answered = 0
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._speak(index, end_s) for index in range(self._voices.replicas)))
        return self._answered / seconds

    async def _speak(self, index: int, end_s: float) -> None:
        epoch: int | None = None
        due_s = time.monotonic() + random.random() / REPORTS_PER_S
        while due_s < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            if epoch is None:
                reply = await self._client.hello(self._voices.hello(index))
            else:
                reply = await self._client.report(self._voices.delta(index, epoch))
            epoch = None if reply is None or reply.resync else reply.epoch
            self._answered += epoch is not None
            due_s = max(due_s + 1 / REPORTS_PER_S, time.monotonic())


class Session:
    """One controller with its fleet, and a client that queries it, until it is closed."""

    def __init__(self, label: str, config: ControllerConfig, replicas: int) -> None:
        # No replica confirms a decision here, so each counts only until a report could arrive.
        config = config.model_copy(update={"reservation_ttl_s": _RESERVED_S})
        self._app_name = f"benchmark-{label.replace('_', '-')}"
        self._client = ControllerClient(self._app_name, config, _TIMEOUT_S)
        self._actor = ensure_controller(self._app_name, config)
        self._voices = Voices(replicas)
        fleet = self._app_name, config, replicas
        self._replicas = ray.remote(Replicas).options(num_cpus=0).remote(*fleet)
        self._key = 1 << 50

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Figures of callers, each measured for ``seconds``.

        ``alone``: one caller, :data:`QUERIES_PER_S`, no reports. ``with_reports``: the same while
        all replicas report. ``batched``: :data:`CALLERS` that send the next query at once, no
        reports. ``actor_calls``: as ``alone``, by actor calls in place of the connection.
        ``reports_per_s``: reports that the controller answered. ``cores``, ``memory_mib``: of the
        actor while it took the reports and that caller's queries.
        """
        await self._replicas.hello.remote()
        # The first queries are sent as actor calls, until the connection is open.
        await self._ask(1, _WARM_UP_S, QUERIES_PER_S)
        found: dict[str, Any] = {"alone": await self._ask(1, seconds, QUERIES_PER_S)}
        found["actor_calls"] = await self._ask(1, seconds, QUERIES_PER_S, self._call)
        found["batched"] = await self._ask(CALLERS, seconds)
        reporting = self._replicas.report.remote(seconds + _WARM_UP_S)
        meter = Meter()
        found["with_reports"] = await self._ask(1, seconds, QUERIES_PER_S)
        used = meter.stop().kinds["controller"]
        found |= {"cores": round(used.cores, 2), "memory_mib": round(used.memory_mib)}
        return {**found, "reports_per_s": round(await reporting)}

    async def close(self) -> None:
        """End its processes."""
        await self._client.close()
        ray.kill(self._replicas)
        await asyncio.to_thread(stop_controller, self._app_name)

    async def _call(self, query: RouteQuery) -> RouteDecision | None:
        reply: RouteReply = await self._actor.route.remote([query])
        return reply.decisions[0]

    async def _ask(
        self, callers: int, seconds: float, per_s: float = inf, way: Ask | None = None
    ) -> Figures:
        """Figures of ``callers`` that each query ``per_s`` times a second, or without a pause."""
        ask = way or self._client.route
        times_ns: list[int] = []
        begun_s = time.monotonic()

        async def caller() -> None:
            due_s = begun_s
            while due_s < begun_s + seconds:
                self._key += 1
                query = self._voices.query(self._key)
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
        quiet = {"include_dashboard": False, "log_to_driver": False}
        start_ray(Path(folder), num_cpus=4, object_store_memory=80 << 20, **quiet)
        try:
            yield
        finally:
            ray.shutdown()
