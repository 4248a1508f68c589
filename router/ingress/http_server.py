"""A router's HTTP server: its listening socket, its connections, and how it stops."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from email.utils import formatdate
from math import inf
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from sluice.router import wire
from sluice.router.config import RouterConfig, TlsConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.request.arrival import endpoint_at

# One client's connection: uvicorn's HTTP/1.1 with bounds, strict heads and errors in JSON.
#
# uvicorn's parser adds trailers, the headers after a chunked body, to those of the head. A key or
# an SLO there would count although a proxy in front of the router has not seen it, so trailers are
# dropped.

MAX_HEAD_BYTES: Final = 64 << 10  # maximum size of a request line and its headers, bytes
MAX_HEADERS: Final = 256  # maximum number of a request's headers

HEAD_S: Final = 10.0
"""Longest time for a request's head, from its first byte or a connection's begin, seconds."""

IDLE_S: Final = 60.0  # longest silence within a request's body, and between two requests, seconds

LINGER_S: Final = 2.0
"""How long what a client still sends is thrown away after its last answer, seconds. If there were
something to read when the connection closes, its kernel would throw away the answer."""

ASK_EVERY_S: Final = 5.0
"""How often a client that sends no more, and waits, is asked whether it still reads, seconds."""

RESET_WITHIN_S: Final = (0.02, 0.2)
"""When the answer of a client that is gone is looked for first, seconds."""

_TCP_CLOSED: Final = 7
_URGENT: Final = b"\n"


class Clients(ServerState):
    """The connections of a router. ``most``: further ones are refused."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.stops = False
        """New requests are refused, and each connection ends with its current ones."""


class ClientProtocol(HttpToolsProtocol):
    """A connection. Call :meth:`check` about once a second."""

    server_state: Clients

    def __init__(self, config: Config, clients: Clients) -> None:
        super().__init__(config, clients, {})
        self.url = b""
        self._in_head = False
        self._head_bytes = 0
        self._due_s = inf
        self._refusal: ApiError | None = None
        self._lingers = False
        self._sends_no_more = False
        self._ask_again_s = inf
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop, like the methods with names of asyncio's."""
        super().connection_made(transport)
        self._due_s = self.loop.time() + HEAD_S
        if len(self.connections) > self.server_state.most:
            message = f"The router has {self.server_state.most} connections already."
            self._refuse(ApiError(Reason.ROUTER_FULL, message))

    def data_received(self, data: bytes) -> None:
        """Parse what the client has sent."""
        if self._refusal is not None or self._lingers:
            return
        # Counted before parsing: the parser keeps a header until it is complete.
        self._head_bytes += len(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(
                self._refusal or ApiError(Reason.INVALID_HTTP, "This is no valid HTTP/1.1.")
            )
        if not self._in_head:
            self._head_bytes = 0

    def _feed(self, data: bytes) -> None:
        """Parse ``data``. A request to upgrade (Java's to HTTP/2) is answered in HTTP/1.1: the
        parser skips its body and stops, so a second parser reads it without the upgrade. Raises
        httptools.HttpParserError: it is malformed, or a method below has refused it."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
            if not self._asks_for_another_protocol:  # CONNECT, to which no body belongs
                self.cycle.keep_alive = False
                return
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            head = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(lines))
            self.parser.feed_data(head)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        super().connection_lost(exc)
        if isinstance(self.cycle, _Exchange):
            self.cycle.tell()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more, but may still read: TCP has one sign for a half-close and for a
        client that is gone. So its requests are answered, and it is probed. A TLS client is gone.
        """
        waits = self.busy and not self.cycle.more_body
        if not waits or self._lingers or self.scheme == "https":
            return False
        self._sends_no_more = True
        self._ask_whether_it_reads()
        for after_s in RESET_WITHIN_S:
            self.loop.call_later(after_s, self._look_whether_it_reads)
        return True

    def on_message_begin(self) -> None:
        """Called by the parser, like the methods whose names begin so."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_head = True
        self._due_s = self.loop.time() + HEAD_S

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the head, or a trailer."""
        if not self._in_head:
            return
        if len(self.headers) == MAX_HEADERS:
            self._refusal = _head_too_large()
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What follows is the body and its trailers."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise ValueError
        if self._asks_for_another_protocol:
            return
        self._in_head = False
        self._due_s = self.loop.time() + IDLE_S
        version = self.parser.get_http_version()
        url = httptools.parse_url(self.url)
        path = (url.path or b"/").decode("ascii")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path or b"/",
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": {},
        }
        self.scope = scope  # type: ignore[assignment]
        stops = self.server_state.stops
        before = self.cycle
        keep_alive = version == "1.1" and self.parser.should_keep_alive() and not stops
        self.cycle = cycle = _Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        scope["state"] |= {wire.FORWARD: cycle.forward, wire.WATCH: cycle.watch}
        app: Any = _refuse_stopping if stops else self.app
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._due_s = self.loop.time() + IDLE_S
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._asks_for_another_protocol:
            return
        self._due_s = inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered. Called by uvicorn."""
        if self._answering is not None and not self._answering.keep_alive:
            self._close()
            return
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._refusal is not None:
            self._end(self._refusal)
        elif self._sends_no_more:
            self.transport.close()
        elif self._in_head:
            self._unset_keepalive_if_required()
            self._due_s = self.loop.time() + HEAD_S

    def check(self, now_s: float) -> None:
        """Close the connection if its client is late or gone."""
        if self._sends_no_more:
            self._look_whether_it_reads()
            if now_s >= self._ask_again_s:
                self._ask_whether_it_reads()
        if now_s < self._due_s or self.flow.read_paused:
            return
        if self._lingers:
            self.transport.close()
            return
        cycle = self.cycle
        if self._in_head and cycle is not None and not cycle.response_complete:
            return  # its next request may come slowly while this one is answered
        if not self._in_head and cycle is None:
            self.transport.close()  # it has sent nothing
            return
        part, limit_s = ("head", HEAD_S) if self._in_head else ("body", IDLE_S)
        message = f"The {part} of the request is not complete after {limit_s:.0f} s of silence."
        self._refuse(ApiError(Reason.REQUEST_TIMEOUT, message))

    @property
    def _asks_for_another_protocol(self) -> bool:
        """Whether the parser skips the body of the current request; see :meth:`_feed`."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def stop(self) -> None:
        """End an answer that still runs, with an error."""
        if isinstance(self._answering, _Exchange) and not self._answering.response_complete:
            self._answering.stop()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error once the requests before are answered, and close."""
        self._refusal = error
        self._due_s = inf
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._end(error)
        elif not cycle.more_body:
            self.flow.pause_reading()  # it is answered first
        elif self.pipeline:
            assert self._answering is not None
            self.pipeline.popleft()  # the request at fault; those before it are answered first
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        elif cycle.response_started:
            self._close()
        else:
            self._end(error)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _end(self, error: ApiError) -> None:
        endpoint = endpoint_at(self.url.decode("latin-1"))
        response = error.response(endpoint, {wire.REQUEST_ID_HEADER: secrets.token_hex(16)})
        headers = [*self.server_state.default_headers, *response.raw_headers]
        lines = [b"%s: %s\r\n" % header for header in (*headers, (b"connection", b"close"))]
        head = (STATUS_LINE[response.status_code], *lines, b"\r\n")
        self.transport.write(b"".join((*head, response.body)))
        self._close()

    def _close(self) -> None:
        """Close when the client has read the last answer."""
        request_is_complete = self._refusal is None and not self.cycle.more_body
        if request_is_complete or self._sends_no_more or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingers = True
        self._due_s = self.loop.time() + LINGER_S
        self.flow.resume_reading()
        self.transport.write_eof()

    def _ask_whether_it_reads(self) -> None:
        """Send a byte of urgent data: readers skip it, and a closed socket's kernel answers with a
        reset. Once per answer: a second one would make the first an ordinary byte."""
        self._ask_again_s = inf
        connection = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return  # what is written now asks the same
        # The event loop's own object does not send.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.send(_URGENT, socket.MSG_OOB | socket.MSG_DONTWAIT)
        assert self._answering is not None
        if not self._answering.response_started:
            self._ask_again_s = self.loop.time() + ASK_EVERY_S

    def _look_whether_it_reads(self) -> None:
        """Drop a client whose kernel has reset: a loop that does not read never notices."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED:
            self.transport.abort()


class _Exchange(RequestResponseCycle):
    """A request and its answer, whose head leaves with the first part of the body."""

    _stops = False
    _head = b""
    _left: int | None = None
    """Bytes of the body to come, if the answer states its length."""
    _notify: Callable[[str], None] | None = None

    def stop(self) -> None:
        """Tell the application that the router stops."""
        self._stops = True
        self.message_event.set()
        self.tell()

    def watch(self, notify: Callable[[str], None] | None) -> None:
        """See :data:`sluice.router.wire.WATCH`."""
        self._notify = notify
        self.tell()

    def tell(self) -> None:
        """Tell who watches if the client has left, or the router stops."""
        if self._notify is not None and (self.disconnected or self._stops):
            notify, self._notify = self._notify, None
            notify("http.disconnect" if self.disconnected else wire.STOP_MESSAGE)

    async def receive(self) -> Any:
        """Called by the application, like :meth:`send`."""
        message = await super().receive()
        if self._stops and message["type"] != "http.disconnect":
            return {"type": wire.STOP_MESSAGE}
        return message

    def forward(self, data: bytes) -> bool:
        """Write a part of a streamed body; see :data:`sluice.router.wire.FORWARD`."""
        if not self.disconnected:
            self._write(data, last=False)
        return not self.flow.write_paused

    async def send(self, message: Any) -> None:
        """Called by the application."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self._head = self._head_of(message["status"], message["headers"])
            self.response_started = True
            self.waiting_for_100_continue = False
            return
        self._write(message.get("body", b""), not message.get("more_body", False))

    def _write(self, body: bytes, last: bool) -> None:
        """Write a part of the body, and the head before the first one."""
        if self.scope["method"] == "HEAD":
            body = b""
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (last and self._left):
                raise RuntimeError("the answer is not as long as it states")
        if self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body + b"0\r\n\r\n" if last else body
        self.transport.write(self._head + body if self._head else body)
        self._head = b""
        if last:
            self.response_complete = True
            self.message_event.set()
            self.on_response()

    def _head_of(self, status: int, own: Sequence[tuple[bytes, bytes]]) -> bytes:
        headers = [*self.default_headers, *own]
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        for name, value in own:
            if name == b"content-length":
                self._left = int(value)
        # HTTP/1.0 knows no chunks: the connection's end ends the body.
        is_old = self.scope["http_version"] != "1.1"
        has_no_body = self.scope["method"] == "HEAD" or status in (204, 304)
        if self._left is None and not is_old and not has_no_body:
            self.chunked_encoding = True
            headers.append((b"transfer-encoding", b"chunked"))
        lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n"]
        head = b"".join(lines)
        if not head.count(b"\r") == head.count(b"\n") == len(lines) or b"\0" in head:
            raise RuntimeError("a header has a line break")
        return head


async def _refuse_stopping(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(Reason.ROUTER_STOPPING, "This router stops.")
    named = {wire.REQUEST_ID_HEADER: secrets.token_hex(16)}
    await error.response(endpoint_at(scope["path"]), named)(scope, receive, send)


def _head_too_large() -> ApiError:
    return ApiError(
        Reason.HEAD_TOO_LARGE,
        f"The head of the request is too large; allowed: {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} "
        "headers.",
    )


BACKLOG: Final = 2048

GONE_AFTER_S: Final = 60
"""A connection ends when its client has acknowledged nothing, or read nothing, for this long while
data is pending for it, or has answered no probe, seconds."""

STOP_S: Final = 2.0  # how long an answer may take to end with an error, seconds

_CHECK_S: Final = 1.0
_OTHER_FILES: Final = 256  # of those that the process may open, for all but clients


class HttpServer:
    """Serves ``app`` and its lifespan. ``idle_s``: longest silence between two requests,
    seconds."""

    def __init__(self, app: FastAPI, config: RouterConfig, idle_s: float = IDLE_S) -> None:
        self._app = app
        self._config = config
        self._idle_s = idle_s
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.clients = Clients(max(1, min(2 * config.max_in_flight, files - _OTHER_FILES)))
        self._server: asyncio.Server | None = None
        self._stack = AsyncExitStack()
        self._checks: asyncio.Task[None] | None = None
        self._certificate: Certificate | None = None

    @property
    def listens(self) -> bool:
        """Whether it has a listening socket."""
        return self._server is not None and self._server.is_serving()

    async def start(self, listener: socket.socket) -> None:
        """Serve at a :func:`bound` socket, which the server owns from now on. Raises OSError,
        ssl.SSLError: the certificate cannot be used."""
        if self._config.tls is not None:
            self._certificate = Certificate(self._config.tls)
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        settings = uvicorn.Config(
            self._app,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=self._idle_s,  # type: ignore[arg-type]
        )
        settings.load()
        self._set_date()
        secure = self._certificate.context if self._certificate is not None else None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ClientProtocol(settings, self.clients),
            sock=listener,
            backlog=BACKLOG,
            ssl=secure,
            ssl_handshake_timeout=HEAD_S if secure is not None else None,
        )
        self._checks = asyncio.create_task(self._check())

    async def drain(self, limit_s: float, listening: bool = False) -> None:
        """Return when all requests are answered; after ``limit_s`` they end with an error.
        ``listening``: refuse new ones with a 503; else they go to other routers of the port."""
        self.clients.stops = True
        if not listening and self._server is not None:
            self._server.close()
        for connection in list(self.clients.connections):
            # It closes now, or with the answer that it waits for.
            if not listening or (isinstance(connection, ClientProtocol) and connection.busy):
                connection.shutdown()
        await self._wait(limit_s)
        for connection in list(self.clients.connections):
            if isinstance(connection, ClientProtocol):
                connection.stop()
        await self._wait(STOP_S)

    async def stop(self, limit_s: float) -> None:
        """:meth:`drain`, and end everything. Idempotent."""
        await self.drain(limit_s)
        for connection in list(self.clients.connections):
            connection.transport.abort()
        if self._checks is not None:
            self._checks.cancel()
        await self._stack.aclose()

    async def _wait(self, limit_s: float) -> None:
        """Until no request runs, at most for so long."""
        end_s = time.monotonic() + limit_s
        while self.clients.tasks and time.monotonic() < end_s:
            await asyncio.wait(self.clients.tasks, timeout=end_s - time.monotonic())

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self._set_date()
            if self._certificate is not None:
                self._certificate.renew()
            self._check_connections()  # a loop here would keep its last one until the next check

    def _check_connections(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in list(self.clients.connections):
            if isinstance(connection, ClientProtocol):
                connection.check(now_s)

    def _set_date(self) -> None:
        self.clients.default_headers = [(b"date", formatdate(usegmt=True).encode())]


class Certificate:
    """TLS certificate, read again when changed. Raises OSError, ssl.SSLError: it cannot be used."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._stamp = self._stamp_now()
        self.context.load_cert_chain(config.certificate, config.key)

    def renew(self) -> None:
        """Use a changed certificate for new connections, as soon as it fits its key."""
        try:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return
            # A context that refuses a pair may have taken half of it.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self._config.certificate, self._config.key
            )
            self.context.load_cert_chain(self._config.certificate, self._config.key)
        except (OSError, ssl.SSLError):
            return  # half written; it is looked at again
        self._stamp = stamp

    def _stamp_now(self) -> tuple[int, ...]:
        files = (Path(self._config.certificate).stat(), Path(self._config.key).stat())
        return tuple(each for file in files for each in (file.st_mtime_ns, file.st_ino))


def bound(host: str, port: int) -> socket.socket:
    """A socket that several routers here share. Raises OSError: another program has the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    options = [
        (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
        (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1),
        # Connections inherit these.
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ]
    for name, value in (
        ("TCP_KEEPIDLE", GONE_AFTER_S),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * GONE_AFTER_S),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    try:
        for option in options:
            listener.setsockopt(*option)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}"
        ) from None
    return listener
