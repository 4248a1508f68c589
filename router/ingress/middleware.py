"""Ingress middleware, the first stage of a request: its id, its key, and its admission to the
router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.errors import ApiError, Reason
from sluice.router.ingress.access import OPEN_PATH, PING_PATH, Access, is_for_operators
from sluice.router.ingress.load_shedding import Pace, Pause, Shedder
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.arrival import INFERENCE_PATHS, Arrival, endpoint_at
from sluice.router.request.body import BodyBudget, HeldBytes
from sluice.router.request.client_request_id import client_request_id
from sluice.router.tenancy.limits import Client
from sluice.router.tenancy.rate_limits import RateLimiter
from sluice.scheduling.tenancy.fair_shares import PLACES_PART
from sluice.telemetry.logs import of_request

# CORS: the origins whose pages may call the API from a browser.


class Cors:
    """ASGI middleware outside the ingress middleware, because a browser's preflight request carries
    no key. It never allows cookies, nor the paths for operators.

    Args:
        origins: allowed ones, such as ``https://app.example``; ``*``: any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=wire.RESPONSE_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request, or forward the request."""
        shared = scope["type"] == "http" and not is_for_operators(scope["path"].removesuffix("/"))
        await (self._shared if shared else self._app)(scope, receive, send)


_COUNTED_PATHS = frozenset((*INFERENCE_PATHS, "/v1/files", "/v1/batches"))
"""Paths whose POST counts towards request rate limits. The others cost little, and the requests of
a batch must not block its cancellation."""

_PACED_STATUSES = frozenset((401, 429, 503))
"""After these statuses clients retry the same request."""


class IngressMiddleware:
    """ASGI middleware around the API.

    - Every request gets an id from the router, which is returned in every response; a client's
      ``x-request-id`` is not trusted as one.
    - Access to paths is checked by :mod:`sluice.router.ingress.access`.
    - At most ``max_in_flight`` inference requests are in flight. A client has at most as many of
      them as its key allows, and as leave slots for other clients. Further requests are refused
      before their body is read.
    - Requests, uploads and new batches beyond the rate limits of a key are refused in the same way,
      as are some requests while the router is overloaded.
    - Refusals are sent no faster than ``refusals_per_s``; see
      :mod:`sluice.router.ingress.load_shedding`. Refusals of requests without a valid key have a
      separate rate, so that they do not delay others. Health probes are answered at once.
    - The bodies of all requests in flight have at most ``max_held_bytes`` together.

    A path with a slash at its end is the one without.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        metrics: RouterMetrics,
        access: Access,
        limiter: RateLimiter,
        telemetry: Telemetry,
        shedder: Shedder,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._app = app
        self._access = access
        self._limiter = limiter
        self._telemetry = telemetry
        self._shedder = shedder
        held = metrics.held_refusals
        paced = (config.refusals_per_s, config.max_in_flight, held, clock, pause)
        self._pace, self._pace_of_strangers = Pace(*paced), Pace(*paced)
        self._max_in_flight = config.max_in_flight
        self._bodies = BodyBudget(config.max_held_bytes, metrics.held_bytes)
        self._in_flight = 0
        self._of_client: Counter[str] = Counter()
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(path := scope["path"]) > 1 and path.endswith("/"):
            scope["path"] = path[:-1]
        theirs = client_request_id(scope["headers"])
        arrival = Arrival(secrets.token_hex(16), self._clock(), client_request_id=theirs)
        refusal: list[Message] = []
        with of_request(arrival.request_id):
            has_access = await self._admit(arrival, scope, receive, send, refusal)
            # The request's body and slot have been released by now.
            if refusal:
                await (self._pace if has_access else self._pace_of_strangers).turn()
            for message in refusal:
                await send(message)

    async def _admit(
        self,
        arrival: Arrival,
        scope: Scope,
        receive: Receive,
        send: Send,
        refusal: list[Message],
    ) -> bool:
        """Answer the request; a refusal is stored in ``refusal`` and not sent. Returns whether the
        client has access."""
        scope.setdefault("state", {})["arrival"] = arrival
        named = [(wire.REQUEST_ID_HEADER.encode(), arrival.request_id.encode())]

        async def send_named(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts:
                limits = self._limiter.headers(arrival.client) if counted else []
                message["headers"] = [*message.get("headers", ()), *named, *limits]
            if refusal or (starts and paced and message["status"] in _PACED_STATUSES):
                refusal.append(message)
            else:
                await send(message)

        path = scope["path"]
        counted = scope["method"] == "POST" and path in _COUNTED_PATHS
        paced = path not in (OPEN_PATH, PING_PATH)
        endpoint = INFERENCE_PATHS.get(path) if counted else None
        has_access = False
        try:
            by_gateway = "endpoints" in scope["state"]
            client = self._access.check(path, scope["headers"], by_gateway)
            arrival = arrival._replace(client=client)
            has_access = True
            if endpoint is not None:
                self._check_load(arrival.client)
                self._check_room(arrival.client)
            if counted:
                self._limiter.count_request(arrival.client)
        except ApiError as error:
            if endpoint is not None:
                self._metrics.refused(endpoint, error.reason, arrival.client)
                self._telemetry.refused(arrival, endpoint, error.reason)
            await error.response(endpoint_at(path))(scope, receive, send_named)
            return has_access
        if endpoint is None:
            scope["state"]["arrival"] = arrival
            await self._app(scope, receive, send_named)
            return True
        with HeldBytes(self._bodies, arrival.client) as held:
            arrival = scope["state"]["arrival"] = arrival._replace(held=held)
            await self._count(arrival.client.owner, scope, receive, send_named)
        return True

    def _check_load(self, client: Client) -> None:
        if not self._shedder.takes(client.owner):
            raise ApiError(
                Reason.ROUTER_OVERLOADED,
                "The router is overloaded; it refuses requests of the clients that send the most.",
            )

    def _check_room(self, client: Client) -> None:
        if self._in_flight >= self._max_in_flight:
            raise ApiError(
                Reason.ROUTER_FULL,
                f"The router is full: it serves at most {self._max_in_flight} requests at once.",
            )
        most = client.caps.max_in_flight
        if most is not None and self._of_client[client.owner] >= most:
            raise ApiError(
                Reason.CLIENT_FULL,
                f"This API key may have at most {most} requests in flight, and has them already.",
            )
        free = self._max_in_flight - self._in_flight
        if not client.may_hold(self._of_client[client.owner], free, PLACES_PART):
            raise ApiError(
                Reason.CLIENT_FULL,
                "This API key has used its share of the router's slots: at most "
                f"{PLACES_PART:g} times the free slots, by the key's weight.",
            )

    async def _count(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, and count it while it is in flight."""
        self._in_flight += 1
        self._of_client[owner] += 1
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1
            self._of_client[owner] -= 1
            if not self._of_client[owner]:
                del self._of_client[owner]  # keys come and go
            self._metrics.in_flight.dec()
