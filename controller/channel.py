"""A plain TCP connection for decisions: what an actor call costs a millisecond for, it does in a
tenth.

A decision is on the path of every request, so it is the one thing that does not travel as an actor
call while this connection stands. The actor listens on its node's address, on a port of the
system's choice; who knows the token that the actor hands out may ask. Messages are lines of JSON:
first the token, then ``[number, [query, ...]]``, answered by ``[number, epoch, [decision, ...]]``
or ``[number, null, "what was wrong"]``.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from controller.failure import NoAnswerError
from controller.messages import RouteDecision, RouteQuery, RouteReply
from scheduling.objective import SLO

MAX_LINE = 1 << 20
"""Longest message, bytes."""

MAX_CONNECTIONS = 4096
GREETING_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_CONNECT_PAUSE_S = 1.0

Route = Callable[[list[RouteQuery]], RouteReply]


class Endpoint(NamedTuple):
    """Where a controller takes decisions' queries, and the secret that opens it."""

    host: str
    port: int
    token: str


class _Lines(asyncio.Protocol):
    """Splits what arrives into lines, and closes on one that is too long."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No check: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.line_received(line)
        if len(self._rest) > MAX_LINE:
            self.close()

    def line_received(self, line: bytes) -> None:
        """Handle one message."""
        raise NotImplementedError

    def send(self, message: Any) -> None:
        """Write one message."""
        self.write(json.dumps(message, separators=(",", ":")).encode())

    def write(self, line: bytes) -> None:
        """Write one line; nothing on a closed connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line + b"\n")

    def close(self) -> None:
        """Drop the connection at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()


class _Served(_Lines):
    """One client's connection, at the controller."""

    def __init__(self, server: RouteServer) -> None:
        super().__init__()
        self._server = server
        self._trusted = False
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.enter(self):
            self.close()
            return
        loop = asyncio.get_running_loop()
        self._greeting = loop.call_later(GREETING_TIMEOUT_S, self._check_greeted)

    def connection_lost(self, _error: Exception | None) -> None:
        self._server.leave(self)
        if self._greeting is not None:
            self._greeting.cancel()

    def line_received(self, line: bytes) -> None:
        if not self._trusted:
            self._trusted = hmac.compare_digest(line, self._server.token.encode())
            if not self._trusted:
                self.close()
            return
        try:
            number, rows = json.loads(line)
            queries = [_query(row) for row in rows]
        except (TypeError, ValueError, RecursionError):
            self.close()
            return
        try:
            reply = self._server.route(queries)
        except ValueError as error:
            self.send((number, None, str(error)))
        else:
            self.send((number, reply.epoch, reply.decisions))

    def _check_greeted(self) -> None:
        if not self._trusted:
            self.close()


class RouteServer:
    """The controller's side. ``route`` is called for each message, on the event loop."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.token = secrets.token_hex(32)
        self._connections: set[_Served] = set()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def endpoint(self, host: str) -> Endpoint:
        """Where it listens; it begins to at the first call."""
        async with self._starting:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _Served(self), host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return Endpoint(host, port, self.token)

    def enter(self, connection: _Served) -> bool:
        """Whether there is room for another connection."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def leave(self, connection: _Served) -> None:
        """A connection ended."""
        self._connections.discard(connection)


class _Asking(_Lines):
    """The connection, at a client."""

    def __init__(self, token: str, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._token = token
        self._on_lost = on_lost
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[RouteReply]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(self._token.encode())

    def connection_lost(self, _error: Exception | None) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(NoAnswerError("unavailable"))
        self._on_lost()

    def line_received(self, line: bytes) -> None:
        number, epoch, answer = json.loads(line)
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if epoch is None:
            future.set_exception(ValueError(answer))
        else:
            decisions = tuple([RouteDecision(*decision) for decision in answer])
            future.set_result(RouteReply(epoch, decisions))

    async def ask(self, queries: Sequence[RouteQuery], timeout_s: float) -> RouteReply:
        number = next(self._numbers)
        future: asyncio.Future[RouteReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self.send((number, [_row(query) for query in queries]))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            del self._waiting[number]


class RouteChannel:
    """A client's side: a connection that is made, and made again, in the background.

    Args:
        find: asks the controller for its endpoint; raises :class:`NoAnswerError`.
        on_lost: called when an open connection ends by itself.
    """

    def __init__(self, find: Callable[[], Any], on_lost: Callable[[], None]) -> None:
        self._find = find
        self._on_lost = on_lost
        self._connection: _Asking | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        """Whether :meth:`route` can be called."""
        return self._connection is not None

    def connect_soon(self) -> None:
        """Begin to connect, if nobody does. Returns at once."""
        if self._connection is None and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def route(self, queries: Sequence[RouteQuery], timeout_s: float) -> RouteReply:
        """The decisions on ``queries``.

        Raises:
            NoAnswerError: the connection broke, or no answer came in time.
            ValueError: the controller refused the queries.
        """
        connection = self._connection
        if connection is None:
            raise NoAnswerError("unavailable")
        try:
            return await connection.ask(queries, timeout_s)
        except TimeoutError:
            connection.close()
            raise NoAnswerError("timeout") from None

    async def close(self) -> None:
        """Drop the connection and stop connecting."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _connect(self) -> None:
        """One attempt, and a pause after a failed one, so that attempts are bounded in rate."""
        try:
            endpoint = Endpoint(*await self._find())
            connection = _Asking(endpoint.token, self._lost)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: connection, endpoint.host, endpoint.port)
            self._connection = connection
        except (NoAnswerError, OSError, TimeoutError):
            await asyncio.sleep(_CONNECT_PAUSE_S)
        finally:
            self._connecting = None

    def _lost(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._on_lost()


def _row(query: RouteQuery) -> tuple[object, ...]:
    slo = query.slo
    return (
        query.key,
        query.prompt_tokens,
        query.waited_s,
        slo.ttft_s,
        slo.tpot_s,
        slo.e2e_s,
        slo.priority,
        slo.service_class,
    )


def _query(row: Any) -> RouteQuery:
    """The query in a row.

    Raises:
        TypeError, ValueError: it is none.
    """
    key, prompt_tokens, waited_s, *objective = row
    return RouteQuery(key, SLO(*objective), prompt_tokens, waited_s)
