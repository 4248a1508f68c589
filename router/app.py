"""The router as a Serve deployment: it builds the API over the replicas' handle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from ray import serve
from ray.serve.handle import DeploymentHandle

from controller.client import ControllerClient
from controller.config import ControllerConfig
from controller.metrics import MetricsPusher
from router.api import make_api
from router.catalog import Catalog
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.serve_replicas import ServeReplicas

PAGE_TTL_S = 1.0
"""How long a page of metrics is shown again, seconds."""

_log = logging.getLogger(__name__)


class ControllerMetricsPage:
    """The whole application's metrics from the controller, this router's own up to date in them.

    Where the controller does not answer, this router's alone. ``sluice_controller_up`` tells which.

    However many scrapers there are, the controller is asked by one at a time and at most once in
    :data:`PAGE_TTL_S`: the others get the same page. A scraper that leaves does not end the work,
    or coming and leaving would ask ever again.
    """

    def __init__(
        self,
        client: ControllerClient,
        pusher: MetricsPusher,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pusher = pusher
        self._registry = registry
        self._clock = clock
        self._page: asyncio.Task[bytes] | None = None
        self._made_s = -inf
        self._status = CollectorRegistry()
        self._up = Gauge(
            "sluice_controller_up",
            "Whether the controller answered when this page was made: 1 or 0.",
            registry=self._status,
        )

    async def render(self) -> bytes:
        """Prometheus text, at most :data:`PAGE_TTL_S` old; see the class."""
        page = self._page
        if page is None or (page.done() and self._clock() - self._made_s >= PAGE_TTL_S):
            page = self._page = asyncio.create_task(self._make())
        return await asyncio.shield(page)

    async def _make(self) -> bytes:
        text = await self._of_fleet()
        self._up.set(text is not None)
        if text is None:
            text = generate_latest(self._registry)
        self._made_s = self._clock()
        return text + generate_latest(self._status)

    async def _of_fleet(self) -> bytes | None:
        try:
            if await self._pusher.push_now():
                return await self._client.render_metrics()
        except Exception:
            # Whatever is wrong over there, this router's own metrics can be shown.
            _log.exception("the controller's metrics could not be had")
        return None


@serve.ingress()
class Router:
    """One router replica. The application builder makes a deployment of it.

    Args:
        replicas: the replicas' deployment, with the hint router.
        config: of this router.
        controller: to create the controller where there is none.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        config: RouterConfig,
        controller: ControllerConfig,
    ) -> None:
        context = serve.get_replica_context()
        metrics = RouterMetrics()
        client = ControllerClient(
            context.app_name, controller, config.decision_timeout_s, registry=metrics.registry
        )
        source = f"router-{context.replica_id.unique_id}"
        pusher = MetricsPusher(client, metrics.registry, source)
        serve_replicas = ServeReplicas(replicas)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            pusher.start()
            yield
            await pusher.stop()
            await client.close()

        self._api = make_api(
            config,
            Dispatcher(client, serve_replicas, metrics, config),
            Catalog(serve_replicas),
            metrics,
            ControllerMetricsPage(client, pusher, metrics.registry),
            lifespan,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return self._api
