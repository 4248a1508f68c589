"""The HTTP API: OpenAI's endpoints, health and metrics. No Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from sluice.controller.client import ControllerClient
from sluice.controller.config import version
from sluice.protocol.requests import Endpoint
from sluice.router import wire
from sluice.router.admin.api import AdminService, admin_routes, page_routes
from sluice.router.batches.api import batch_routes
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.degrade import Degrading
from sluice.router.dispatch.models import ModelRegistry
from sluice.router.dispatch.response import CallResponse
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.ingress.access import (
    LIVE_PATH,
    METRICS_PATH,
    OPEN_PATH,
    PAGE_PATH,
    PING_PATH,
    ROOT_PATH,
    Access,
)
from sluice.router.ingress.middleware import Cors, IngressMiddleware, Pause, Shedder
from sluice.router.metrics.page import Render
from sluice.router.metrics.vllm_names import with_vllm_names
from sluice.router.openapi import PATH, document
from sluice.router.quotes import Quotes
from sluice.router.request.arrival import INFERENCE_PATHS, Arrival, endpoint_at
from sluice.router.request.call import CallReader
from sluice.router.request.loop import LoopDeadlines
from sluice.router.request.prompt import output_to_expect
from sluice.router.tenancy.limits import NO_CHARGE, RateLimiter, Share

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
Job = Callable[[], Coroutine[Any, Any, None]]


def make_api(
    config: RouterConfig,
    fleets: ModelRegistry,
    render_page: Render,
    lifespan: Lifespan | None = None,
    unix_clock: Callable[[], float] = time.time,
    share: Share | None = None,
    loop_service: ControllerClient | None = None,
    telemetry: Telemetry | None = None,
    admin_service: AdminService | None = None,
    shedder: Shedder | None = None,
    pause: Pause = asyncio.sleep,
) -> FastAPI:
    """The FastAPI application of one router process; without ``admin_service``, no admin API.
    Raises OSError, ValueError: a key file, or the folder of files and batches, cannot be used."""
    access = Access(config, fleets.edge.registry, fleets.clock, unix_clock)
    limiter = RateLimiter(share, config.replicas, fleets.clock)
    shedder = shedder or Shedder(fleets.edge.loop_delay_s, fleets.clock)
    api = FastAPI(
        title="Sluice",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A redirect goes to the host that the client says it has asked.
        redirect_slashes=False,
        lifespan=lifespan,
    )
    telemetry = telemetry or Telemetry()
    loops = LoopDeadlines(loop_service, fleets.clock)
    calls = Calls(config, fleets, loops, limiter, telemetry)
    for path in INFERENCE_PATHS:
        # For its methods: the middleware has a POST served.
        api.router.routes.append(Route(path, calls.serve, methods=["POST"]))
    quotes = Quotes(config, fleets, calls.reader)
    api.router.routes.append(Route(wire.QUOTE_PATH, quotes.serve, methods=["POST"]))
    has_page = access.admin.on and admin_service is not None
    api.include_router(_model_routes(fleets))
    api.include_router(_status_routes(config, fleets, render_page, has_page))
    api.include_router(
        APIRouter(lifespan=_running(access.start, access.watch, limiter.run, shedder.watch))
    )
    if access.admin.on and admin_service is not None:
        api.include_router(admin_routes(admin_service))
        api.include_router(page_routes())
    api.include_router(batch_routes(config, fleets, access.api, limiter, unix_clock, telemetry))
    _add_error_handlers(api)
    api.add_middleware(
        IngressMiddleware,
        config=config,
        metrics=fleets.edge,
        access=access,
        limiter=limiter,
        telemetry=telemetry,
        shedder=shedder,
        serve=calls.serve,
        quote=quotes.serve,
        clock=fleets.clock,
        pause=pause,
    )
    if config.cors_origins:
        api.add_middleware(Cors, origins=config.cors_origins)
    return api


@dataclass
class Calls:
    """Serves inference calls. ``limiter``: reserves tokens of the keys' rate limits."""

    config: RouterConfig
    fleets: ModelRegistry
    loops: LoopDeadlines
    limiter: RateLimiter
    telemetry: Telemetry

    def __post_init__(self) -> None:
        self.reader = CallReader(self.config, self.fleets.exceeded)
        self.degrading = Degrading(self.config, self.fleets)

    async def serve(self, request: Request, endpoint: Endpoint) -> Response:
        """The response to a request, or its error."""
        fleets, telemetry = self.fleets, self.telemetry
        arrival: Arrival = request.state.arrival
        span = telemetry.begin(arrival, endpoint, request.headers.raw)
        try:
            call = await self.reader.read(request, endpoint)
            fleet = await fleets.find(call.model, call.client.caps.models, endpoint)
            endpoints = request.scope["state"].get("endpoints")
            if endpoints is not None:
                call = await fleet.dispatcher.restricted(call, endpoints)
            charge = NO_CHARGE
            if call.client.caps.tokens_per_minute is not None:
                prompt_tokens = fleet.dispatcher.estimator.estimate(call.prompt)
                expected = output_to_expect(endpoint, call.output_tokens)
                charge = self.limiter.reserve(call.client, prompt_tokens, expected)
            if call.loop is not None:  # last: the response ends what begins here
                turn = (call.loop, call.slo, call.client.tenant, call.received_s)
                slo, loop = await self.loops.begin(*turn)
                call = replace(call, slo=slo, loop=loop)
        except ApiError as error:
            fleets.edge.refused(endpoint, error.reason, arrival.client)
            telemetry.ended_early(arrival, endpoint, error.reason, span)
            return error.response(endpoint)
        except ClientDisconnect:
            fleets.edge.left_early(endpoint, arrival.client)
            telemetry.ended_early(arrival, endpoint, None, span)
            return Response(status_code=400)  # never read: the client has left
        if charge is not NO_CHARGE or span is not None:
            call = replace(call, charge=charge, span=span)
        fetches = getattr(request.state, wire.FETCHES, False)
        place = None
        if call.slo.service_class in self.degrading.classes and self.degrading.applies(call):
            place = partial(self.degrading.place, call, fleet)
        return CallResponse(call, fleet.dispatcher, fleet.metrics, telemetry, fetches, place)


def _model_routes(fleets: ModelRegistry) -> APIRouter:
    """What can be asked of models without a call."""
    routes = APIRouter()

    async def kept_response(_: Request) -> Response:
        message = "Responses are not kept: there is none to be read later."
        raise ApiError(Reason.NOT_FOUND, message, "response_id")

    routes.add_route("/v1/responses/{rest:path}", kept_response, ["GET", "POST", "DELETE"])

    @routes.get("/v1/models", response_model=None)
    async def models(request: Request) -> dict[str, Any]:
        arrival: Arrival = request.state.arrival
        return await fleets.models(arrival.client.caps.models)

    @routes.get("/v1/models/{model_id:path}", response_model=None)
    async def model(request: Request, model_id: str) -> dict[str, Any]:
        arrival: Arrival = request.state.arrival
        return await fleets.model(model_id, arrival.client.caps.models)

    return routes


def _status_routes(
    config: RouterConfig, fleets: ModelRegistry, render_page: Render, has_page: bool
) -> APIRouter:
    """What this is, its description, its health and its metrics."""
    routes = APIRouter()
    described = document(config)

    @routes.get(ROOT_PATH, response_model=None)
    async def root() -> dict[str, Any]:
        return {
            "name": "Sluice",
            "api": "/v1",
            "models": "/v1/models",
            "openapi": PATH,
            "health": OPEN_PATH,
            "metrics": METRICS_PATH,
            **({"page": PAGE_PATH} if has_page else {}),
        }

    @routes.get(OPEN_PATH, response_model=None)
    @routes.api_route(PING_PATH, methods=["GET", "POST"], response_model=None)
    async def health() -> dict[str, Any]:
        return await fleets.health()

    @routes.get(LIVE_PATH, response_model=None)
    async def live() -> Response:
        return Response("success", media_type="text/plain")

    @routes.get("/version", response_model=None)
    async def served_version() -> dict[str, str]:
        return {"version": version()}

    @routes.get(PATH, response_model=None)
    async def openapi() -> dict[str, Any]:
        return described

    renaming, of, renamed = asyncio.Lock(), b"", b""

    @routes.get("/metrics", response_model=None)
    async def metrics_page(request: Request) -> Response:
        names = request.query_params.get("names", "sluice")
        if names not in ("sluice", "vllm"):
            raise invalid(f"names must be sluice or vllm, got {shown(names)}", "names")
        text = await render_page()
        if names == "vllm":
            nonlocal of, renamed
            async with renaming:  # once for all that wait for a page
                if of != text:
                    model = next(iter(fleets)).model
                    of, renamed = text, await asyncio.to_thread(with_vllm_names, text, model)
            text = renamed
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


def _running(first: Callable[[], Awaitable[None]], *jobs: Job) -> Lifespan:
    """Waits for ``first``, and then runs background jobs for as long as the application runs."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await first()
        tasks = [asyncio.create_task(job()) for job in jobs]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    return lifespan


def _add_error_handlers(api: FastAPI) -> None:
    """Every error in the shape of the API that is spoken."""

    def at(request: Request) -> Endpoint | None:
        return endpoint_at(request.scope["path"])

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response(at(request))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        reason = Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.UNKNOWN_URL
        # The URL's would do, but making one fails where the header `host` or the query is odd.
        path = shown(request.scope["path"], limit=256)
        message = f"{request.method} {path} is not served here; GET /openapi.json has what is."
        return ApiError(reason, message, headers=dict(error.headers or {})).response(at(request))

    async def unexpected(request: Request, _: Exception) -> JSONResponse:
        # Starlette answers these outside the gate, so the id is added here.
        arrival: Arrival = request.state.arrival
        return ApiError(
            Reason.INTERNAL,
            "The router failed; its log says why.",
            headers={wire.REQUEST_ID_HEADER: arrival.request_id},
        ).response(at(request))

    api.add_exception_handler(ApiError, refused)
    api.add_exception_handler(HTTPException, http)
    api.add_exception_handler(Exception, unexpected)
