"""What a page of metrics costs decisions: an actor with a large fleet is asked for decisions, in
turns with and without a scrape each second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import ray
from prometheus_client import CollectorRegistry

from sluice.benchmarks.micro.decision_actor import QUERIES_PER_S, Session
from sluice.benchmarks.micro.decision_fleet import Figures, figures
from sluice.controller.client import ControllerClient, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.controller.messages import MetricSample, MetricsPush
from sluice.controller.observability.metrics import samples_of
from sluice.replica.config import EngineConfig
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.metrics.instruments import RouterMetrics

ROUTERS = 32
PERIOD_S = 1.0
"""Time between two pushes of a process, and between two scrapes."""

ROUNDS = 5

_TIMEOUT_S = 30.0
_WARM_UP_S = 2.0


class Scraped(NamedTuple):
    """Figures of one caller.

    Attributes:
        without, scraped: of all turns without scrapes, and with them.
        ratio: p99 with scrapes over that without: the median over the pairs of turns.
        pages: pages that were rendered. page_bytes: size of the largest one.
    """

    without: Figures
    scraped: Figures
    ratio: float
    pages: int
    page_bytes: int


class Processes:
    """Pushes the metrics of all routers and replicas, and scrapes; a Ray actor."""

    def __init__(self, app_name: str, config: ControllerConfig, replicas: int) -> None:
        self._client = ControllerClient(app_name, config, _TIMEOUT_S)
        self._client.on_push(tuple, lambda _: None)
        router = samples_of(RouterMetrics().registry)
        self._samples = [(f"router-{index}", router) for index in range(ROUTERS)]
        self._samples += _of_replicas(replicas)
        self._incarnation = time.time_ns()
        self._number = 0
        self._scraping = False
        self._pages: list[int] = []

    async def push(self) -> None:
        """Push all once."""
        self._number += 1
        for source, samples in self._samples:
            await self._client.push_metrics(
                MetricsPush(source, self._incarnation, self._number, samples)
            )

    async def run(self) -> None:
        """Push, and scrape while that is on, every :data:`PERIOD_S` or as fast as that goes."""
        await asyncio.gather(self._every(self.push), self._every(self._scrape))

    async def scrape(self, on: bool) -> list[int]:
        """Begin or end to scrape. Returns the sizes of all pages until now, bytes."""
        self._scraping = on
        return self._pages

    async def _scrape(self) -> None:
        page = await self._client.render_metrics(_TIMEOUT_S) if self._scraping else None
        if page is not None:
            self._pages.append(len(page))

    async def _every(self, do: Any) -> None:
        while True:
            due_s = time.monotonic() + PERIOD_S
            await do()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _of_replicas(replicas: int) -> Iterator[tuple[str, tuple[MetricSample, ...]]]:
    """Source and samples of each replica. One engine's are renamed: hundreds start slowly."""
    engine = SimulatedEngine(EngineConfig(kind="simulated"), "r", 8)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReplicaCollector("r", engine.state, lambda: 0, lambda: 1))
    samples = samples_of(registry)
    for index in range(replicas):
        name = f"replica-{index}"
        own = [
            each._replace(
                labels=tuple(
                    [(key, name if key == "replica" else value) for key, value in each.labels]
                )
            )
            for each in samples
        ]
        yield name, tuple(own)


class ScrapeSession(Session):
    """A controller with many replicas, its observer, and a client."""

    def __init__(self, config: ControllerConfig, replicas: int) -> None:
        super().__init__("scrape", config, replicas)
        self._processes = ray.remote(Processes).options(num_cpus=0)
        self._processes = self._processes.remote(self._app_name, self._config, replicas)

    async def measure_scrapes(self, seconds: float) -> Scraped:
        """Times of one caller's decisions, in turns of ``seconds``."""
        try:
            await self._replicas.hello.remote()
            await self._processes.push.remote()
            self._processes.run.remote()
            await self._ask(1, _WARM_UP_S, QUERIES_PER_S)
            times_ns: dict[bool, list[list[int]]] = {False: [], True: []}
            for turn in range(2 * ROUNDS):
                # The order changes from pair to pair, so that a drift of the machine cancels out.
                scraped = turn % 4 in (1, 2)
                await self._processes.scrape.remote(scraped)
                times_ns[scraped].append(await self._times_ns(1, seconds, QUERIES_PER_S))
            pages = await self._processes.scrape.remote(False)
        finally:
            await self._client.close()
            for actor in (self._processes, self._replicas):
                ray.kill(actor)
            await asyncio.to_thread(stop_controller, self._app_name)
        p99 = {on: [figures(turn)["p99_ms"] for turn in turns] for on, turns in times_ns.items()}
        ratios = np.array(p99[True]) / np.array(p99[False])
        without, scraped_all = (figures([*chain(*times_ns[on])]) for on in (False, True))
        return Scraped(
            without,
            scraped_all,
            round(float(np.median(ratios)), 3),
            len(pages),
            max(pages, default=0),
        )
