"""One request of Envoy in the router's own application: keys, limits, objectives, placement and
errors are those of a request that comes to the router by HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message

from sluice.replica.engine import Endpoint
from sluice.router import wire
from sluice.router.errors import ApiError, Reason
from sluice.router.picker.messages import Headers, MalformedError
from sluice.router.request.arrival import endpoint_at

MAX_ANSWER_BYTES: Final = 64 << 20
"""Maximum of an answer that the router writes itself, bytes. Envoy gets it in one message."""

_STREAM: Final = wire.STREAM_HEADER.encode()

_OF_THE_BODY: Final = frozenset(
    (_STREAM, b"content-type", b"content-length", b"cache-control", b"x-accel-buffering")
)
"""Headers of an answer that come with its body: from the replica, if that sends it."""

_LENGTH: Final = frozenset((b"content-length",))
"""Envoy counts the body of a whole answer by itself."""

_log = logging.getLogger(__name__)


class Pick(NamedTuple):
    """A replica has begun the answer, and sends it to the reader with the ticket.

    Attributes:
        endpoint: ``HOST:PORT``.
        headers: for the response, which the replica does not know.
    """

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
    """The ASGI scope of a request, with Envoy's pseudo headers.

    Raises:
        MalformedError: a pseudo header is missing or invalid.
    """
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
    """A request in the application. Construct it on the event loop that runs the application.

    Args:
        endpoints: one of which must serve it; ``None``: any.

    Attributes:
        outcome: the application's answer, once a replica sends it or it is complete; ``None``: the
            client had left before.
        task: runs the application; it ends with the response.
        broken: a stream broke after :class:`Pick`.

    Raises:
        MalformedError: the headers are no request's.
    """

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
        """Return when the application reads the request's body. A request that it refuses before
        takes no memory for one."""
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
        """ASGI's ``receive``."""
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
        """ASGI's ``send``."""
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
