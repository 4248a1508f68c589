"""Streams that leave a replica for their client directly: a real simulated engine, real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EVENT_STREAM,
    ClientLeftError,
    ClientStalledError,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
)
from sluice.protocol.streams import TICKET_HEADER
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.direct import MAX_HEAD_BYTES, DirectPort, sent_directly, ticket_in
from sluice.scheduling.request.objective import SLO
from tests.replica.controller_side import MirrorOfOne
from tests.replica.waiting import until

TOKENS = 6
PATIENCE_S = 30.0


@asynccontextmanager
async def running(step_s: float = 0.0) -> AsyncIterator[Replica]:
    truth = SimulatedEngineConfig(step_s=step_s, token_s=0, context_token_s=0, kv_blocks=64)
    engine = SimulatedEngine(
        EngineConfig(kind="simulated", policy="fcfs", simulated=truth), "replica-1", 8
    )
    port = DirectPort("127.0.0.1")
    await port.start()  # or what the engine makes meanwhile would come in one event
    config = ReplicaConfig(report_interval_s=0.001, max_live_requests=8)
    replica = Replica("replica-1", "node-1", engine, config, MirrorOfOne(), port=port)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()
        await port.stop()


def request(tokens: int = TOKENS, stream: bool = True) -> EngineRequest:
    body = {"model": "local", "prompt": "hello there", "max_tokens": tokens, "stream": stream}
    return EngineRequest(
        "r", "completions", body, SLO(), resumable=stream, direct_patience_s=PATIENCE_S
    )


@asynccontextmanager
async def reading(fetch: str) -> AsyncIterator[httpx.Response]:
    """A stream as a gateway reads it, from its first bytes on."""
    address, ticket = fetch.split(" ")
    headers = {TICKET_HEADER: ticket}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"http://{address}/", headers=headers) as answer,
    ):
        yield answer


def fetch_of(batch: Sequence[ResponseItem]) -> str:
    assert isinstance(batch[0], ResponseHead)
    return batch[0].fetch


class Reader:
    """Takes a stream as Envoy does."""

    def __init__(self) -> None:
        self.data = b""
        self.ended = False

    async def take(self, fetch: str, most: int = 1000) -> None:
        """All of it, or so many pieces."""
        async with reading(fetch) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_raw():
                self.data += piece
                most -= 1
                if not most:
                    return
            self.ended = True


async def serve(
    replica: Replica, asked: EngineRequest, most: int = 1000
) -> tuple[list[ResponseItem], Reader]:
    """What the replica says, and what the reader gets."""
    items: list[ResponseItem] = []
    reader = Reader()
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        async for batch in replica.generate(asked):
            items += batch
            if isinstance(batch[0], ResponseHead) and batch[0].fetch:
                tasks.create_task(reader.take(batch[0].fetch, most))
    return items, reader


def head_with(ticket: str) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: a\r\n{TICKET_HEADER}: {ticket}\r\n\r\n".encode()


def undated(data: bytes) -> bytes:
    return re.sub(rb'"created": ?\d+', b"", data)


def plain(items: Sequence[ResponseItem]) -> bytes:
    return b"".join(item.data for item in items if isinstance(item, ResponseChunk))


async def relayed_by(replica: Replica) -> list[ResponseItem]:
    """The same stream by way of the router."""
    alone = replace(request(), direct_patience_s=None)
    return [item async for batch in replica.generate(alone) for item in batch]


async def test_the_reader_gets_the_stream_and_the_router_what_was_sent_when() -> None:
    async with running() as replica:
        relayed = await relayed_by(replica)
        items, reader = await serve(replica, request())
    assert undated(reader.data) == undated(plain(relayed))
    assert reader.ended
    chunks = [item for item in relayed if isinstance(item, ResponseChunk)]
    head, *sent, tail = items
    assert isinstance(head, ResponseHead) and isinstance(tail, ResponseTail)
    assert tail.output_tokens == TOKENS
    tokens = [count for each in sent if isinstance(each, ResponseSent) for count in each.tokens]
    assert tokens == [chunk.tokens for chunk in chunks]
    times = [at_s for each in sent if isinstance(each, ResponseSent) for at_s in each.offsets_s]
    assert len(times) == len(tokens) and times == sorted(times)


async def test_what_is_no_stream_goes_the_other_way() -> None:
    async with running() as replica:
        items, reader = await serve(replica, request(stream=False))
    assert reader.data == b""
    head = items[0]
    assert isinstance(head, ResponseHead) and not head.fetch
    assert plain(items)


async def test_the_work_ends_when_the_reader_leaves() -> None:
    async with running(step_s=0.01) as replica:
        with pytest.raises(ExceptionGroup) as failed:
            await serve(replica, request(tokens=500), most=2)
        assert failed.group_contains(ClientLeftError)
        await until(lambda: replica.live_requests == 0)


async def test_the_work_ends_when_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.replica.streams.direct.FETCH_S", 0.05)
    async with running(step_s=0.01) as replica:
        with pytest.raises(ClientLeftError):
            async for _ in replica.generate(request(500)):
                pass


async def test_the_work_ends_when_the_reader_takes_nothing() -> None:
    async def endless() -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, EVENT_STREAM)
        while True:
            yield ResponseChunk(b"x" * (1 << 20), 1)

    port = DirectPort("127.0.0.1")
    left: list[BaseException] = []
    writers: list[asyncio.StreamWriter] = []
    with pytest.raises(ClientStalledError):
        async for item in sent_directly(endless(), port, 0.05, left.append):
            if isinstance(item, ResponseHead):
                address, ticket = item.fetch.split(" ")
                host, _, number = address.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(number), limit=1)
                writer.write(head_with(ticket))
                writers.append(writer)
    assert not left
    for writer in writers:
        writer.close()
    await port.stop()


@pytest.mark.parametrize("tokens", [1, 3_000])
async def test_chunks_of_any_size_arrive(tokens: int) -> None:
    sent = [ResponseChunk(bytes([65 + n]) * (300 << 10), tokens, (n,) * tokens) for n in range(9)]

    async def long() -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, EVENT_STREAM)
        for chunk in sent:
            yield chunk
            await asyncio.sleep(0)
        yield ResponseTail(1, 9)

    port = DirectPort("127.0.0.1")
    reader = Reader()
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        async for item in sent_directly(long(), port, 10, pytest.fail):
            if isinstance(item, ResponseHead):
                tasks.create_task(reader.take(item.fetch))
    assert reader.ended
    assert reader.data == b"".join(chunk.data for chunk in sent)
    await port.stop()


async def test_a_stream_of_nothing_is_not_to_be_fetched() -> None:
    async def empty() -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, EVENT_STREAM)
        yield ResponseTail(1, 0)

    port = DirectPort("127.0.0.1")
    items = [item async for item in sent_directly(empty(), port, 1, pytest.fail)]
    assert items == [ResponseHead(200, EVENT_STREAM), ResponseTail(1, 0)]
    await port.stop()


async def test_a_ticket_opens_its_stream_once_and_no_other_opens_it() -> None:
    async with running(step_s=0.01) as replica:
        batches = replica.generate(request(500))
        fetch = fetch_of(await anext(batches))
        address, ticket = fetch.split(" ")
        host, _, port = address.rpartition(":")
        name, _, secret = ticket.partition(".")
        for wrong in (f"{name}.{secret[:-1]}!", name, f"x.{secret}", "", "x" * 500):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head_with(wrong))
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            writer.close()
        taken = Reader()
        await taken.take(fetch, most=1)
        assert taken.data
        assert (await forwarded(fetch)).status_code == 404
        await batches.aclose()


async def forwarded(
    fetch: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"x"
) -> httpx.Response:
    """The answer to a client's request that a gateway forwards to where a stream is."""
    address, ticket = fetch.split(" ")
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            f"http://{address}/v1/completions",
            headers=[*(headers or [(TICKET_HEADER, ticket)]), ("cookie", "c" * 30_000)],
            content=body,
        )


async def test_a_gateway_gets_the_stream_as_the_answer_to_its_clients_request() -> None:
    wrong: list[httpx.Response] = []
    async with running() as replica:
        relayed = await relayed_by(replica)
        items: list[ResponseItem] = []
        async for batch in replica.generate(request()):
            items += batch
            if isinstance(batch[0], ResponseHead):
                fetch = batch[0].fetch
                twice = [(TICKET_HEADER, fetch.split(" ")[1])] * 2
                wrong += [await forwarded(fetch, each) for each in ([("x", "y")], twice)]
                good = asyncio.create_task(forwarded(fetch))
    assert [answer.status_code for answer in wrong] == [404, 404]
    assert wrong[0].json()["error"]["code"] == "not_found"
    answer = await good
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{EVENT_STREAM}; charset=utf-8"
    assert undated(answer.content) == undated(plain(relayed))
    assert sum(sum(item.tokens) for item in items if isinstance(item, ResponseSent)) == TOKENS


async def test_a_gateway_sees_that_a_stream_broke() -> None:
    async with running(step_s=0.01) as replica:
        batches = replica.generate(request(500))
        async with reading(fetch_of(await anext(batches))) as answer:
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                async for _ in answer.aiter_raw():
                    await batches.aclose()


@given(st.binary(max_size=300), st.integers(1, 40))
def test_what_a_reader_sends_means_the_same_however_it_arrives(data: bytes, step: int) -> None:
    def outcome(received: bytes) -> object:
        try:
            return ticket_in(received)
        except ValueError:
            return "refused"

    for end in range(0, len(data), step):
        early = outcome(data[:end])
        if early is not None:  # it is not read any further
            assert early == "refused" or outcome(data) == early
            return


def test_heads_are_read_whole_and_bounded() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nX-Sluice-Ticket:  a.b \r\n\r\nbody"
    assert ticket_in(head) == "a.b"
    assert ticket_in(head[:40]) is None
    with pytest.raises(ValueError, match="at most"):
        ticket_in(b"GET / HTTP/1.1\r\nx: " + b"x" * MAX_HEAD_BYTES)
