"""Ingress middleware, the first stage of a request: its id, key and admission to the router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from prometheus_client import Gauge, Histogram
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.protocol.requests import Endpoint
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.errors import ApiError, Reason
from sluice.router.ingress.access import OPEN_PATH, PING_PATH, Access, is_for_operators
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.arrival import INFERENCE_PATHS, Arrival, endpoint_at, noted
from sluice.router.request.body import BodyBudget, HeldBytes
from sluice.router.tenancy.limits import NO_CAPS, Client, RateLimiter
from sluice.scheduling.tenancy.fair_shares import PLACES_PART
from sluice.telemetry.logs import REQUEST_ID

# Load shedding. A refusal costs a router about as much as a short answer, and clients that retry at
# once turn one refused request into hundreds a second. So refusals are sent at a limited rate, and
# while the event loop falls behind all the same, new requests are refused before their bodies are
# read, first those of the clients that send the most. The minimum delay of a period counts as the
# standing delay, as CoDel (Nichols and Jacobson, ACM Queue 10(5), 2012) has it for packets: a
# single long step of the loop causes no refusals.

REFUSALS_PER_S: Final = 100.0
"""Refusals a router sends per second, so that clients retrying at once cannot keep it busy."""

MAX_HOLD_S: Final = 5.0  # longest time that a refusal waits for its turn, seconds
TICK_S: Final = 0.05  # interval between measurements of the event loop's delay, seconds

MAX_DELAY_S: Final = 0.05
"""A standing delay beyond this is overload, seconds. It delays every token of every stream."""

PERIOD_S: Final = 0.5
"""A delay must last this long to count as standing, seconds; the rate is updated as often."""

ALWAYS_PER_S: Final = 100.0
"""Requests a second of all clients together that are always accepted. If the event loop is late at
a lower rate, the cause is a machine short of CPU time and not the requests."""

Pause = Callable[[float], Awaitable[object]]  # sleeps for the given number of seconds

Serve = Callable[[Request, Endpoint], Awaitable[Response]]
"""The response to a request of inference, or its error."""

_FALL: Final = 0.7
_RISE: Final = 1.1


@dataclass(slots=True)
class RefusalRate:
    """Spaces out refusals: ``per_s`` a second, of which as many at once after a pause. Beyond
    ``most`` waiting ones, refusals are sent without a wait. ``held``: how many wait. One per router
    process."""

    per_s: float
    most: int
    gauge: Gauge
    clock: Callable[[], float] = time.monotonic
    pause: Pause = asyncio.sleep
    next_s: float = -inf
    held: int = 0

    async def wait(self) -> None:
        """Return when the refusal may be sent, after :data:`MAX_HOLD_S` at the latest."""
        now_s = self.clock()
        turn_s = max(self.next_s, now_s - 1.0)
        # The bound keeps a long overload from delaying refusals long after its end.
        self.next_s = min(turn_s + 1 / self.per_s, now_s + MAX_HOLD_S)
        if turn_s <= now_s or self.held >= self.most:
            return
        self.held += 1
        self.gauge.inc()
        try:
            await self.pause(turn_s - now_s)
        finally:
            self.held -= 1
            self.gauge.dec()


class Shedder:
    """Decides which new requests a router accepts while its event loop falls behind.

    Clients share one rate limit, which falls from the busiest client's rate while there is a
    standing delay, and rises without one: clients that send little are refused last."""

    def __init__(
        self,
        delays: Histogram,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._delays = delays
        self._clock = clock
        self._pause = pause
        self.rate = inf
        """Requests a second that each client may send; infinite where there is no overload."""
        self._began_s = clock()
        self._came: Counter[str] = Counter()
        self._least_delay_s = inf
        self._ticks = 0

    def takes(self, owner: str) -> bool:
        """Whether a new request of this client is accepted. Counts it."""
        self._came[owner] += 1
        if self.rate == inf:
            return True
        span_s = max(PERIOD_S, self._clock() - self._began_s)
        return self._came[owner] <= max(1.0, self.rate * span_s)

    async def watch(self) -> None:
        """Measure the delay of the event loop, indefinitely."""
        while True:
            # Without requests nothing is refused, and at rest each tick would count.
            wait_s = TICK_S if self._came else PERIOD_S
            due_s = self._clock() + wait_s
            await self._pause(wait_s)
            self.tick(self._clock() - due_s)

    def tick(self, delay_s: float) -> None:
        """Record that the event loop runs ``delay_s`` late."""
        self._delays.observe(delay_s)
        self._least_delay_s = min(self._least_delay_s, delay_s)
        self._ticks += 1
        now_s = self._clock()
        span_s = now_s - self._began_s
        # A single late tick may be one long step of the loop.
        if span_s < PERIOD_S or self._ticks < 2:
            return
        self._set_rate(max(self._came.values(), default=0) / span_s)
        self._began_s, self._least_delay_s, self._ticks = now_s, inf, 0
        self._came.clear()

    def _set_rate(self, most: float) -> None:
        """Update the rate after a period. ``most``: the busiest client's requests a second."""
        if self._least_delay_s > MAX_DELAY_S:
            least = ALWAYS_PER_S / max(1, len(self._came))
            self.rate = max(least, _FALL * min(self.rate, most))
        elif self.rate < inf:
            self.rate = _RISE * self.rate + 1
            if self.rate > 2 * most:
                self.rate = inf
        """Requests a second that each client may send; infinite where there is no overload."""


# CORS: the origins whose pages may call the API from a browser.


class Cors:
    """ASGI middleware outside the ingress middleware: a browser's preflight has no key. Never
    allows cookies or operators' paths. ``origins``: as ``https://app.example``; ``*``: any."""

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


_CLIENT_REQUEST_ID = wire.CLIENT_REQUEST_ID_HEADER.encode()
HELD_BYTES: Final = 512 << 20
"""Minimum of what the bodies of all requests in a router may have together, bytes."""

_COUNTED_PATHS = frozenset((*INFERENCE_PATHS, wire.QUOTE_PATH, "/v1/files", "/v1/batches"))
"""Whose POST counts towards rate limits; a batch must not block its own cancellation."""

_RETRIED_STATUSES = frozenset((401, 429, 503))
"""After these statuses clients retry the same request."""


class IngressMiddleware:
    """ASGI middleware around the API: request ids, access, limits and overload, before bodies are
    read.

    Refusals are spaced out; those without a valid key have a separate rate, so that they do not
    delay others. A path may end with a slash. ``serve`` and ``quote``: answer inference and quotes,
    past the application's routes and their wrappers, which take as long as reading the request."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        metrics: RouterMetrics,
        access: Access,
        limiter: RateLimiter,
        telemetry: Telemetry,
        shedder: Shedder,
        serve: Serve,
        quote: Serve,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._app = app
        self._serve = serve
        self._quote = quote
        self._access = access
        self._limiter = limiter
        self._telemetry = telemetry
        self._shedder = shedder
        limited = (REFUSALS_PER_S, config.max_in_flight, metrics.held_refusals, clock, pause)
        self._refusals, self._refusals_of_strangers = RefusalRate(*limited), RefusalRate(*limited)
        self._max_in_flight = config.max_in_flight
        held_bytes = max(HELD_BYTES, 2 * config.max_body_bytes)
        self._bodies = BodyBudget(held_bytes, metrics.held_bytes)
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
        theirs = dict(reversed(scope["headers"])).get(_CLIENT_REQUEST_ID)
        recorded = "" if theirs is None else noted(theirs.decode("latin-1"))
        arrival = Arrival(secrets.token_hex(16), self._clock(), client_request_id=recorded)
        # The server runs each request in a task, and so in a context, of its own.
        REQUEST_ID.set(arrival.request_id)
        refusal: list[Message] = []
        has_access = await self._admit(arrival, scope, receive, send, refusal)
        # The request's body and slot have been released by now.
        if refusal:
            await (self._refusals if has_access else self._refusals_of_strangers).wait()
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
        """Answer, or store a refusal in ``refusal``. Returns whether the client has access."""
        scope.setdefault("state", {})["arrival"] = arrival
        named = [(wire.REQUEST_ID_HEADER.encode(), arrival.request_id.encode())]

        async def send_named(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts:
                limited = counted and arrival.client.caps is not NO_CAPS
                limits = self._limiter.headers(arrival.client) if limited else []
                message["headers"] = [*message.get("headers", ()), *named, *limits]
            if refusal or (starts and limited_rate and message["status"] in _RETRIED_STATUSES):
                refusal.append(message)
            else:
                await send(message)

        path = scope["path"]
        counted = scope["method"] == "POST" and path in _COUNTED_PATHS
        limited_rate = path not in (OPEN_PATH, PING_PATH)
        endpoint, serve = (INFERENCE_PATHS.get(path) if counted else None), self._serve
        if counted and path == wire.QUOTE_PATH:
            endpoint, serve = "chat", self._quote
        has_access = False
        try:
            by_gateway = "endpoints" in scope["state"]
            client = self._access.check(path, scope["headers"], by_gateway)
            arrival = arrival._replace(client=client)
            has_access = True
            if endpoint is not None:
                if not self._shedder.takes(client.owner):
                    raise ApiError(
                        Reason.ROUTER_OVERLOADED,
                        "The router is overloaded; it refuses requests of the clients that send "
                        "the most.",
                    )
                self._check_room(client)
            if counted and client.caps is not NO_CAPS:
                self._limiter.count_request(arrival.client)
        except ApiError as error:
            if endpoint is not None:
                self._metrics.refused(endpoint, error.reason, arrival.client)
                self._telemetry.ended_early(arrival, endpoint, error.reason)
            await error.response(endpoint_at(path))(scope, receive, send_named)
            return has_access
        if endpoint is None:
            scope["state"]["arrival"] = arrival
            await self._app(scope, receive, send_named)
            return True
        owner = client.owner
        self._in_flight += 1
        self._of_client[owner] += 1
        self._metrics.in_flight.inc()
        try:
            with HeldBytes(self._bodies, client) as held:
                scope["state"]["arrival"] = arrival._replace(held=held)
                response = await serve(Request(scope, receive), endpoint)
                await response(scope, receive, send_named)
        finally:
            self._in_flight -= 1
            self._of_client[owner] -= 1
            if not self._of_client[owner]:
                del self._of_client[owner]  # keys come and go
            self._metrics.in_flight.dec()
        return True

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
