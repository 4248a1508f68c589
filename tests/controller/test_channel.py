"""The decision channel over real sockets, with a real controller object behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf, nan
from typing import Any

import msgspec
import pytest

from sluice.controller.transport import channel as channel_module
from sluice.controller.transport.channel import (
    MAX_TIMEOUTS,
    Endpoint,
    NoAnswerError,
    RouteChannel,
    RouteServer,
)
from sluice.protocol import connection
from sluice.protocol.connection import MAX_STRANGERS, WELCOME
from sluice.protocol.messages import (
    FORMAT,
    MAX_FRAME,
    MAX_QUERIES,
    Refused,
    ReplicaDelta,
    Report,
    ReportReply,
    Route,
    Routed,
    RouteReply,
    decode_answer,
    decode_question,
    decode_report,
    encode,
)
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, delta, waiting_row

QUERY = RouteQuery(
    7,
    SLO(ttft_s=0.5, tpot_s=0.05, priority=3, service_class="fast"),
    120,
    0.25,
    avoid=("x", "y"),
    tenant=2**62 + 1,
    weight=2.5,
    client_request_id="mine",
    only=("x", "z"),
)


class Placed:
    """Notes what it is asked, and places everything on one replica."""

    def __init__(self) -> None:
        self.asked: list[list[RouteQuery | None]] = []
        self.reports: list[ReplicaDelta] = []

    def __call__(self, queries: list[RouteQuery | None]) -> RouteReply:
        if queries:
            self.asked.append(queries)
        if len(queries) > 2:
            raise ValueError("at most 2 queries")
        return RouteReply(11, tuple(RouteDecision("a", "placed") for _ in queries))

    def report(self, data: msgspec.Raw) -> ReportReply:
        delta = decode_report(data)
        self.reports.append(delta)
        if delta.draining:
            raise ValueError("no more reports")
        if delta.hung:
            raise RuntimeError("the mirror failed")
        return ReportReply(11, resync=delta.seq == 0)


def serving(placed: Placed, clock: Callable[[], float] = time.monotonic) -> RouteServer:
    return RouteServer(placed, placed.report, clock)


def _no_late_answers(query: RouteQuery, decision: RouteDecision) -> None:
    raise AssertionError(f"{decision} on {query} came late")


async def opened(channel: RouteChannel) -> None:
    async with asyncio.timeout(120):
        while not channel.open:  # noqa: ASYNC110 - it has no event, because nothing else waits
            await asyncio.sleep(0)


@asynccontextmanager
async def connected(server: RouteServer) -> AsyncIterator[tuple[RouteChannel, asyncio.Event]]:
    lost = asyncio.Event()

    async def find() -> Endpoint:
        return await server.endpoint("127.0.0.1")

    channel = RouteChannel(find, lost.set, _no_late_answers)
    channel.connect_soon()
    await opened(channel)
    try:
        yield channel, lost
    finally:
        await channel.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


async def received(reader: asyncio.StreamReader) -> bytes:
    """The next frame; empty at the end."""
    try:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    except asyncio.IncompleteReadError:
        return b""


async def raw(server: RouteServer, *frames: bytes) -> bytes:
    """The server's first answer after its greeting, if any, to ``frames`` that come in one packet;
    empty when it closes instead."""
    endpoint = await server.endpoint("127.0.0.1")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(b"".join(map(framed, frames)))
        async with asyncio.timeout(120):
            answer = await received(reader)
            return await received(reader) if answer == WELCOME else answer
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        writer.close()


async def test_a_query_arrives_whole_and_its_decision_returns() -> None:
    placed = Placed()
    async with connected(serving(placed)) as (channel, _):
        reply = await channel.route([QUERY, QUERY._replace(key=8, slo=SLO())], 5)
    assert reply == RouteReply(11, (RouteDecision("a", "placed"),) * 2)
    assert placed.asked == [[QUERY, QUERY._replace(key=8, slo=SLO())]]


async def test_a_report_arrives_whole_and_its_answer_returns() -> None:
    placed = Placed()
    sent = delta("a", 11, 3, {1: waiting_row(5, 10)}, finished=(7,))
    async with connected(serving(placed)) as (channel, _):
        assert await channel.report(sent, 5) == ReportReply(11, resync=False)
        assert await channel.report(sent._replace(seq=0), 5) == ReportReply(11, resync=True)
    assert [each.seq for each in placed.reports] == [3, 0]
    assert placed.reports[0].rows.tobytes() == sent.rows.tobytes()
    assert placed.reports[0].finished == (7,)
    assert placed.asked == []


async def test_a_refusal_carries_its_reason_and_leaves_the_connection() -> None:
    async with connected(serving(Placed())) as (channel, lost):
        with pytest.raises(ValueError, match="no more reports"):
            await channel.report(delta("a", 11, 3, draining=True), 5)
        with pytest.raises(ValueError, match="at most 2"):
            await channel.route([QUERY] * 3, 5)
        assert (await channel.route([QUERY], 5)).epoch == 11
        assert not lost.is_set()


async def test_a_report_that_fails_ends_the_connection_of_its_own_replica_only() -> None:
    server = serving(Placed())
    async with connected(server) as (replica, lost), connected(server) as (router, kept):
        with pytest.raises(NoAnswerError):
            await replica.report(delta("a", 11, 3)._replace(hung=True), 120)
        assert lost.is_set()
        assert (await router.route([QUERY], 120)).epoch == 11
        assert not kept.is_set()


async def test_reports_and_questions_of_one_moment_get_their_own_answers() -> None:
    async with connected(serving(Placed())) as (channel, _):
        asked = [
            channel.route([QUERY] * (n % 3), 5) if n % 3 else channel.report(delta("a", 11, n), 5)
            for n in range(42)
        ]
        replies = await asyncio.gather(*asked)
    for n, reply in enumerate(replies):
        assert isinstance(reply, RouteReply) == bool(n % 3)
        assert not n % 3 or len(reply.decisions) == n % 3


EMPTY = encode(Route(1, 0.0, 1.0, []))
"""Asks for nothing."""


@pytest.mark.parametrize("frames", [[b"guess", EMPTY], [b"", EMPTY], [EMPTY]])
async def test_without_the_token_nothing_is_answered(frames: list[bytes]) -> None:
    placed = Placed()
    assert await raw(serving(placed), *frames) == b""
    assert placed.asked == []


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"\xc1", id="no MessagePack"),
        pytest.param(b"", id="empty"),
        [3, 1, 0.0, 1.0, []],
        [1, 1, nan, 1.0, []],
        [1, 1, 0.0, inf, []],
        pytest.param([1, 1, 0.0, 1.0, [0] * (MAX_QUERIES + 1)], id="too many queries"),
        pytest.param(b"\x91" * 100_000, id="deep"),
        pytest.param(b"\x95\x01\x01\x00\x01\xdd\xff\xff\xff\xff", id="an array without items"),
    ],
)
async def test_a_malformed_message_closes_the_connection(message: Any) -> None:
    placed = Placed()
    server = serving(placed)
    data = message if isinstance(message, bytes) else encode(message)
    assert await raw(server, server.token.encode(), data) == b""
    assert placed.asked == placed.reports == []
    good = decode_answer(await raw(server, server.token.encode(), EMPTY))
    assert good == Routed(1, RouteReply(11, ())), "the server itself goes on"


@pytest.mark.parametrize(
    "query",
    [[], {}, 5, [1, 2], [*range(15)], [[[[]]]], {"key": 1}, encode(QUERY)],
    ids=["none", "map", "number", "short", "numbers", "nested", "keys", "bytes"],
)
async def test_a_malformed_query_spoils_no_other(query: Any) -> None:
    placed = Placed()
    server = serving(placed)
    rows = [msgspec.Raw(encode(query)), msgspec.Raw(encode(QUERY))]
    answer = decode_answer(
        await raw(server, server.token.encode(), encode(Route(1, 0.0, 1.0, rows)))
    )
    assert isinstance(answer, Routed) and len(answer.reply.decisions) == 2
    assert placed.asked == [[None, QUERY]]


@pytest.mark.parametrize("report", [[], {}, ["a", 1, 2, 0.0, "", "", "", [], False], None])
async def test_a_malformed_report_is_refused_with_what_is_wrong(report: Any) -> None:
    placed = Placed()
    server = serving(placed)
    data = encode(Report(1, 0.0, 1.0, msgspec.Raw(encode(report))))
    answer = decode_answer(await raw(server, server.token.encode(), data))
    assert isinstance(answer, Refused) and "malformed in" in (answer.why or "")
    assert placed.reports == []


async def test_a_frame_is_bounded_by_its_head_alone() -> None:
    server = serving(Placed())
    endpoint = await server.endpoint("127.0.0.1")
    for sent in (
        framed(server.token.encode()) + (MAX_FRAME + 1).to_bytes(4, "big"),
        (len(server.token) + 1).to_bytes(4, "big"),  # a stranger has room for the token only
    ):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(sent)
        async with asyncio.timeout(120):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() in (b"", framed(WELCOME))
        writer.close()


async def test_nothing_after_a_malformed_frame_of_the_same_packet_is_handled() -> None:
    placed = Placed()
    server = serving(placed)
    question = encode(Route(1, 0.0, 1.0, [msgspec.Raw(encode(QUERY))]))
    assert await raw(server, server.token.encode(), b"\xc1", question) == b""
    assert await raw(server, b"guess", server.token.encode(), question) == b""
    assert placed.asked == []


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", 0.05)
    assert await raw(serving(Placed())) == b""


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_CONNECTIONS", 1)
    server = serving(Placed())
    async with connected(server) as (channel, _):
        assert await raw(server, server.token.encode(), EMPTY) == b""
        assert (await channel.route([QUERY], 5)).epoch == 11


async def test_strangers_neither_shut_out_routers_nor_gather_without_end() -> None:
    server = serving(Placed())
    endpoint = await server.endpoint("127.0.0.1")
    strangers = [
        await asyncio.open_connection(endpoint.host, endpoint.port)
        for _ in range(MAX_STRANGERS + 1)
    ]
    try:
        # The oldest had to go for the youngest, and the others stay.
        async with asyncio.timeout(2):
            with contextlib.suppress(ConnectionResetError):
                assert await strangers[0][0].read() == b""
        assert len(server._strangers) == MAX_STRANGERS
        async with connected(server) as (channel, _):
            assert (await channel.route([QUERY], 5)).epoch == 11
    finally:
        for _, writer in strangers:
            writer.close()


@pytest.mark.parametrize("told", [("",), ("older",), ()])
async def test_a_controller_of_another_version_is_asked_by_actor_calls(
    told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Placed()
    server = serving(placed)
    endpoint = await server.endpoint("127.0.0.1")
    tried = asyncio.Event()
    monkeypatch.setattr(channel_module, "_CONNECT_PAUSE_S", 0.0)
    found = 0

    async def find() -> Endpoint:
        nonlocal found
        found += 1
        if found == 2:  # the first attempt is over
            tried.set()
        return Endpoint(*endpoint[:3], *told)

    lost: list[None] = []
    channel = RouteChannel(find, lambda: lost.append(None), _no_late_answers)
    async with asyncio.timeout(120):
        while not tried.is_set():
            channel.connect_soon()
            await asyncio.sleep(0)
    assert not channel.open
    assert lost == [], "it answers, if not here"
    await channel.close()


async def test_attempts_to_connect_are_bounded_in_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            assert seconds == channel_module._CONNECT_PAUSE_S
            paused.set()
            await asyncio.Event().wait()
        await sleep(0)

    attempts: list[str] = []
    server = serving(Placed())
    endpoint = await server.endpoint("127.0.0.1")

    def finder(token: str) -> Callable[[], Awaitable[Endpoint]]:
        async def find() -> Endpoint:
            attempts.append(token)
            return endpoint._replace(token=token)

        return find

    monkeypatch.setattr(asyncio, "sleep", pause)
    lost: list[None] = []
    refused = RouteChannel(finder("guess"), lambda: lost.append(None), _no_late_answers)
    refused.connect_soon()
    async with asyncio.timeout(120):
        await paused.wait()
    refused.connect_soon()
    await sleep(0)
    assert attempts == ["guess"]
    assert not refused.open
    assert lost == [], "a connection that was never open cannot be lost"
    await refused.close()

    # One that ends right after it was made is not made again at once, either.
    paused.clear()
    broken = RouteChannel(finder(server.token), lambda: lost.append(None), _no_late_answers)
    broken.connect_soon()
    async with asyncio.timeout(120):
        await paused.wait()
        assert broken.open
        for connection in tuple(server._trusted):
            connection.abort()
        while broken.open:
            await sleep(0)
    broken.connect_soon()
    await sleep(0)
    assert attempts == ["guess", server.token]
    assert len(lost) == 1
    await broken.close()


async def test_a_broken_connection_fails_what_waits_and_is_told() -> None:
    answered = Placed()
    server = serving(answered)
    async with connected(server) as (channel, lost):
        for connection in tuple(server._trusted):
            connection.abort()
        with pytest.raises(NoAnswerError, match="unavailable"):
            await channel.route([QUERY], 5)
        async with asyncio.timeout(120):
            await lost.wait()
        assert not channel.open


class Clocked:
    """A connection of which the test says when messages are sent, and when they are handled."""

    def __init__(self, server: RouteServer, clock: Clock) -> None:
        self.clock = clock
        self._server = server
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Clocked:
        endpoint = await self._server.endpoint("127.0.0.1")
        self._reader, self._writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        self._writer.write(framed(endpoint.token.encode()))
        assert await received(self._reader) == WELCOME
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def handled(
        self, kind: type[Route] | type[Report], content: Any, sent_s: float, left_s: float = 0.25
    ) -> bool:
        """Whether a question that was sent then, and is read now, was handled."""
        question = kind(next(self._numbers), sent_s, left_s, content)
        self._writer.write(framed(encode(question)))
        answer = decode_answer(await received(self._reader))
        assert answer.number == question.number
        if isinstance(answer, Refused):
            assert answer.why is None
            return False
        return True


@pytest.mark.parametrize("skew_s", [0.0, -2.0, 2.0, 36_000.0])
async def test_what_comes_after_its_sender_gave_up_is_not_handled(skew_s: float) -> None:
    """Whatever the sender's clock says, as long as it goes."""
    placed = Placed()
    clock = Clock()
    route = Route, [msgspec.Raw(encode(QUERY))]
    report = Report, msgspec.Raw(encode(delta("a", 11, 3)))
    async with asyncio.timeout(120), Clocked(serving(placed, clock), clock) as client:
        assert await client.handled(Route, [], clock() + skew_s)
        clock.advance(10.0)
        assert await client.handled(*route, clock() + skew_s - 0.2)
        # The controller stood still for 5 s, or the network did, and these were under way.
        for asked in (route, report):
            assert not await client.handled(*asked, clock() + skew_s - 5.0)
        assert await client.handled(*route, clock() + skew_s)
        assert await client.handled(*report, clock() + skew_s)
    assert len(placed.asked) == 2
    assert [each.seq for each in placed.reports] == [3]


async def test_a_client_that_is_misjudged_connects_anew() -> None:
    placed = Placed()
    clock = Clock()
    async with connected(serving(placed, clock)) as (channel, lost):
        assert (await channel.route([QUERY], 5)).epoch == 11
        # The client's machine stood still, and its clock with it.
        clock.advance(10.0)
        with pytest.raises(NoAnswerError, match="timeout"):
            await channel.route([QUERY], 5)
        async with asyncio.timeout(120):
            await lost.wait()
        assert not channel.open


class Slow:
    """A server that takes every token and answers when it is told."""

    def __init__(self) -> None:
        self.greeting = b""
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.greeting = await received(reader)
        writer.write(framed(WELCOME))
        with contextlib.suppress(ConnectionResetError):
            first = decode_question(await received(reader))
            assert isinstance(first, Route) and first.queries == [], "it asks nothing first"
            while frame := await received(reader):
                self.numbers.put_nowait(decode_question(frame).number)
        writer.close()

    def answer(self, number: int) -> None:
        assert self._writer is not None
        reply = RouteReply(11, (RouteDecision("a", "placed"),))
        self._writer.write(framed(encode(Routed(number, reply))))


@asynccontextmanager
async def slow() -> AsyncIterator[
    tuple[Slow, RouteChannel, list[None], asyncio.Queue[tuple[int, RouteDecision]]]
]:
    far = Slow()
    listener = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    lost: list[None] = []
    late: asyncio.Queue[tuple[int, RouteDecision]] = asyncio.Queue()

    async def find() -> Endpoint:
        return Endpoint("127.0.0.1", port, "secret", FORMAT)

    def take_back(query: RouteQuery, decision: RouteDecision) -> None:
        late.put_nowait((query.key, decision))

    channel = RouteChannel(find, lambda: lost.append(None), take_back)
    channel.connect_soon()
    await opened(channel)
    try:
        yield far, channel, lost, late
    finally:
        await channel.close()
        listener.close()


async def test_a_timeout_drops_its_question_alone_and_a_late_answer_is_given_back() -> None:
    async with slow() as (far, channel, lost, late), asyncio.timeout(120):
        assert far.greeting == b"secret"
        # Never several in a row: each late answer shows that the controller lives.
        for key in range(2 * MAX_TIMEOUTS):
            with pytest.raises(NoAnswerError, match="timeout"):
                await channel.route([QUERY._replace(key=key)], 0.01)
            far.answer(await far.numbers.get())
            assert await late.get() == (key, RouteDecision("a", "placed"))
        asked = asyncio.create_task(channel.route([QUERY], 120))
        far.answer(await far.numbers.get())
        assert (await asked).epoch == 11
        assert channel.open
        assert lost == []


async def test_what_is_late_costs_no_connection_though_the_client_was_too_busy_to_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with slow() as (far, channel, lost, _), asyncio.timeout(120):
        asked = asyncio.create_task(channel.route([QUERY], 5))
        number = await far.numbers.get()
        loop, connection = asyncio.get_running_loop(), channel._connection
        assert connection is not None
        # The answer is read in the turn of the event loop before the one that ends the wait.
        later_s = loop.time() + 6.0
        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda: later_s)
            connection.frame_received(encode(Refused(number, None)))
        with pytest.raises(NoAnswerError, match="timeout"):
            await asked
        asked = asyncio.create_task(channel.route([QUERY], 5))
        far.answer(await far.numbers.get())
        assert (await asked).epoch == 11
        assert channel.open
        assert lost == []


async def test_a_controller_that_hangs_is_lost_after_several_timeouts_in_a_row() -> None:
    async with slow() as (_, channel, lost, _), asyncio.timeout(120):
        for left in reversed(range(MAX_TIMEOUTS)):
            assert channel.open
            # Those under way at the same time count once.
            outcomes = await asyncio.gather(
                *(channel.route([QUERY], 0.01) for _ in range(5)), return_exceptions=True
            )
            told = [str(outcome) for outcome in outcomes]
            assert told[0] == "timeout"
            # The last time, the first may take the connection from those after it.
            assert set(told) <= ({"timeout"} if left else {"timeout", "unavailable"})
        while channel.open:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert lost == [None]
        with pytest.raises(NoAnswerError, match="unavailable"):
            await channel.route([QUERY], 5)
