"""Decisions of a real controller actor, queried over its connection."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import ray

from sluice.benchmarks.micro.decision_fleet import FIRST_KEY, Figures, Voices, figures
from sluice.controller.client import ControllerClient, ensure_controller, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.controller.messages import RouteDecision, RouteQuery, RouteReply
from sluice.deploy.ray_start import start_ray

QUERIES_PER_S = 200
"""Of one caller at a steady rate."""

CALLERS = 256
"""Concurrent callers, whose queries are batched."""

Ask = Callable[[RouteQuery], Awaitable[RouteDecision | None]]

_TIMEOUT_S = 30.0
_WARM_UP_S = 0.5
_RESERVED_S = 0.25


async def asked(
    label: str, config: ControllerConfig, replicas: int, seconds: float
) -> dict[str, Any]:
    """Figures of callers of a controller that has a fleet, each measured for ``seconds``.

    ``alone``: one caller, :data:`QUERIES_PER_S`. ``actor_calls``: the same by actor calls in place
    of the connection. ``batched``: :data:`CALLERS` that send the next query at once.

    Raises:
        RuntimeError: the controller does not answer.
    """
    # No replica confirms a decision here, so each counts only until a report could arrive.
    config = config.model_copy(update={"reservation_ttl_s": _RESERVED_S})
    app_name = f"benchmark-{label.replace('_', '-')}"
    client, actor = (
        ControllerClient(app_name, config, _TIMEOUT_S),
        ensure_controller(app_name, config),
    )
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
        for index in range(replicas):
            if await client.hello(voices.hello(index)) is None:
                raise RuntimeError("the controller did not answer a hello")
        # The first queries are sent as actor calls, until the connection is open.
        await ask(1, QUERIES_PER_S, lasts_s=_WARM_UP_S)
        return {
            "alone": await ask(1, QUERIES_PER_S),
            "actor_calls": await ask(1, QUERIES_PER_S, call),
            "batched": await ask(CALLERS, inf),
        }
    finally:
        await client.close()
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
