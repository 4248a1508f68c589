"""Plain TCP connections between processes: frames, four bytes of length and then that number of
bytes, of which the client's first one is a token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from math import inf
from typing import Final, cast

# How another process's monotonic clock differs from this one's, learned from its messages.
#
# No two hosts' clocks are compared directly: a message carries the sender's own time, and the
# message with the shortest delay shows best how the clocks differ. So an offset is too large by
# exactly the delay of the quickest message: neither the skew of wall clocks nor a step of one
# changes it.

WINDOW_S = 30.0
"""Messages of this window and the one before are judged together, seconds. Clocks drift by
milliseconds meanwhile; one that stopped (a moved VM) is corrected within three windows."""


class ClockOffset:
    """Learns the offset that converts a sender's times to the own clock."""

    __slots__ = ("_before_s", "_least_s", "_since_s")

    def __init__(self) -> None:
        self._least_s = inf
        self._before_s = inf
        self._since_s = -inf

    @property
    def seconds(self) -> float:
        """The offset; infinite before the first message."""
        return min(self._least_s, self._before_s)

    def observe(self, sent_s: float, now_s: float) -> float:
        """A message arrived at ``now_s``; it was sent at ``sent_s`` on the sender's clock. Returns
        its delay beyond that of the quickest message, seconds, at least 0."""
        offset_s = now_s - sent_s
        if now_s - self._since_s >= WINDOW_S:
            recent = now_s - self._since_s < 2 * WINDOW_S
            self._before_s = self._least_s if recent else inf
            self._least_s, self._since_s = offset_s, now_s
        else:
            self._least_s = min(self._least_s, offset_s)
        return offset_s - self.seconds


_LENGTH: Final = 4

DEAD_AFTER_S: Final = 30
"""Silence of the other host after which the system ends a connection, seconds: a host that vanished
closes no connection. A program that hangs is not detected: its host's kernel still answers."""

WELCOME: Final = b"ok"
"""Answers the token."""

MAX_STRANGERS: Final = 64
"""Connections that have not shown the token yet; one more drops the oldest of them, so that idle
connections cannot keep others out."""

GREETING_TIMEOUT_S = 5.0
"""Longest wait for the token, seconds."""


def notice_dead_host(connection: socket.socket | None) -> None:
    """Have the system end a connection whose other host has vanished."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of these options; without them the system's own times apply.
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_AFTER_S // 3),
        ("TCP_KEEPINTVL", DEAD_AFTER_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * DEAD_AFTER_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Frames(asyncio.Protocol):
    """Splits received bytes into frames; one longer than ``limit`` bytes closes the connection."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        # No type check: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        notice_dead_host(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames. ``O(bytes)``, for any split of the input."""
        got: bytes | bytearray = data
        if self._rest:
            self._rest += data
            got = self._rest
        start, end = 0, len(got)
        while end - start >= _LENGTH and not self.closed:
            size = int.from_bytes(got[start : start + _LENGTH], "big")
            if size > self.limit:
                self.abort()
                return
            stop = start + _LENGTH + size
            if stop > end:
                break
            self.frame_received(got[start + _LENGTH : stop])
            start = stop
        if got is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest += got[start:]

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection ended."""
        self.closed = True
        self._rest.clear()

    def frame_received(self, frame: bytes | bytearray) -> None:
        """Handle one frame."""
        raise NotImplementedError

    def send(self, *frames: bytes) -> None:
        """Write frames, at once; does nothing on a closed connection."""
        if self._transport is not None and not self.closed and not self._transport.is_closing():
            parts = [part for each in frames for part in (len(each).to_bytes(_LENGTH, "big"), each)]
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Close the connection after all sent data has left. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


class Listener:
    """Listens for ``Guest`` connections on one event loop, at most ``most`` trusted ones."""

    def __init__(self, most: int) -> None:
        self.token = secrets.token_hex(32)
        self._most = most
        self._strangers: dict[Guest, None] = {}  # in order of arrival
        self._trusted: set[Guest] = set()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    def guest(self) -> Guest:
        """A new connection."""
        raise NotImplementedError

    async def port(self, host: str) -> int:
        """The port; it listens from the first call on. Raises OSError: ``host`` is no address of
        this node, or it was closed."""
        async with self._starting:
            if self._server is None and not self._closed:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(self.guest, host, 0)
        if self._closed or self._server is None:
            self.close()  # perhaps while the server was made
            raise ConnectionRefusedError("it takes no connections any more")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._closed = True
        if self._server is not None:
            self._server.close()

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
    """One client's connection, at the server: its first frame, which goes to :meth:`greet`, must be
    the token. Once it is ``trusted``, frames may have up to ``most_bytes``."""

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
    :meth:`welcomed`, is the answer to it."""

    def __init__(self, token: str, limit: int) -> None:
        super().__init__(limit)
        self._token = token
        self.greeted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the server accepted the token, once that is known."""

    async def reach(self, host: str, port: int) -> None:
        """Connect, until the server has accepted the token. Raises OSError: not accepted or
        reached."""
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
