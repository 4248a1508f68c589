"""A plain TCP connection for decisions and reports, which costs a fraction of an actor call.

The actor listens on a port that the system chooses, for clients that present the token of
``RouteServer.endpoint``; without the connection, questions go as actor calls. Answers come in
the order of the questions. A message that arrives later than its sender waits is not handled:
its sender would not use what it reserves. A client first asks for no decisions, which shows how
the clocks differ."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from math import inf
from typing import Any, Final, Literal, NamedTuple

import msgspec

from sluice.protocol.connection import Caller, ClockOffset, Frames, Guest, Listener
from sluice.protocol.messages import (
    FORMAT,
    MAX_FRAME,
    Refused,
    ReplicaDelta,
    Report,
    Reported,
    ReportReply,
    Route,
    Routed,
    RouteReply,
    decode_answer,
    decode_query,
    decode_question,
    encode,
)
from sluice.scheduling.placement.placer import MAX_TOGETHER
from sluice.scheduling.request.job import RouteDecision, RouteQuery

# The error of a controller's client when the controller does not answer.

Failure = Literal["timeout", "unavailable", "error", "full"]


class NoAnswerError(Exception):
    """The controller gave no answer. ``reason``: ``timeout``; ``unavailable`` (known to be
    unresponsive, nothing was sent, or its process died); ``error`` (it failed in the call); or
    ``full`` (the client's queue)."""

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason)
        self.reason: Failure = reason


# Questions that wait for others for a short time, so that they are decided together.
#
# Which requests get the guarantees of a burst depends on all of them
# (:mod:`sluice.scheduling.placement.placer`), and a burst comes from several routers, in several
# messages.

Decide = Callable[[list[RouteQuery | None]], RouteReply]


_Answer = Routed | Refused | None
"""``None``: the decision failed."""


class _Message(NamedTuple):
    """Queries that came in one message, on a connection or by an actor call, which waits for a
    future; ``due_s``: when its sender stops waiting for the answer."""

    sender: Frames | asyncio.Future[_Answer]
    number: int
    queries: list[RouteQuery | None]
    heard_s: float
    due_s: float

    def aged(self, now_s: float) -> _Message:
        """The same with the age of each request now."""
        held_s = now_s - self.heard_s
        queries = [q and q._replace(waited_s=q.waited_s + held_s) for q in self.queries]
        return self._replace(queries=queries)

    @property
    def abandoned(self) -> bool:
        """Whether its connection has ended, or its call."""
        sender = self.sender
        return sender.done() if isinstance(sender, asyncio.Future) else sender.closed

    def answer(self, answer: _Answer) -> None:
        """Send the answer; a connection ends where the decision failed."""
        if isinstance(self.sender, asyncio.Future):
            self.sender.set_result(answer)
        elif answer is None:
            self.sender.abort()
        else:
            self.sender.send(encode(answer))


class Window:
    """Decides together on the queries of all messages, actor calls too, that arrive within
    ``window_s`` seconds of the first, or as soon as there are ``MAX_TOGETHER``.

    Answers of a connection come in the order of its messages. Nothing is decided for a
    connection that has ended, or a sender that no longer waits. If deciding together fails, each
    message is decided by itself. ``route`` gets ``None`` for a malformed query."""

    def __init__(self, route: Decide, clock: Callable[[], float], window_s: float) -> None:
        self._route = route
        self._clock = clock
        self._window_s = window_s
        self._waiting: list[_Message] = []
        self._timer: asyncio.TimerHandle | None = None

    def ask(
        self,
        sender: Frames | asyncio.Future[_Answer],
        number: int,
        queries: list[RouteQuery | None],
        due_s: float,
    ) -> None:
        """Take a message, which arrives now."""
        self._waiting.append(_Message(sender, number, queries, self._clock(), due_s))
        if self._window_s <= 0.0 or sum(len(m.queries) for m in self._waiting) >= MAX_TOGETHER:
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._window_s, self.close)

    async def route(self, queries: list[RouteQuery | None]) -> RouteReply:
        """The decisions on the queries of an actor call. Raises ValueError: they are refused;
        RuntimeError: decisions of a window failed, and it was logged."""
        if self._window_s <= 0.0:
            return self._route(queries)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self.ask(answer, 0, queries, inf)
        found = await answer
        if isinstance(found, Routed):
            return found.reply
        raise RuntimeError("a decision failed") if found is None else ValueError(found.why)

    def close_for(self, connection: Frames) -> None:
        """Decide now if a message of ``connection`` waits."""
        if any(message.sender is connection for message in self._waiting):
            self.close()

    def close(self) -> None:
        """Decide on all queries that wait, and answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        now_s = self._clock()
        messages = [message for message in waiting if not message.abandoned]
        answers = iter(self._answers([m for m in messages if now_s <= m.due_s], now_s))
        for message in messages:
            late = now_s > message.due_s
            message.answer(Refused(message.number, None) if late else next(answers))

    def _answers(self, messages: Sequence[_Message], now_s: float) -> list[_Answer]:
        """The answer to each message."""
        if self._window_s > 0.0:
            messages = [message.aged(now_s) for message in messages]
        if len(messages) < 2:
            return [self._alone(message) for message in messages]
        try:
            reply = self._route([query for message in messages for query in message.queries])
        except Exception:
            _log.exception("deciding %d messages together failed; deciding each", len(messages))
            return [self._alone(message) for message in messages]
        rest = iter(reply.decisions)
        return [
            Routed(m.number, reply._replace(decisions=tuple(islice(rest, len(m.queries)))))
            for m in messages
        ]

    def _alone(self, message: _Message) -> _Answer:
        try:
            return Routed(message.number, self._route(message.queries))
        except ValueError as error:
            return Refused(message.number, str(error))
        except Exception:
            _log.exception("a decision failed")
            return None


# Reports that have arrived and wait for their turn beside decisions.
#
# A request waits for its decision, and nothing waits for a report. But reports are many: all
# replicas of a large fleet together send more of them than one process can take in, and a
# connection that is always full is read to its end first. So a report only joins a queue when it
# is read, and the event loop looks for questions again after every :data:`TURN_S` of reports.
#
# Where there is not enough time for both, reports get as much as decisions: replicas of which
# nothing is heard count as aged, and nothing can be guaranteed there.

TURN_S: Final = 0.000_5
"""Reports are taken in for this long before questions are looked for, seconds, and for longer where
decisions took longer meanwhile."""

MAX_BYTES: Final = 16 << 20
"""Most bytes of reports that wait; for more the oldest are taken in at once."""


class _WaitingReports(NamedTuple):
    connection: Frames
    report: Report
    due_s: float
    size: int


class ReportQueue:
    """Takes reports in order; ``O(1)`` each beside ``take``, which also gets whether the sender
    still waits and is not called for a connection that has ended."""

    def __init__(self, take: Callable[[Frames, Report, bool], None], clock: Callable[[], float]):
        self._take = take
        self._clock = clock
        self.waiting: deque[_WaitingReports] = deque()
        self._bytes = 0
        self.owed_s = 0.0
        """Seconds that decisions took while reports waited."""
        self._scheduled = False

    def add(self, connection: Frames, report: Report, due_s: float, size: int) -> None:
        """A report of ``size`` bytes was read, whose sender waits until ``due_s``."""
        self.waiting.append(_WaitingReports(connection, report, due_s, size))
        self._bytes += size
        while self._bytes > MAX_BYTES:
            self._next()
        self._schedule()

    def finish(self) -> None:
        """Take in all that wait now."""
        while self.waiting:
            self._next()

    def _schedule(self) -> None:
        if self.waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until_s = self._clock() + max(TURN_S, self.owed_s)
        self.owed_s = 0.0
        while self.waiting:
            self._next()
            if self._clock() >= until_s:
                break
        self._schedule()

    def _next(self) -> None:
        connection, report, due_s, size = self.waiting.popleft()
        self._bytes -= size
        if not connection.closed:
            self._take(connection, report, self._clock() <= due_s)


MAX_CONNECTIONS = 8192
"""Most connections that have shown the token."""

MAX_TIMEOUTS = 3
"""Timeouts in a row after which the connection counts as dead. One is not enough: while a
client's event loop is busy, its deadline passes although the answer has arrived."""

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
        due_s = now_s + question.left_s - self._offset.observe(question.sent_s, now_s)
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
        return decode_query(data)
    except (ValueError, RecursionError):
        return None


class RouteServer(Listener):
    """The controller's side. ``route`` and ``report`` are called on the event loop, ``route``
    with ``None`` for a malformed query; ``window_s``: see ``Window``."""

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
        if not self.reports.waiting:
            return self._decide(queries)
        begun_s = self.clock()
        try:
            return self._decide(queries)
        finally:
            self.reports.owed_s += self.clock() - begun_s

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
        """The reply to a question. Raises NoAnswerError: the connection broke; TimeoutError;
        ValueError: the controller refused the message."""
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

    A dead controller is detected at once, a hung one after ``MAX_TIMEOUTS`` timeouts in a row.
    ``find`` asks for the endpoint or raises NoAnswerError; ``on_lost`` is called when an open
    connection ends by itself, ``on_late`` with each decision after its deadline."""

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
        """The decisions on ``queries``. Raises NoAnswerError: broken, or not in time;
        ValueError: refused."""
        content = [msgspec.Raw(encode(query)) for query in queries]
        reply: RouteReply = await self._ask(Route, content, timeout_s, queries)
        return reply

    async def report(self, delta: ReplicaDelta, timeout_s: float) -> ReportReply:
        """The answer to a report that ``fits``. Raises NoAnswerError: broken, or not in time;
        ValueError: refused."""
        content = msgspec.Raw(encode(delta))
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
