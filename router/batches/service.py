"""Files and batches of one router: the endpoints, and the runner that lives as long as they do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from sluice.router.batches.batches_api import BatchesApi
from sluice.router.batches.files_api import FilesApi
from sluice.router.batches.line_caller import LineCaller
from sluice.router.batches.metrics import BatchMetrics
from sluice.router.batches.places import LinePlaces
from sluice.router.batches.run import Resources
from sluice.router.batches.runner import Runner
from sluice.router.batches.store import Store
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.models import ModelRegistry
from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.clients import ApiClients
from sluice.router.tenancy.rate_limits import RateLimiter

_METHODS = ["GET", "POST", "DELETE"]


def batch_routes(
    config: RouterConfig,
    fleets: ModelRegistry,
    clients: ApiClients,
    limiter: RateLimiter,
    now: Callable[[], float] = time.time,
    telemetry: Telemetry | None = None,
) -> APIRouter:
    """``/v1/files`` and ``/v1/batches``. Batches run between the application's start and end.

    Args:
        clients: those of the API.
        limiter: applies their rate limits to the lines.
        now: Unix seconds.
        telemetry: logs and traces the lines, as requests.

    Raises:
        OSError: the configured folder cannot be used.
    """
    if config.batches.directory is None:
        return _routes_when_off()
    batch_metrics = BatchMetrics(fleets.edge.registry)
    resources = Resources(
        config=config.batches,
        max_line_bytes=config.max_body_bytes,
        store=Store(config.batches, config.batches.directory, now),
        caller=LineCaller(config, fleets, limiter, batch_metrics, telemetry=telemetry),
        places=LinePlaces(config.batches.max_lines_in_flight),
        metrics=batch_metrics,
        now=now,
    )
    runner = Runner(resources, clients.holder, fleets.clock)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        await runner.stop()
        await resources.store.close()

    routes = APIRouter(lifespan=lifespan)
    routes.include_router(FilesApi(resources).routes())
    routes.include_router(BatchesApi(resources, runner).routes())
    return routes


def _routes_when_off() -> APIRouter:
    routes = APIRouter()

    async def off(_: Request) -> Response:
        raise ApiError(
            Reason.BATCHES_OFF,
            "Files and batches are not enabled here: set router.batches.directory.",
        )

    for path in ("/v1/files", "/v1/batches"):
        routes.api_route(path, methods=_METHODS, response_model=None)(off)
        routes.api_route(path + "/{rest:path}", methods=_METHODS, response_model=None)(off)
    return routes
