"""The endpoint picker's gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

import grpc
from starlette.types import ASGIApp, Message

from sluice.protocol.requests import Endpoint
from sluice.protocol.streams import TICKET_HEADER
from sluice.router import wire
from sluice.router.errors import ApiError, Reason, invalid
from sluice.router.picker.messages import (
    ENDPOINT_KEY,
    BodyMode,
    Headers,
    MalformedError,
    Part,
    Received,
    answer,
    decode,
    immediate,
    streamed,
)
from sluice.router.request.arrival import endpoint_at
from sluice.router.wire import KEY_HEADERS

# One request of Envoy in the router's own application: keys, limits, objectives, placement and
# errors are those of a request that comes to the router by HTTP.

MAX_ANSWER_BYTES: Final = 64 << 20  # that the router writes itself; Envoy gets it in one message
_STREAM: Final = wire.STREAM_HEADER.encode()

_OF_THE_BODY: Final = frozenset(
    (_STREAM, b"content-type", b"content-length", b"cache-control", b"x-accel-buffering")
)
"""Headers of an answer that come with its body: from the replica, if that sends it."""

_LENGTH: Final = frozenset((b"content-length",))
"""Envoy counts the body of a whole answer by itself."""


class Pick(NamedTuple):
    """A replica at ``endpoint`` (``HOST:PORT``) has begun the answer and sends it to the reader
    with the ticket; it does not know these ``headers`` of the response."""

    endpoint: str
    ticket: str
    headers: Headers


class Whole(NamedTuple):
    """The router's own answer: an error, or any response that is no event stream."""

    status: int
    headers: Headers
    body: bytes


def whole_of(error: ApiError, endpoint: Endpoint | None = None) -> Whole:
    """The answer of ``endpoint`` that reports an error."""
    response = error.response(endpoint)
    headers = _without(_LENGTH, response.raw_headers)
    return Whole(response.status_code, headers, bytes(response.body))


def _without(left_out: Collection[bytes], headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name not in left_out]


def scope_of(headers: Headers) -> dict[str, Any]:
    """The ASGI scope of a request. Raises MalformedError: a bad pseudo header."""
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    try:
        method = pseudo[b":method"].decode("ascii")
        target = pseudo[b":path"]
        path, _, query = target.partition(b"?")
        decoded = unquote_to_bytes(path).decode()
    except (KeyError, UnicodeDecodeError) as error:
        raise MalformedError(f"a request needs a method and a path, in UTF-8: {error}") from None
    if not path.startswith(b"/"):
        raise MalformedError("a path must begin with /")
    kept = [(b"host", pseudo.get(b":authority", b""))]
    kept += [pair for pair in headers if not pair[0].startswith(b":")]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.upper(),
        "scheme": "http",
        "path": decoded,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": kept,
        "client": None,
        "server": None,
        "state": {wire.FETCHES: True},
    }


class AppCall:
    """A request in the application, for one of ``endpoints``, constructed on its event loop.
    ``outcome`` is ``None`` if the client left before; ``broken``: a stream broke after
    :class:`Pick`. Raises MalformedError."""

    def __init__(
        self, app: ASGIApp, headers: Headers, endpoints: Collection[str] | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Pick | Whole | None] = loop.create_future()
        self._body: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue(1)
        self._wanted = asyncio.Event()
        self._over = asyncio.Event()
        self._status = 500
        self._headers: Headers = ()
        self._written = bytearray()
        self.broken = False
        scope = scope_of(headers)
        self._spoken = endpoint_at(scope["path"])
        scope["state"]["endpoints"] = endpoints
        self.task = asyncio.create_task(self._run(app, scope))

    async def wanted(self) -> None:
        """Wait until the application reads the body: a request refused before takes no memory."""
        await self._wanted.wait()

    async def feed(self, body: bytes, ends: bool) -> None:
        """More of the request's body."""
        self._wanted.clear()
        await self._body.put((body, ends))

    def leave(self) -> None:
        """The client has left. Idempotent."""
        self._over.set()

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        error = ApiError(Reason.INTERNAL, "The router failed; its log says why.")
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            _log.exception("a request that Envoy forwarded failed")
            self.broken = True
        finally:
            if not self.outcome.done():
                self.outcome.set_result(None if self._over.is_set() else self._failed(error))

    def _failed(self, error: ApiError) -> Whole:
        return whole_of(error, self._spoken)

    async def _receive(self) -> Message:
        self._wanted.set()
        body = asyncio.ensure_future(self._body.get())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((body, over), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return {"type": "http.disconnect"}
            data, ends = body.result()
            return {"type": "http.request", "body": data, "more_body": not ends}
        finally:
            body.cancel()
            over.cancel()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
            fetch = next((value for name, value in self._headers if name == _STREAM), None)
            if fetch is not None and not self.outcome.done():
                endpoint, _, ticket = fetch.decode("latin-1").partition(" ")
                self.outcome.set_result(
                    Pick(endpoint, ticket, _without(_OF_THE_BODY, self._headers))
                )
            return
        body = message.get("body", b"")
        if self.outcome.done():  # the replica sends the stream, and the router why it broke
            self.broken = self.broken or bool(body)
            return
        self._written += body
        if len(self._written) > MAX_ANSWER_BYTES:
            text = f"An endpoint picker can answer with at most {MAX_ANSWER_BYTES} bytes."
            self.outcome.set_result(self._failed(ApiError(Reason.TOO_LARGE, text)))
            self.leave()
        elif not message.get("more_body", False):
            headers = _without(_LENGTH, self._headers)
            self.outcome.set_result(Whole(self._status, headers, bytes(self._written)))


REQUEST_S: Final = 60.0  # longest wait for the next message of a request that is not complete
LINGER_S: Final = 600.0  # longest wait for the end of Envoy's stream: a client may be slow
SECRETS: Final = ("authorization", *KEY_HEADERS)
"""Headers that endpoints do not get: the router has checked them."""

Read = Callable[[], Awaitable[bytes | None]]  # the next message of Envoy; `None`: it sends no more

Write = Callable[[bytes], Awaitable[None]]


class BrokenError(Exception):
    """The response broke after the client had received some of it: Envoy must reset it."""


class Exchange:
    """Answers one stream of messages. ``calls`` holds its call, which may outlive the stream."""

    def __init__(
        self, app: ASGIApp, calls: set[asyncio.Task[None]], read: Read, write: Write
    ) -> None:
        self._app = app
        self._calls = calls
        self._read = read
        self._send = write
        self._writing = asyncio.Lock()
        # The endpoint picker protocol demands this mode of both.
        self._mode = self._response_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._subset: frozenset[str] | None = None
        self._has_body = self._has_trailers = False
        self._pick: Pick | None = None
        self._responded = False

    async def run(self) -> None:
        """Return when Envoy has ended the stream, or has an answer in place of the endpoint's.
        Raises MalformedError, BrokenError, or TimeoutError: no complete request."""
        async with asyncio.timeout(REQUEST_S):
            first = await self._next()
        if first is None:
            return
        if first.part is not Part.REQUEST_HEADERS:
            raise MalformedError(f"a stream must begin with request_headers, not {first.part}")
        self._has_body = not first.ends
        if first.modes is not None:
            self._mode, self._response_mode = first.modes
        if self._has_body and self._mode not in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED):
            text = (
                f"Envoy's external processing has request_body_mode {self._mode.name}; the "
                "endpoint picker needs FULL_DUPLEX_STREAMED or BUFFERED."
            )
            await self._write(immediate(*whole_of(ApiError(Reason.INTERNAL, text))))
            return
        self._subset = first.subset
        try:
            call = AppCall(self._app, first.headers, first.subset)
        except MalformedError as error:
            await self._write(immediate(*whole_of(invalid(str(error)))))
            return
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        parts = asyncio.create_task(self._follow(call))
        try:
            if await self._decide(call, first, parts):
                await asyncio.wait((parts, call.task), return_when=asyncio.FIRST_COMPLETED)
                if call.broken:
                    raise BrokenError
                await asyncio.wait((parts,), timeout=LINGER_S)
                if parts.done():
                    parts.result()
        finally:
            parts.cancel()
            # Once the endpoint has answered, it knows better than Envoy's stream whether the
            # client has all of it.
            if self._pick is None or not self._responded:
                call.leave()

    async def _decide(self, call: AppCall, first: Received, parts: asyncio.Task[None]) -> bool:
        """Answer the request. Returns whether an endpoint was chosen."""
        buffered = self._has_body and self._mode is BodyMode.BUFFERED
        if buffered:
            await self._write(answer(Part.REQUEST_HEADERS))
        if first.ends:
            await call.feed(b"", True)
        await asyncio.wait((call.outcome, parts), return_when=asyncio.FIRST_COMPLETED)
        if not call.outcome.done():
            parts.result()
            return False  # the client has left
        outcome = call.outcome.result()
        if outcome is None:
            await asyncio.wait((parts,), timeout=LINGER_S)
            return False
        if isinstance(outcome, Pick) and self._subset is not None:
            # The replica that was chosen may have gone, and Serve have taken another.
            names = {outcome.endpoint, outcome.endpoint.rpartition(":")[0]}
            if not names & self._subset:
                text = (
                    f"The gateway's subset of endpoints does not include {outcome.endpoint}, the "
                    "replica that was chosen."
                )
                outcome = whole_of(ApiError(Reason.NO_REPLICA, text))
        if isinstance(outcome, Whole):
            await self._write(immediate(*outcome))
            return False
        self._pick = outcome
        set_headers = [
            (ENDPOINT_KEY.encode(), outcome.endpoint.encode()),
            (TICKET_HEADER.encode(), outcome.ticket.encode()),
        ]
        if buffered:
            set_headers.append((b"content-length", b"0"))
            rest = (set_headers, SECRETS, outcome.endpoint)
            await self._write(answer(Part.REQUEST_BODY, *rest, clears=True))
            return True
        await self._write(answer(Part.REQUEST_HEADERS, set_headers, SECRETS, outcome.endpoint))
        # The replica has the body already.
        if self._has_body:
            for message in streamed(Part.REQUEST_BODY, b"", not self._has_trailers):
                await self._write(message)
        if self._has_trailers:
            await self._write(answer(Part.REQUEST_TRAILERS))
        return True

    async def _follow(self, call: AppCall) -> None:
        complete = not self._has_body
        while True:
            if not complete:
                await call.wanted()
            async with asyncio.timeout(None if complete else REQUEST_S):
                received = await self._next()
            if received is None:
                return
            if received.part in (Part.REQUEST_BODY, Part.REQUEST_TRAILERS):
                if complete and received.part is Part.REQUEST_BODY:
                    raise MalformedError("a request continues after its end")
                self._has_trailers = received.part is Part.REQUEST_TRAILERS
                ends = received.ends or self._mode is BodyMode.BUFFERED
                if not complete:
                    await call.feed(received.body, ends)
                    complete = ends
                elif self._mode is BodyMode.BUFFERED:
                    await self._write(answer(Part.REQUEST_TRAILERS))
                continue
            if self._pick is None:  # Envoy answers by itself: a timeout, say
                call.leave()
            await self._respond(received)

    async def _respond(self, received: Received) -> None:
        headers: Headers = ()
        if received.part is Part.RESPONSE_HEADERS:
            self._responded = True
            status = next((value for name, value in received.headers if name == b":status"), b"")
            if self._pick is not None and status == b"200":
                headers = self._pick.headers
        echoes = self._response_mode is BodyMode.FULL_DUPLEX_STREAMED
        if received.part is Part.RESPONSE_BODY and echoes:
            for message in streamed(Part.RESPONSE_BODY, received.body, received.ends):
                await self._write(message)
            return
        await self._write(answer(received.part, headers))

    async def _next(self) -> Received | None:
        data = await self._read()
        return None if data is None else decode(data)

    async def _write(self, message: bytes) -> None:
        async with self._writing:
            await self._send(message)


SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"

MORE_STREAMS: Final = 256  # beyond max_in_flight: the router refuses those itself
DRAIN_S: Final = 300.0  # longest wait for open streams at the end; Serve may end the router before
_KEEPALIVE: Final = (
    # A host that vanished is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_ROOM: Final = 1 << 20  # of a message, for what is not its body

_LIVENESS: Final = b"\n\x08liveness"  # HealthCheckRequest, and then its responses
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"

_log = logging.getLogger(__name__)


class PickerServer:
    """Listens for Envoy's external processing streams, and runs their requests in ``app``;
    ``healthy`` raises :class:`ApiError` if no replica takes requests."""

    def __init__(
        self,
        app: ASGIApp,
        healthy: Callable[[], Awaitable[Any]],
        max_body_bytes: int,
        max_in_flight: int,
    ) -> None:
        self._app = app
        self._healthy = healthy
        self._max_message_bytes = max_body_bytes + _ROOM
        self._max_streams = max_in_flight + MORE_STREAMS
        self._calls: set[asyncio.Task[None]] = set()
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which a node's routers may share. Raises OSError."""
        self._server = server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),
                *_KEEPALIVE,
            ),
            maximum_concurrent_rpcs=self._max_streams,
        )
        # Without deserializers handlers get bytes, and what is malformed gets an answer of ours.
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = int(server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"the endpoint picker cannot listen on {address}: {error}") from None
        await server.start()
        return bound

    async def stop(self) -> None:
        """Take no new streams, and wait for the open ones. Idempotent."""
        if self._server is not None:
            await self._server.stop(DRAIN_S)
        if self._calls:
            await asyncio.wait(tuple(self._calls), timeout=DRAIN_S)

    async def _process(self, _: AsyncIterator[bytes], context: Any) -> None:
        async def read() -> bytes | None:
            data = await context.read()
            return None if data is grpc.aio.EOF else data

        try:
            await Exchange(self._app, self._calls, read, context.write).run()
        except MalformedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request is not complete")
        except BrokenError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the response broke off")
        except grpc.aio.UsageError:
            _log.debug("Envoy ended a stream before its answer")

    async def _check(self, request: bytes, _: Any) -> bytes:
        """Whether the process lives, or else whether there are replicas for requests."""
        try:
            if request != _LIVENESS:
                await self._healthy()
        except ApiError:
            return _NOT_SERVING
        return _SERVING
