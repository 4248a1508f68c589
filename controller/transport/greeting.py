"""Connections that begin with a token: both ends of the greeting, and bounds of who may connect."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Final

from sluice.controller.transport.frames import Frames

WELCOME: Final = b"ok"
"""Answers the token."""

MAX_STRANGERS: Final = 64
"""Most connections that have not shown the token yet; one more drops the oldest of them, so that
idle connections cannot keep others out."""

GREETING_TIMEOUT_S = 5.0
"""Longest wait for the token, seconds."""


class Listener:
    """Listens for :class:`Guest` connections, on one event loop.

    Args:
        most: connections that may have shown the token at a time.

    Attributes:
        token: the secret that authenticates clients.
    """

    def __init__(self, most: int) -> None:
        self.token = secrets.token_hex(32)
        self._most = most
        # In order of arrival.
        self._strangers: dict[Guest, None] = {}
        self._trusted: set[Guest] = set()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    def guest(self) -> Guest:
        """A new connection."""
        raise NotImplementedError

    async def port(self, host: str) -> int:
        """The port where it listens; it starts to listen at the first call.

        Raises:
            OSError: ``host`` is no address of this node.
        """
        async with self._starting:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(self.guest, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def enter(self, connection: Guest) -> None:
        """A connection was made; it may evict the oldest one that has not shown the token yet."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
        self._strangers[connection] = None

    def trust(self, connection: Guest) -> bool:
        """A connection has shown the token. Returns whether there may be one more of these."""
        self._strangers.pop(connection, None)
        if len(self._trusted) >= self._most:
            return False
        self._trusted.add(connection)
        return True

    def leave(self, connection: Guest) -> None:
        """A connection ended."""
        self._strangers.pop(connection, None)
        self._trusted.discard(connection)


class Guest(Frames):
    """One client's connection, at the server. It begins as a stranger; its first frame, which goes
    to :meth:`greet`, must be the token.

    Args:
        listener: where it connects.
        most_bytes: max frame length once it is ``trusted``.
    """

    def __init__(self, listener: Listener, most_bytes: int) -> None:
        super().__init__(limit=len(listener.token))
        self.trusted = False
        self._listener = listener
        self._most_bytes = most_bytes
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the token."""
        super().connection_made(transport)
        self._listener.enter(self)
        loop = asyncio.get_running_loop()
        self._greeting = loop.call_later(GREETING_TIMEOUT_S, self._check_greeted)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        super().connection_lost(error)
        self._listener.leave(self)
        if self._greeting is not None:
            self._greeting.cancel()

    def greet(self, frame: bytes | bytearray) -> None:
        """Trust the client if ``frame`` is the token, or else close the connection."""
        known = hmac.compare_digest(frame, self._listener.token.encode())
        if not known or not self._listener.trust(self):
            self.abort()
            return
        self.trusted = True
        self.limit = self._most_bytes
        self.send(WELCOME)

    def _check_greeted(self) -> None:
        if not self.trusted:
            self.abort()


class Caller(Frames):
    """The connection, at a client. It shows the token; the first frame, which goes to
    :meth:`welcomed`, is the answer to it.

    Args:
        token: of the server.
        limit: max frame length, bytes.
    """

    def __init__(self, token: str, limit: int) -> None:
        super().__init__(limit)
        self._token = token
        self.greeted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the server accepted the token, once that is known."""

    async def reach(self, host: str, port: int) -> None:
        """Connect, and return when the server has accepted the token.

        Raises:
            OSError: it has not, or cannot be reached.
        """
        await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        # It may have ended in the loop's turn in which the answer came.
        if not await self.greeted or self.closed:
            raise ConnectionResetError("the token was not accepted")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Show the token."""
        super().connection_made(transport)
        self.send(self._token.encode())

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        super().connection_lost(error)
        if not self.greeted.done():
            self.greeted.set_result(False)

    def welcomed(self, frame: bytes | bytearray) -> None:
        """The answer to the token."""
        self.greeted.set_result(frame == WELCOME)
