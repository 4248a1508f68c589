"""A router's HTTP server: its listening socket, its connections, and how it stops."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from contextlib import AsyncExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from sluice.router.config import RouterConfig, TlsConfig
from sluice.router.ingress.http_protocol import HEAD_S, IDLE_S, ClientProtocol, Clients

BACKLOG: Final = 2048

GONE_AFTER_S: Final = 60
"""A connection ends when its client has acknowledged nothing, or read nothing, for this long while
data is pending for it, or has answered no probe, seconds."""

STOP_S: Final = 2.0
"""How long an answer may take to end with an error, seconds."""

_CHECK_S: Final = 1.0
_OTHER_FILES: Final = 256
"""Of those that the process may open, for all but clients."""


class HttpServer:
    """Serves ``app``, its lifespan included, by the limits of ``config``.

    Args:
        idle_s: longest silence between two requests of a connection, seconds.
    """

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
    def stops(self) -> bool:
        """Whether it takes no new requests."""
        return self.clients.stops

    @property
    def listens(self) -> bool:
        """Whether it has a listening socket."""
        return self._server is not None and self._server.is_serving()

    async def start(self, listener: socket.socket) -> None:
        """Serve at a bound socket, see :func:`bound`, which is the server's from now on.

        Raises:
            OSError, ssl.SSLError: the certificate cannot be used.
        """
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
        """Take no new requests, and return when all are answered. Those that still run after
        ``limit_s`` end with an error.

        Args:
            listening: refuse new requests with a 503. Otherwise the listening socket closes, and
                the system gives new connections to other routers of the port.
        """
        self.clients.stops = True
        if not listening:
            self._close_listener()
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

    def _close_listener(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _wait(self, limit_s: float) -> None:
        """Until no request runs, at most for so long."""
        end_s = time.monotonic() + limit_s
        while self.clients.tasks and time.monotonic() < end_s:
            await asyncio.wait(self.clients.tasks, timeout=end_s - time.monotonic())

    async def _check(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_CHECK_S)
            self._set_date()
            if self._certificate is not None:
                self._certificate.renew()
            for connection in list(self.clients.connections):
                if isinstance(connection, ClientProtocol):
                    connection.check(now_s())

    def _set_date(self) -> None:
        self.clients.default_headers = [(b"date", formatdate(usegmt=True).encode())]


class Certificate:
    """The certificate of TLS, read again when its file changes.

    Raises:
        OSError, ssl.SSLError: it cannot be used.
    """

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
    """A socket at an address that several routers of this machine share.

    Raises:
        OSError: another program has the address.
    """
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
