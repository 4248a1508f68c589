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
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import ray

from sluice.benchmarks.live.resources import Meter
from sluice.benchmarks.micro.decision_fleet import FIRST_KEY, Figures, Voices, figures
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
_RESERVED_S = 0.25


class Replicas:
    """A process that reports for all replicas; a Ray actor."""

    def __init__(self, app_name: str, config: ControllerConfig, replicas: int) -> None:
        self._client = ControllerClient(app_name, config, _TIMEOUT_S)
        self._voices = Voices(replicas)
        self._epochs: list[int | None] = [None] * replicas
        self._answered = 0

    async def report(self, seconds: float) -> float:
        """Report for all, :data:`REPORTS_PER_S` times a second each; reports answered a second.

        As in production, a replica whose report is not answered yet reports later, and a replica
        that is not registered, or whose report is lost, registers.
        """
        self._answered = 0
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._speak(index, end_s) for index in range(len(self._epochs))))
        return self._answered / seconds

    async def _speak(self, index: int, end_s: float) -> None:
        due_s = time.monotonic() + random.random() / REPORTS_PER_S
        while due_s < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            epoch = self._epochs[index]
            if epoch is None:
                reply = await self._client.hello(self._voices.hello(index))
            else:
                reply = await self._client.report(self._voices.delta(index, epoch))
            epoch = None if reply is None or reply.resync else reply.epoch
            self._epochs[index] = epoch
            self._answered += epoch is not None
            due_s = max(due_s + 1 / REPORTS_PER_S, time.monotonic())


async def asked(
    label: str, config: ControllerConfig, replicas: int, seconds: float
) -> dict[str, Any]:
    """Figures of callers of a controller with its fleet, each measured for ``seconds``.

    ``alone``: one caller, :data:`QUERIES_PER_S`, no reports. ``with_reports``: the same while all
    replicas report. ``batched``: :data:`CALLERS` that send the next query at once, no reports.
    ``actor_calls``: as ``alone``, by actor calls in place of the connection. ``reports_per_s``:
    reports that the controller answered. ``cores``, ``memory_mib``: of the actor while it took the
    reports and that caller's queries.
    """
    # No replica confirms a decision here, so each counts only until a report could arrive.
    config = config.model_copy(update={"reservation_ttl_s": _RESERVED_S})
    app_name = f"benchmark-{label.replace('_', '-')}"
    client, actor = (
        ControllerClient(app_name, config, _TIMEOUT_S),
        ensure_controller(app_name, config),
    )
    fleet = ray.remote(Replicas).options(num_cpus=0).remote(app_name, config, replicas)
    voices, keys = Voices(replicas), count(FIRST_KEY)

    async def call(query: RouteQuery) -> RouteDecision | None:
        reply: RouteReply = await actor.route.remote([query])
        return reply.decisions[0]

    async def ask(
        callers: int, per_s: float, way: Ask = client.route, lasts_s: float = seconds
    ) -> Figures:
        """Figures of ``callers`` that each query ``per_s`` times a second, or without a pause."""
        times_ns: list[int] = []
        begun_s = time.monotonic()

        async def caller() -> None:
            due_s = begun_s
            while due_s < begun_s + lasts_s:
                query = voices.query(next(keys))
                started = time.perf_counter_ns()
                decision = await way(query)
                times_ns.append(time.perf_counter_ns() - started)
                if decision is None or decision.replica_id is None:
                    raise RuntimeError(f"no replica was chosen: {decision}")
                due_s = max(due_s + 1 / per_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())

        await asyncio.gather(*(caller() for _ in range(callers)))
        return figures(times_ns, time.monotonic() - begun_s)

    try:
        await fleet.report.remote(_WARM_UP_S)
        # The first queries are sent as actor calls, until the connection is open.
        await ask(1, QUERIES_PER_S, lasts_s=_WARM_UP_S)
        found: dict[str, Any] = {"alone": await ask(1, QUERIES_PER_S)}
        found["actor_calls"] = await ask(1, QUERIES_PER_S, call)
        found["batched"] = await ask(CALLERS, inf)
        reporting = fleet.report.remote(seconds + _WARM_UP_S)
        meter = Meter()
        found["with_reports"] = await ask(1, QUERIES_PER_S)
        meter.stop()
        used = meter.usage.kinds["controller"]
        found |= {"cores": round(used.cores, 2), "memory_mib": round(used.memory_mib)}
        return {**found, "reports_per_s": round(await reporting)}
    finally:
        await client.close()
        ray.kill(fleet)
        await asyncio.to_thread(stop_controller, app_name)


@contextmanager
def own_ray() -> Iterator[None]:
    """A Ray instance on this machine until the block ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        start_ray(
            Path(folder),
            num_cpus=4,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()
