"""The decision channel over real sockets, with a real controller object behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from controller import channel as channel_module
from controller.channel import MAX_LINE, Endpoint, RouteChannel, RouteServer
from controller.failure import NoAnswerError
from controller.messages import RouteDecision, RouteQuery, RouteReply
from scheduling.objective import SLO

QUERY = RouteQuery(7, SLO(ttft_s=0.5, tpot_s=0.05, priority=3, service_class="fast"), 120, 0.25)


class Placed:
    """Notes what it is asked, and places everything on one replica."""

    def __init__(self) -> None:
        self.asked: list[list[RouteQuery]] = []

    def __call__(self, queries: list[RouteQuery]) -> RouteReply:
        self.asked.append(queries)
        if len(queries) > 2:
            raise ValueError("at most 2 queries")
        return RouteReply(11, tuple(RouteDecision("a", "placed") for _ in queries))


async def opened(channel: RouteChannel) -> None:
    async with asyncio.timeout(5):
        while not channel.open:  # noqa: ASYNC110 - it has no event, because nothing else waits
            await asyncio.sleep(0)


@asynccontextmanager
async def connected(server: RouteServer) -> AsyncIterator[tuple[RouteChannel, asyncio.Event]]:
    lost = asyncio.Event()

    async def find() -> Endpoint:
        return await server.endpoint("127.0.0.1")

    channel = RouteChannel(find, lost.set)
    channel.connect_soon()
    await opened(channel)
    try:
        yield channel, lost
    finally:
        await channel.close()


async def raw(server: RouteServer, *lines: bytes) -> bytes:
    """What the server sends back to ``lines`` until it closes or answers once."""
    endpoint = await server.endpoint("127.0.0.1")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        for line in lines:
            writer.write(line + b"\n")
        async with asyncio.timeout(5):
            return await reader.readline()
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        writer.close()


async def test_a_query_arrives_whole_and_its_decision_returns() -> None:
    placed = Placed()
    async with connected(RouteServer(placed)) as (channel, _):
        reply = await channel.route([QUERY, QUERY._replace(key=8, slo=SLO())], 5)
    assert reply == RouteReply(11, (RouteDecision("a", "placed"),) * 2)
    assert placed.asked == [[QUERY, QUERY._replace(key=8, slo=SLO())]]


async def test_concurrent_questions_get_their_own_answers() -> None:
    async with connected(RouteServer(Placed())) as (channel, _):
        replies = await asyncio.gather(
            *(channel.route([QUERY] * (1 + n % 2), 5) for n in range(50))
        )
    assert [len(reply.decisions) for reply in replies] == [1 + n % 2 for n in range(50)]


async def test_a_refusal_carries_its_reason() -> None:
    async with connected(RouteServer(Placed())) as (channel, lost):
        with pytest.raises(ValueError, match="at most 2"):
            await channel.route([QUERY] * 3, 5)
        assert not lost.is_set()


@pytest.mark.parametrize(
    "lines",
    [
        [b"guess", b"[1, []]"],
        [b"", b"[1, []]"],
        [b"[1, []]"],
    ],
)
async def test_without_the_token_nothing_is_answered(lines: list[bytes]) -> None:
    placed = Placed()
    assert await raw(RouteServer(placed), *lines) == b""
    assert placed.asked == []


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"{}",
        b"[1]",
        b"[1, 5]",
        b"[1, [[1, 2]]]",
        b'[1, [[1, 2, 0.0, -1, null, null, 1, "x"]]]',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_a_malformed_message_closes_the_connection(line: bytes) -> None:
    placed = Placed()
    server = RouteServer(placed)
    assert await raw(server, server.token.encode(), line) == b""
    assert placed.asked == []
    good = json.loads(await raw(server, server.token.encode(), b"[1, []]"))
    assert good == [1, 11, []], "the server itself goes on"


async def test_a_line_without_end_is_bounded() -> None:
    server = RouteServer(Placed())
    assert await raw(server, server.token.encode() + b"x" * (MAX_LINE + 1)) == b""


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GREETING_TIMEOUT_S", 0.05)
    assert await raw(RouteServer(Placed())) == b""


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_CONNECTIONS", 1)
    server = RouteServer(Placed())
    async with connected(server) as (channel, _):
        assert await raw(server, server.token.encode(), b"[1, []]") == b""
        assert (await channel.route([QUERY], 5)).epoch == 11


async def test_a_broken_connection_fails_what_waits_and_is_told() -> None:
    answered = Placed()
    server = RouteServer(answered)
    async with connected(server) as (channel, lost):
        for connection in tuple(server._connections):
            connection.close()
        with pytest.raises(NoAnswerError, match="unavailable"):
            await channel.route([QUERY], 5)
        async with asyncio.timeout(5):
            await lost.wait()
        assert not channel.open


async def test_no_answer_in_time_is_a_timeout() -> None:
    endpoint_lines: list[bytes] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoint_lines.append(await reader.readline())
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    async def find() -> Endpoint:
        return Endpoint("127.0.0.1", port, "secret")

    channel = RouteChannel(find, lambda: None)
    channel.connect_soon()
    await opened(channel)
    with pytest.raises(NoAnswerError, match="timeout"):
        await channel.route([QUERY], 0.01)
    assert endpoint_lines == [b"secret\n"]
    await channel.close()
    listener.close()
