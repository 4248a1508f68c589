"""A plain TCP connection for decisions and reports, which costs a fraction of an actor call.

A decision is on the path of every request, and every replica reports many times a second. So
neither is sent as an actor call while this connection is open; ``sluice bench decision`` measures
both ways. The actor listens on its node's address, on a port that the system chooses, and serves
clients that present the token from :meth:`RouteServer.endpoint`.
:mod:`sluice.controller.transport.wire_format` has the messages; answers come in the order of the
questions.

A message that arrives later than its sender waits for the answer, because the controller or the
network stalled, is not handled: its sender would not use what it reserves. Right after the greeting
a client asks for no decisions, which shows how the clocks differ
(:mod:`sluice.controller.transport.clock_offset`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec

from sluice.controller.messages import (
    ReplicaDelta,
    ReportReply,
    RouteDecision,
    RouteQuery,
    RouteReply,
)
from sluice.controller.transport import query_wire, report_wire
from sluice.controller.transport.clock_offset import ClockOffset
from sluice.controller.transport.failure import NoAnswerError
from sluice.controller.transport.frames import Frames
from sluice.controller.transport.greeting import Caller, Guest, Listener
from sluice.controller.transport.report_queue import ReportQueue
from sluice.controller.transport.window import Decide, Window
from sluice.controller.transport.wire_format import (
    FORMAT,
    MAX_FRAME,
    Refused,
    Report,
    Reported,
    Route,
    Routed,
    decode_answer,
    decode_question,
    encode,
)

MAX_CONNECTIONS = 8192
"""Most connections that have shown the token."""

MAX_TIMEOUTS = 3
"""Questions, each asked after the one before ran out of time, that may stay without an answer
before the connection counts as dead. One is not enough: while a client's event loop is busy, its
deadline passes although the answer has arrived."""

_CONNECT_TIMEOUT_S = 2.0
_CONNECT_PAUSE_S = 1.0
_GREETING_LEFT_S = 60.0

_log = logging.getLogger(__name__)

TakeReport = Callable[[msgspec.Raw], ReportReply]
OnLate = Callable[[RouteQuery, RouteDecision], None]


class Endpoint(NamedTuple):
    """Address of a controller's plain connection, its access token and its message format."""

    host: str
    port: int
    token: str
    format: str = ""


class _Served(Guest):
    """One client's connection, at the controller."""

    def __init__(self, server: RouteServer) -> None:
        super().__init__(server, MAX_FRAME)
        self._server = server
        self._offset = ClockOffset()
        self._reports = False
        """Whether it has ever sent one: a replica's connection, which asks nothing."""

    def frame_received(self, frame: bytes | bytearray) -> None:
        if not self.trusted:
            self.greet(frame)
            return
        try:
            question = decode_question(frame)
        except (ValueError, RecursionError):
            self.abort()
            return
        now_s = self._server.clock()
        due_s = now_s + question.left_s - self._offset.hear(question.sent_s, now_s)
        window, reports = self._server.window, self._server.reports
        # Answers come in the order of the questions.
        if isinstance(question, Report):
            window.close_for(self)
            self._reports = True
            reports.add(self, question, due_s, len(frame))
            return
        if self._reports:
            reports.finish()
        queries = list(map(_query, question.queries))
        window.ask(self, question.number, queries, due_s)


def _query(data: msgspec.Raw) -> RouteQuery | None:
    try:
        return query_wire.decode(data)
    except (ValueError, RecursionError):
        return None


class RouteServer(Listener):
    """The controller's side.

    Args:
        route: called on the event loop with the queries of a message; ``None``: a malformed one.
        report: called on the event loop with the bytes of a report.
        clock: monotonic seconds.
        window_s: how long queries wait for others, see
            :class:`~sluice.controller.transport.window.Window`.
    """

    def __init__(
        self,
        route: Decide,
        report: TakeReport,
        clock: Callable[[], float] = time.monotonic,
        window_s: float = 0.0,
    ) -> None:
        super().__init__(MAX_CONNECTIONS)
        self.window = Window(self._route, clock, window_s)
        self.reports = ReportQueue(self._take, clock)
        self.clock = clock
        self._decide = route
        self._report = report

    def guest(self) -> Guest:
        """A connection of a router or a replica."""
        return _Served(self)

    async def endpoint(self, host: str) -> Endpoint:
        """The address it listens on; it starts to listen at the first call."""
        return Endpoint(host, await self.port(host), self.token, FORMAT)

    def _route(self, queries: list[RouteQuery | None]) -> RouteReply:
        begun_s = self.clock()
        try:
            return self._decide(queries)
        finally:
            self.reports.decided(self.clock() - begun_s)

    def _take(self, connection: Frames, question: Report, wanted: bool) -> None:
        answer: Reported | Refused = Refused(question.number, None)
        if wanted:
            try:
                answer = Reported(question.number, self._report(question.report))
            except ValueError as error:
                answer = Refused(question.number, str(error))
            except Exception:
                _log.exception("a report failed; closing the connection of its replica")
                connection.abort()
        connection.send(encode(answer))


class _Waiting(NamedTuple):
    """A pending question: the future for its answer, and its deadline."""

    answer: asyncio.Future[Any]
    due_s: float


class _Asking(Caller):
    """The connection, at a client."""

    def __init__(self, token: str, on_lost: Callable[[], None], on_late: OnLate) -> None:
        super().__init__(token, MAX_FRAME)
        self._on_lost = on_lost
        self._on_late = on_late
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        # Bounded: an answer clears all questions before it, and without answers the connection is
        # soon closed.
        self._late: dict[int, Sequence[RouteQuery]] = {}
        self._timeouts = 0
        self._last_timeout_s = -inf

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(NoAnswerError("unavailable"))
        self._on_lost()

    def frame_received(self, frame: bytes | bytearray) -> None:
        if not self.greeted.done():
            self.welcomed(frame)
            self._send_question(Route, [], _GREETING_LEFT_S)
            return
        try:
            answer = decode_answer(frame)
        except (ValueError, RecursionError) as error:
            _log.error("the controller's answer is malformed: %s", error)
            self.abort()
            return
        self._timeouts = 0
        number = answer.number
        waiting = self._waiting.get(number)
        if waiting is not None and waiting.answer.done():
            waiting = None
        late = self._late.get(number)
        if self._late:
            self._late = {asked: of for asked, of in self._late.items() if asked > number}
        if isinstance(answer, Refused):
            if waiting is not None:
                self._refused(waiting, answer.why)
        elif late and isinstance(answer, Routed):
            for query, decision in zip(late, answer.reply.decisions, strict=True):
                self._on_late(query, decision)
        elif waiting is not None:
            waiting.answer.set_result(answer.reply)

    def _refused(self, waiting: _Waiting, why: str | None) -> None:
        if why is not None:
            waiting.answer.set_exception(ValueError(why))
            return
        waiting.answer.set_exception(NoAnswerError("timeout"))
        # The deadline may have passed without a busy event loop noticing. If not, one of the hosts
        # stalled, and the controller misjudges the age of this client's messages: a new connection
        # learns the clock offset from scratch.
        if asyncio.get_running_loop().time() < waiting.due_s:
            self.abort()

    def _send_question(self, kind: type[Route] | type[Report], content: Any, left_s: float) -> int:
        number = next(self._numbers)
        self.send(encode(kind(number, asyncio.get_running_loop().time(), left_s, content)))
        return number

    async def ask(
        self,
        kind: type[Route] | type[Report],
        content: Any,
        timeout_s: float,
        queries: Sequence[RouteQuery] = (),
    ) -> Any:
        """The controller's reply to a question of this kind, which asks ``queries`` if any.

        Raises:
            NoAnswerError: the connection broke.
            TimeoutError: no answer came in time.
            ValueError: the controller refused the message.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        number = self._send_question(kind, content, timeout_s)
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = _Waiting(future, asked_s + timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it arrived in the loop turn in which the timeout fired
            self._late[number] = queries
            self._timed_out(asked_s)
            raise
        finally:
            del self._waiting[number]

    def _timed_out(self, asked_s: float) -> None:
        """Count a timeout; timeouts of concurrent questions count as one."""
        if asked_s < self._last_timeout_s:
            return
        self._last_timeout_s = asyncio.get_running_loop().time()
        self._timeouts += 1
        if self._timeouts >= MAX_TIMEOUTS:
            self.abort()


class RouteChannel:
    """A client's side: a connection that connects and reconnects in the background.

    A controller that died is detected at once, because the connection ends; one that hangs is
    detected after ``MAX_TIMEOUTS`` timeouts in a row, and until then each question waits until its
    deadline.

    Args:
        find: asks the controller for its endpoint; raises :class:`NoAnswerError`.
        on_lost: called when an open connection ends by itself.
        on_late: called with each decision that arrived after its question's deadline.
    """

    def __init__(
        self, find: Callable[[], Awaitable[Endpoint]], on_lost: Callable[[], None], on_late: OnLate
    ) -> None:
        self._find = find
        self._on_lost = on_lost
        self._on_late = on_late
        self._connection: _Asking | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        """Whether it can be used: the controller has accepted the token."""
        return self._connection is not None

    def connect_soon(self) -> None:
        """Start to connect, unless connected or connecting. Returns at once."""
        if self._connection is None and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def route(self, queries: Sequence[RouteQuery], timeout_s: float) -> RouteReply:
        """The decisions on ``queries``.

        Raises:
            NoAnswerError: the connection broke, or no answer came in time.
            ValueError: the controller refused the queries.
        """
        content = [msgspec.Raw(query_wire.encode(query)) for query in queries]
        reply: RouteReply = await self._ask(Route, content, timeout_s, queries)
        return reply

    async def report(self, delta: ReplicaDelta, timeout_s: float) -> ReportReply:
        """The answer to a report; it must fit
        (:func:`sluice.controller.transport.report_wire.fits`).

        Raises:
            NoAnswerError: the connection broke, or no answer came in time.
            ValueError: the controller refused the report.
        """
        content = msgspec.Raw(report_wire.encode(delta))
        reply: ReportReply = await self._ask(Report, content, timeout_s)
        return reply

    async def _ask(
        self,
        kind: type[Route] | type[Report],
        content: Any,
        timeout_s: float,
        queries: Sequence[RouteQuery] = (),
    ) -> Any:
        connection = self._connection
        if connection is None:
            raise NoAnswerError("unavailable")
        try:
            return await connection.ask(kind, content, timeout_s, queries)
        except TimeoutError:
            raise NoAnswerError("timeout") from None

    async def close(self) -> None:
        """Drop the connection and stop connecting."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    async def _connect(self) -> None:
        """One attempt and a pause. A success is followed by a pause too: connections that end right
        after they are made must not cause a reconnect loop."""
        try:
            await self._attempt()
            await asyncio.sleep(_CONNECT_PAUSE_S)
        finally:
            self._connecting = None

    async def _attempt(self) -> None:
        connection: _Asking | None = None
        try:
            endpoint = Endpoint(*await self._find())
            if endpoint.format != FORMAT:
                raise ConnectionRefusedError("the controller is of another version")
            made = connection = _Asking(endpoint.token, lambda: self._lost(made), self._on_late)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await made.reach(endpoint.host, endpoint.port)
            self._connection = made
        except (NoAnswerError, OSError, TimeoutError) as error:
            _log.debug("connecting to the controller for decisions failed: %s", error)
        except Exception:
            _log.exception("connecting to the controller for decisions failed")
        finally:
            if connection is not None and connection is not self._connection:
                connection.abort()

    def _lost(self, connection: _Asking) -> None:
        if self._connection is connection:
            self._connection = None
            self._on_lost()
