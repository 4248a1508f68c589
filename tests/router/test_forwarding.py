"""Tokens that go from the connection to a replica straight to the client's: a real router's server,
real replicas with simulated engines, and connections between them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseHead
from sluice.protocol.streams import WINDOW_BYTES, Delivery
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.dispatch.attempt import Attempt, Piece
from sluice.router.ingress import http_server
from sluice.router.serve.replicas import ChannelStream
from sluice.scheduling.roles import Role
from tests.replica.waiting import until
from tests.router import test_streams
from tests.router.far_side import Edge, FarController, FarSide
from tests.router.listening import listening

TOKENS = 60


class Near(FarSide):
    """Replicas behind the router's own connections."""

    def __init__(self, *sides: test_streams.Side) -> None:
        super().__init__()
        self.sides = dict(zip("ab", sides, strict=False))
        self.streams: list[ChannelStream] = []

    def generate(  # type: ignore[override]
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role = "mixed"
    ) -> ChannelStream:
        assert target is not None
        self.streams.append(self.sides[target].stream(request))
        return self.streams[-1]

    async def models(self) -> dict[str, object]:
        return {"object": "list", "data": [{"id": "local"}]}


class System(NamedTuple):
    near: Near
    edge: Edge
    port: int


@asynccontextmanager
async def system(*engines: type[SimulatedEngine], step_s: float = 0.001) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(test_streams.connected(engine, step_s=step_s))
            for engine in engines
        ]
        near = Near(*sides)
        edge = Edge(near, FarController(*near.sides))
        server = await stack.enter_async_context(listening(edge))
        yield System(near, edge, server.port)


class Exchange(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def ask(system: System, version: str = "1.1", **more: Any) -> Exchange:
    """A streamed completion; the connection ends with it."""
    fields = {"model": "local", "prompt": "a prompt", "stream": True, "max_tokens": TOKENS, **more}
    body = json.dumps(fields).encode()
    # A small buffer, for the client that does not read.
    connection = await asyncio.open_connection("127.0.0.1", system.port, limit=1024)
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection[1].write(head.encode() + body)
    return Exchange(*connection)


def texts(body: bytes) -> list[str]:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


def unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        found, end, body = found + body[:length], body[length : length + 2], body[length + 2 :]
        assert end == b"\r\n"
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Piece | None]:
    """The pieces that the requests' own tasks have read."""
    pieces: list[Piece | None] = []
    own = Attempt.read

    async def read(attempt: Attempt) -> Piece | None:
        pieces.append(await own(attempt))
        return pieces[-1]

    monkeypatch.setattr(Attempt, "read", read)
    return pieces


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_tokens_need_no_turn_of_their_requests_task(
    version: str, reads: list[Piece | None]
) -> None:
    async with system(SimulatedEngine) as running:
        exchange = await ask(running, version)
        head, _, body = (await exchange.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), body
        assert (b"transfer-encoding: chunked" in head) == (version == "1.1")
        body = unchunked(body) if version == "1.1" else body
        assert len(texts(body)) == TOKENS and body.endswith(b"data: [DONE]\n\n")
        assert len(reads) < TOKENS / 4
        await until(lambda: not running.edge.sample("sluice_in_flight_requests"))
        labels = {"class": "standard", "type": "generated"}
        assert running.edge.sample("sluice_tokens_total", **labels) == TOKENS
        gaps = running.edge.sample("sluice_inter_token_seconds_count", **{"class": "standard"})
        assert 0 < gaps < TOKENS  # tokens that came together have one


class Waits(SimulatedEngine):
    """Sends one token."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[Any]:
        yield ResponseHead(200, "text/event-stream")
        yield ResponseChunk(b"data: 0\n\n", 1)
        await asyncio.Event().wait()


async def test_the_messages_of_one_read_leave_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async with system(Waits) as running:
        exchange = await ask(running)
        await exchange.reader.readuntil(b"data: 0\n\n")
        (stream,) = running.near.streams
        await until(lambda: stream.forward is not None and stream.waiter is not None)
        own, forwarded = stream.forward, []
        assert own is not None

        def forward(items: Sequence[Any]) -> bool:
            forwarded.append(len(items))
            return own(items)

        monkeypatch.setattr(stream, "forward", forward)
        frames = b""
        for token in (b"1", b"2", b"3"):
            chunks = [ResponseChunk(b"data: %b\n\n" % token, 1)]
            frame = msgspec.msgpack.encode([Delivery(stream.number, None, None, chunks, None)])
            frames += len(frame).to_bytes(4, "big") + frame
        stream.channel.data_received(frames)
        await exchange.reader.readuntil(b"data: 1\n\ndata: 2\n\ndata: 3\n\n")
        assert forwarded == [3]
        exchange.writer.close()
        await until(lambda: not running.edge.sample("sluice_in_flight_requests"))


class Floods(SimulatedEngine):
    """Sends without end, faster than anybody reads."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[Any]:
        yield ResponseHead(200, "text/event-stream")
        while True:
            yield ResponseChunk(b"data: %s\n\n" % (b"x" * 4096), 1)
            await asyncio.sleep(0)


async def test_a_client_that_does_not_read_stops_its_stream_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with system(Floods) as running:
        exchange = await ask(running)
        await exchange.reader.readline()
        (stream,) = running.near.streams
        # The client's buffers are full, and then the window.
        await until(lambda: stream.forward is None and stream.size > WINDOW_BYTES // 2)
        assert stream.waiter is None, "its task waits for the client"
        monkeypatch.setattr("sluice.router.dispatch.response.STALLED_READER_S", 0.05)
        other = await ask(running)
        await until(lambda: running.edge.sample("sluice_stalled_readers_total") == 1)
        # The first one reads again, and gets the rest, again without turns of its task.
        await exchange.reader.readexactly(16 << 20)
        await until(lambda: stream.forward is not None)
        for each in (exchange, other):
            each.writer.close()
        await until(lambda: not running.edge.sample("sluice_in_flight_requests"))
        for side in running.near.sides.values():
            await until(lambda side=side: not side.replica.live_requests)  # type: ignore[misc]


async def test_a_stream_resumes_where_forwarded_tokens_ended(reads: list[Piece | None]) -> None:
    async with system(SimulatedEngine, SimulatedEngine) as running:
        exchange = await ask(running, max_tokens=300)
        begun = await exchange.reader.readuntil(b'"text": " ')
        await exchange.reader.readuntil(b'"text": " ')
        for connection in list(running.near.sides["a"].server._trusted):
            connection.abort()
        rest = await exchange.reader.read()
        assert begun.startswith(b"HTTP/1.1 200") and rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert len(running.near.streams) == 2
        whole = await ask(running, max_tokens=300)
        _, _, body = (await whole.reader.read()).partition(b"\r\n\r\n")
        assert len(texts(unchunked(body))) == 300
        assert texts(unchunked(body))[-100:] == texts(rest)[-100:]
        assert len(reads) < 150


async def test_an_error_ends_one_stream_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with system(SimulatedEngine) as running:
        other = await ask(running, max_tokens=300)
        await other.reader.readuntil(b"data: ")
        exchange = await ask(running, max_tokens=300)
        await exchange.reader.readuntil(b"data: ")
        stream = running.near.streams[1]
        await until(lambda: stream.forward is not None)

        def fails(items: Any) -> bool:
            raise ZeroDivisionError

        monkeypatch.setattr(stream, "forward", fails)
        assert b"[DONE]" not in await exchange.reader.read()
        assert (await other.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        side = running.near.sides["a"]
        await until(lambda: not side.replica.live_requests)
        labels = {"class": "standard", "outcome": "failed", "endpoint": "completions"}
        assert running.edge.sample("sluice_requests_total", **labels) == 1


async def test_an_answered_request_leaves_no_reference_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else collections, which hold up all requests, had to look for what each request leaves."""
    monkeypatch.setattr(http_server, "_CHECK_S", 0.001)  # each connection is checked, too
    kept = "_Exchange", "CallResponse", "Call", "Answer", "Attempt", "ChannelStream", "_Outgoing"

    def left() -> Counter[str]:
        found = (type(each) for each in gc.get_objects())
        own = (each for each in found if str(each.__module__).startswith("sluice."))
        return Counter(each.__name__ for each in own if each.__name__ in kept)

    async with system(SimulatedEngine) as running:

        async def answered() -> None:
            exchange = await ask(running)
            assert (await exchange.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            exchange.writer.close()
            running.near.streams.clear()
            await until(lambda: not running.edge.sample("sluice_in_flight_requests"))

        gc.collect()
        before = left()
        gc.disable()
        try:
            for _ in range(4):
                await answered()
            await until(lambda: left() <= before)
        finally:
            gc.enable()
