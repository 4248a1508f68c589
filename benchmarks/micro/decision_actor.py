"""Decisions of a real controller actor, while processes report, push metrics and scrape."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import ray
from prometheus_client import CollectorRegistry

from sluice.benchmarks.live.report import OWN, Meter
from sluice.benchmarks.micro.decision_fleet import Figures, FleetMessages, figures
from sluice.controller.client import ControllerClient, ensure_controller, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import samples_of
from sluice.deploy.ray_start import start_ray
from sluice.protocol.messages import MetricsPush, RouteReply
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.metrics.instruments import RouterMetrics
from sluice.scheduling.request.job import RouteDecision, RouteQuery

REPORTS_PER_S, QUERIES_PER_S = 50, 200
"""Of each replica, and of one caller at a steady rate."""

CALLERS, AT_ONCE = 256, 64
"""Concurrent callers, and replicas per report: one process with all messages would be late."""

ROUTERS, ROUNDS = 32, 5
"""That push metrics; pairs of turns with scrapes and without."""

Ask = Callable[[RouteQuery], Awaitable[RouteDecision | None]]

_TIMEOUT_S = 30.0
_WARM_UP_S = 0.5
_RETRY_S = 0.1
_RESERVED_S = 0.25


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
                await asyncio.sleep(_RETRY_S)
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


class Metrics:
    """A process that pushes the metrics of all routers and replicas, and scrapes; a Ray actor."""

    def __init__(self, app_name: str, config: ControllerConfig, replicas: int) -> None:
        self._client = ControllerClient(app_name, config, _TIMEOUT_S)
        self._client.on_push(tuple, lambda _: None)
        router = samples_of(RouterMetrics().registry)
        self._samples = [(f"router-{index}", router) for index in range(ROUTERS)]
        # One engine's are renamed: hundreds start slowly.
        engine = SimulatedEngine(EngineConfig(kind="simulated"), "r", 8)
        registry = CollectorRegistry(auto_describe=False)
        rank = Replica("r", "node", engine, ReplicaConfig(), self._client)
        registry.register(ReplicaCollector([rank], lambda: 1))
        for name in (f"replica-{index}" for index in range(replicas)):
            own = [
                each._replace(
                    labels=tuple([(k, name if k == "replica" else v) for k, v in each.labels])
                )
                for each in samples_of(registry)
            ]
            self._samples.append((name, tuple(own)))
        self._incarnation = time.time_ns()
        self._number = 0
        self._scraping = False
        self._pages: list[int] = []

    async def push(self) -> None:
        """Push all once."""
        self._number += 1
        for source, samples in self._samples:
            push = MetricsPush(source, self._incarnation, self._number, samples)
            await self._client.push_metrics(push)

    async def run(self) -> None:
        """Push, and scrape while that is on, each second or as fast as that goes."""
        await asyncio.gather(self._every_second(self.push), self._every_second(self._scrape))

    async def scrape(self, on: bool) -> list[int]:
        """Begin or end to scrape. Returns the sizes of all pages until now, bytes."""
        self._scraping = on
        return self._pages

    async def _scrape(self) -> None:
        page = await self._client.render_metrics(_TIMEOUT_S) if self._scraping else None
        if page is not None:
            self._pages.append(len(page))

    async def _every_second(self, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            due_s = time.monotonic() + 1.0
            await do()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


class Session:
    """One controller with its fleet, and a client that queries it, until it is closed."""

    def __init__(self, label: str, config: ControllerConfig, replicas: int) -> None:
        # No replica confirms a decision here, so each counts only until a report could arrive.
        config = config.model_copy(update={"reservation_ttl_s": _RESERVED_S})
        self._app_name = f"benchmark-{label.replace('_', '-')}"
        self._client = ControllerClient(self._app_name, config, _TIMEOUT_S)
        self._actor = ensure_controller(self._app_name, config)
        self._messages = FleetMessages(replicas)
        self._fleet = self._app_name, config, replicas
        self._replicas = ray.remote(Replicas).options(num_cpus=0).remote(*self._fleet)
        self._key = 1 << 50

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Figures of callers, each for ``seconds``. ``batched``: :data:`CALLERS` that send the next
        query at once; ``actor_calls``: by actor calls in place of the connection."""
        await self._replicas.hello.remote()
        # The first queries are sent as actor calls, until the connection is open.
        await self._ask(1, _WARM_UP_S, QUERIES_PER_S)
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

    async def measure_scrapes(self, seconds: float) -> dict[str, Any]:
        """One caller in turns with and without a scrape a second; median ``ratio`` of p99 over the
        pairs, ``pages`` rendered, and the largest's bytes."""
        metrics = ray.remote(Metrics).options(num_cpus=0).remote(*self._fleet)
        await self._replicas.hello.remote()
        await metrics.push.remote()
        metrics.run.remote()
        await self._ask(1, 4 * _WARM_UP_S, QUERIES_PER_S)
        times_ns: dict[bool, list[list[int]]] = {False: [], True: []}
        for turn in range(2 * ROUNDS):
            # The order changes from pair to pair, so that a drift of the machine cancels out.
            scraped = turn % 4 in (1, 2)
            await metrics.scrape.remote(scraped)
            times_ns[scraped].append(await self._times_ns(1, seconds, QUERIES_PER_S))
        pages = await metrics.scrape.remote(False)
        ray.kill(metrics)
        p99 = {on: [figures(turn)["p99_ms"] for turn in turns] for on, turns in times_ns.items()}
        without, with_scrapes = (figures([*chain(*times_ns[on])]) for on in (False, True))
        return {
            "without": without,
            "scraped": with_scrapes,
            "ratio": round(float(np.median(np.array(p99[True]) / np.array(p99[False]))), 3),
            "pages": len(pages),
            "page_bytes": max(pages, default=0),
        }

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
        begun_s = time.monotonic()
        times_ns = await self._times_ns(callers, seconds, per_s, ask)
        return figures(times_ns, time.monotonic() - begun_s)

    async def _times_ns(
        self, callers: int, seconds: float, per_s: float, ask: Ask | None = None
    ) -> list[int]:
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
        return times_ns


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
