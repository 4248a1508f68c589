"""The HTTP API: OpenAI's endpoints, health and metrics. No Ray here."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from replica.engine import Endpoint
from router import wire
from router.batches.service import batch_routes
from router.call import CallReader
from router.config import RouterConfig
from router.errors import ApiError, Reason
from router.exchange import Exchange
from router.fleets import Fleets
from router.gate import Arrival, Gate
from router.metrics_page import Page

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def make_api(
    config: RouterConfig,
    fleets: Fleets,
    page: Page,
    lifespan: Lifespan | None = None,
    unix_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The FastAPI application of one router process.

    Args:
        unix_clock: Unix seconds, which files and batches expire by.

    Raises:
        OSError: the folder of files and batches cannot be used.
    """
    api = FastAPI(
        title="Sluice",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A redirect goes to the host that the client says it has asked.
        redirect_slashes=False,
        lifespan=lifespan,
    )
    reader = CallReader(config)
    metrics = fleets.edge

    async def serve(request: Request, endpoint: Endpoint) -> Response:
        try:
            call = await reader.read(request, endpoint)
            fleet = fleets.of(call.model)
        except ApiError as error:
            metrics.refused(endpoint, error.reason, request.state.arrival.client)
            return error.response()
        except ClientDisconnect:
            metrics.left_early(endpoint, request.state.arrival.client)
            return Response(status_code=400)  # nobody is there to read it
        return Exchange(call, fleet.dispatcher, fleet.metrics)

    @api.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await serve(request, "chat")

    @api.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await serve(request, "completions")

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return await fleets.models()

    @api.get("/health")
    async def health() -> dict[str, Any]:
        return await fleets.health()

    @api.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        return Response(await page.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    api.include_router(batch_routes(config, fleets, unix_clock))
    _add_error_handlers(api)
    api.add_middleware(Gate, config=config, metrics=metrics, clock=fleets.clock)
    return api


def _add_error_handlers(api: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    async def told(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        reason = Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.UNKNOWN_URL
        message = f"{request.method} {request.url.path} is not served here."
        return ApiError(reason, message, headers=dict(error.headers or {})).response()

    async def unexpected(request: Request, _: Exception) -> JSONResponse:
        # Starlette answers these outside the gate, so the id is added here.
        arrival: Arrival = request.state.arrival
        return ApiError(
            Reason.INTERNAL,
            "The router failed; its log says why.",
            headers={wire.REQUEST_ID_HEADER: arrival.request_id},
        ).response()

    api.add_exception_handler(ApiError, told)
    api.add_exception_handler(HTTPException, http)
    api.add_exception_handler(Exception, unexpected)
