"""The first thing that a request meets: its id, its key, and whether there is room for it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import wire
from router.config import RouterConfig
from router.errors import ApiError, Reason
from router.ingress.access import OPEN_PATH, Access
from router.ingress.load_shedding import Pace, Pause, Shedder
from router.metrics.instruments import RouterMetrics
from router.metrics.telemetry import Telemetry
from router.request.arrival import INFERENCE_PATHS, Arrival
from router.request.body import BodyBudget, HeldBytes
from router.request.client_request_id import client_request_id
from router.tenancy.limits import Client
from router.tenancy.rate_limits import RateLimiter
from scheduling.fair_shares import PLACES_PART
from telemetry.logs import of_request

_COUNTED_PATHS = frozenset((*INFERENCE_PATHS, "/v1/files", "/v1/batches"))
"""Those whose POST counts in the rates of requests: the others cost little, and to cancel a batch
must not be refused because of its own lines."""

_PACED_STATUSES = frozenset((401, 429, 503))
"""After these clients come again with the same request."""


class IngressMiddleware:
    """ASGI middleware around the API.

    - Every request gets an id of our own; a client's ``x-request-id`` is not trusted as one. It is
      sent back in every response.
    - Who may ask for which path is said in :mod:`router.ingress.access`.
    - At most ``max_in_flight`` inference requests are inside, and of one client at most as many as
      its key allows, and as leave room for others; more are refused before their body is read.
    - So are those, uploads and new batches among them, that come more often than its key allows,
      and some while the router falls behind.
    - Refusals leave no faster than ``refusals_per_s``; see :mod:`router.ingress.load_shedding`.
      Those of requests without a key have a pace of their own, so that they hold up nobody else's.
      Probes of the router's health are told at once.
    - The bodies of those that are inside have at most ``max_held_bytes`` together.

    Paths are those after Serve's route prefix, as for routing.
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
        """Let the request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        theirs = client_request_id(scope["headers"])
        arrival = Arrival(secrets.token_hex(16), self._clock(), client_request_id=theirs)
        refusal: list[Message] = []
        with of_request(arrival.request_id):
            await self._admit(arrival, scope, receive, send, refusal)
            # By now nothing else is left of the request: no body, and no place.
            if refusal:
                await self._pace_of(refusal[0]["status"]).turn()
            for message in refusal:
                await send(message)

    async def _admit(
        self,
        arrival: Arrival,
        scope: Scope,
        receive: Receive,
        send: Send,
        refusal: list[Message],
    ) -> None:
        """Answer the request; a refusal is written down and not sent."""
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

        # The function that routing itself calls, so that the two never differ over a path.
        path = get_route_path(scope)
        counted = scope["method"] == "POST" and path in _COUNTED_PATHS
        paced = path != OPEN_PATH
        endpoint = INFERENCE_PATHS.get(path) if counted else None
        try:
            arrival = arrival._replace(client=self._access.check(path, scope["headers"]))
            if endpoint is not None:
                self._check_load(arrival.client)
                self._check_room(arrival.client)
            if counted:
                self._limiter.count_request(arrival.client)
        except ApiError as error:
            if endpoint is not None:
                self._metrics.refused(endpoint, error.reason, arrival.client)
                self._telemetry.refused(arrival, endpoint, error.reason)
            await error.response()(scope, receive, send_named)
            return
        if endpoint is None:
            scope["state"]["arrival"] = arrival
            await self._app(scope, receive, send_named)
            return
        with HeldBytes(self._bodies, arrival.client) as held:
            arrival = scope["state"]["arrival"] = arrival._replace(held=held)
            await self._count(arrival.client.owner, scope, receive, send_named)

    def _pace_of(self, status: int) -> Pace:
        return self._pace_of_strangers if status == 401 else self._pace

    def _check_load(self, client: Client) -> None:
        if not self._shedder.takes(client.owner):
            raise ApiError(
                Reason.ROUTER_OVERLOADED,
                "More requests come than the router can look at; those of the clients that send "
                "most are turned away.",
            )

    def _check_room(self, client: Client) -> None:
        if self._in_flight >= self._max_in_flight:
            raise ApiError(
                Reason.ROUTER_FULL,
                f"The router serves {self._max_in_flight} requests, which is its limit.",
            )
        most = client.caps.max_in_flight
        if most is not None and self._of_client[client.owner] >= most:
            raise ApiError(
                Reason.CLIENT_FULL,
                f"The router serves {most} requests with this API key, which is the key's limit.",
            )
        free = self._max_in_flight - self._in_flight
        if not client.may_hold(self._of_client[client.owner], free, PLACES_PART):
            raise ApiError(
                Reason.CLIENT_FULL,
                "The router serves as many requests with this API key as leave room for others: at "
                f"most {PLACES_PART:g} times the places that are free, by the key's weight.",
            )

    async def _count(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in and count it while it is inside."""
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
