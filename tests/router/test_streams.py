"""Calls over plain connections to a real replica with a simulated engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from sluice.protocol import streams as wire
from sluice.protocol.requests import (
    EngineDeadError,
    EngineRequest,
    RequestBody,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    ResponseTaken,
)
from sluice.protocol.streams import WINDOW_BYTES, StreamEndpoint, cost
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams import server as server_module
from sluice.replica.streams.server import MAX_BUFFERED_ITEMS, StreamServer
from sluice.router.errors import Reason
from sluice.router.serve.contract import Forward, ReplicaFailedError, ReplicaStream
from sluice.router.serve.replicas import Channels, ChannelStream
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from tests.replica.test_server import running
from tests.replica.waiting import until

NAME = "replica-1"


def request(request_id: str = "r", **body: Any) -> EngineRequest:
    fields = {"prompt": "a prompt", "stream": True, **body}
    return EngineRequest(request_id, "completions", RequestBody.of(fields), SLO())


class Handed:
    """What went another way."""

    forward: Forward | None = None

    def __init__(self) -> None:
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        yield [ResponseTail(1, 1)]

    def cancel(self) -> None:
        self.cancelled = True


class Side:
    """A replica that listens, and a router's connections."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.server = StreamServer(NAME, replica.open)
        self.channels = Channels(self.find)
        self.handed: list[Handed] = []
        self.found = 0
        self.format = wire.FORMAT

    async def find(self, replica_id: str, role: Role) -> StreamEndpoint:
        endpoint = await self.server.endpoint("127.0.0.1")
        self.found += 1
        return endpoint._replace(format=self.format)

    def elsewhere(self) -> ReplicaStream:
        self.handed.append(Handed())
        return self.handed[-1]

    def open(self, request: EngineRequest) -> ChannelStream | None:
        return self.channels.open(request, NAME, "mixed", self.elsewhere)

    def stream(self, request: EngineRequest) -> ChannelStream:
        stream = self.open(request)
        assert stream is not None
        return stream

    async def connect(self) -> None:
        assert self.open(request()) is None, "the first call goes another way"
        await until(lambda: self.channels.connected(NAME))


@asynccontextmanager
async def connected(
    engine_type: type[SimulatedEngine] = SimulatedEngine, **config: Any
) -> AsyncIterator[Side]:
    async with running(engine_type=engine_type, **config) as replica:
        side = Side(replica)
        await side.connect()
        try:
            yield side
        finally:
            await side.server.stop()


async def items_of(stream: ReplicaStream) -> list[ResponseItem]:
    return [item async for batch in stream for item in batch]


def data_of(items: Sequence[ResponseItem]) -> bytes:
    return b"".join(item.data for item in items if isinstance(item, ResponseChunk))


async def test_a_response_is_the_same_as_by_the_other_way() -> None:
    async with connected() as side:
        for fields in ({}, {"stream": False}, {"max_tokens": 0}):
            asked = request(**{"max_tokens": 30, **fields})
            got = await items_of(side.stream(asked))
            there = [item async for batch in side.replica.generate(asked) for item in batch]
            assert isinstance(got[0], ResponseHead)
            assert got[0] == there[0]
            assert got[0].replica_id == NAME
            assert data_of(got)[-14:] == data_of(there)[-14:]
            assert isinstance(got[-1], ResponseTail)
            assert isinstance(there[-1], ResponseTail)
            assert got[-1][:2] == there[-1][:2]
        await until(lambda: side.replica.live_requests == 0)


async def test_who_takes_a_request_says_so_first_where_it_is_asked_to() -> None:
    async with connected() as side:
        asked = replace(request(max_tokens=2), confirm=True)
        assert (await items_of(side.stream(asked)))[0] == ResponseTaken(NAME)


async def test_many_responses_share_a_connection() -> None:
    async with connected(max_live_requests=64) as side:
        streams = [side.stream(request(f"r{n}", max_tokens=n + 1)) for n in range(32)]
        got = await asyncio.gather(*map(items_of, streams))
        sizes = [
            sum(item.tokens for item in each if isinstance(item, ResponseChunk)) for each in got
        ]
        assert sizes == [n + 1 for n in range(32)]
        assert side.found == 1


async def test_a_full_replica_refuses_here_too() -> None:
    async with connected(step_s=3600.0, max_live_requests=1) as side:
        first = side.stream(request("a"))
        head, chunk, _ = await items_of(side.stream(request("b")))
        assert isinstance(head, ResponseHead)
        assert head.status == 503
        assert isinstance(chunk, ResponseChunk)
        first.cancel()
        await until(lambda: side.replica.live_requests == 0)


class Counts(SimulatedEngine):
    """Counts the items that left it; each token is an item of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left: Counter[str] = Counter()

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        for _ in range(int(request.body["max_tokens"])):
            self.left[request.request_id] += 1
            yield ResponseChunk(b"x", 1)


async def test_a_reader_that_waits_holds_the_engine_and_nobody_else() -> None:
    async with connected(Counts) as side:
        engine = side.replica.engine
        assert isinstance(engine, Counts)
        window = WINDOW_BYTES // cost([ResponseChunk(b"x")])
        slow = side.stream(request("slow", max_tokens=4 * window))
        # The window is full, and then the replica's buffer.
        await until(lambda: engine.left["slow"] > window)
        assert len(await items_of(side.stream(request("quick", max_tokens=3)))) == 3
        assert engine.left["slow"] <= window + 2 * MAX_BUFFERED_ITEMS + 2
        assert len(await items_of(slow)) == 4 * window


async def test_cancelling_aborts_in_the_engine_and_so_does_a_lost_connection() -> None:
    async with connected(step_s=3600.0) as side:
        first, second = side.stream(request("a")), side.stream(request("b"))
        await until(lambda: side.replica.live_requests == 2)
        first.cancel()
        first.cancel()
        await until(lambda: side.replica.live_requests == 1)
        await side.server.stop()
        with pytest.raises(ReplicaFailedError) as failed:
            await items_of(second)
        assert failed.value.lost
        assert not failed.value.dead
        assert failed.value.reason is Reason.REPLICA_FAILED
        await until(lambda: side.replica.live_requests == 0)
        assert side.handed == []


class Breaks(SimulatedEngine):
    """Fails after a head and a token."""

    error: Exception = EngineDeadError("dead")

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, "text/event-stream")
        yield ResponseChunk(b"one", 1)
        raise self.error


class BreaksOddly(Breaks):
    error = RuntimeError("odd")


class Ends(SimulatedEngine):
    """Ends without a tail."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, "text/event-stream")


class Large(SimulatedEngine):
    """Sends a chunk that is longer than any may be."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, "text/event-stream")
        yield ResponseChunk(b"x" * (server_module.MAX_CHUNK_BYTES + 1), 1)


@pytest.mark.parametrize(
    ("engine_type", "reason", "dead", "retry"),
    [
        (Breaks, Reason.REPLICA_FAILED, True, True),
        (BreaksOddly, Reason.INTERNAL, False, False),
        (Large, Reason.TOO_LARGE, False, False),
    ],
)
async def test_a_failure_says_what_it_says_by_the_other_way(
    engine_type: type[SimulatedEngine], reason: Reason, dead: bool, retry: bool
) -> None:
    async with connected(engine_type) as side:
        stream = side.stream(request())
        with pytest.raises(ReplicaFailedError) as failed:
            await items_of(stream)
        failure = failed.value
        assert (failure.reason, failure.dead, failure.retry) == (reason, dead, retry)
        await until(lambda: side.replica.live_requests == 0)


async def test_a_response_that_is_stopped_ends_without_a_tail() -> None:
    async with connected(Ends) as side:
        assert not any(
            isinstance(item, ResponseTail) for item in await items_of(side.stream(request()))
        )


async def test_a_replica_that_leaves_ends_what_it_has_and_gets_nothing_new() -> None:
    async with connected(step_s=0.001) as side:
        open_ = side.stream(request("a", max_tokens=200))
        await anext(open_)
        side.server.goodbye()
        await until(lambda: not side.channels.connected(NAME))
        assert side.open(request("b")) is None
        await asyncio.gather(side.replica.drain(), items_of(open_))
        assert side.handed == []


async def test_a_replica_that_leaves_still_gives_kv_away() -> None:
    async with connected() as side:
        running_stream = side.stream(request("runs", max_tokens=5_000))
        await anext(running_stream)
        side.server.goodbye()
        await until(lambda: not side.channels.connected(NAME))
        asked = replace(request("kv", stream=False), prefill_only=True)
        stream = side.channels.open_at(asked, NAME)
        assert stream is not None
        assert isinstance((await items_of(stream))[-1], ResponseTail)
        assert side.channels.open_at(asked, "another") is None
        lost = side.channels.open_at(asked, NAME)
        assert lost is not None
        running_stream.cancel()
        await side.server.stop()
        await until(lambda: side.channels.open_at(asked, NAME) is None)
        assert not side.handed, "no other replica has the KV"


async def test_what_comes_too_late_at_a_replica_that_leaves_goes_elsewhere() -> None:
    async with connected(step_s=3600.0) as side:
        side.server.goodbye()
        late = side.stream(request("late", stream=False))  # the goodbye has not arrived yet
        await until(lambda: side.replica.live_requests == 1)
        await side.server.stop()
        assert await items_of(late) == [ResponseTail(1, 1)]
        late.cancel()
        assert [each.cancelled for each in side.handed] == [True]


async def test_what_does_not_fit_goes_another_way() -> None:
    async with connected() as side:
        huge = request().body.with_fields({"n": 2**64})  # type: ignore[attr-defined]
        assert side.open(replace(request(), body=huge)) is None
        assert side.open(request(prompt="x" * wire.MAX_ASKED_BYTES)) is None


async def test_another_version_is_not_spoken_to() -> None:
    async with running() as replica:
        side = Side(replica)
        side.format = "another"
        assert side.open(request()) is None
        await until(lambda: side.found == 1)
        assert side.open(request()) is None
        assert not side.channels.connected(NAME)
        await side.server.stop()


@pytest.mark.parametrize(
    "unlisted",
    [ReplicaFailedError(Reason.NO_REPLICA, "No replica is running."), "another replica answers"],
)
async def test_a_replica_that_serve_does_not_list_yet_is_connected_once_it_is_listed(
    unlisted: ReplicaFailedError | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as replica:
        side = Side(replica)
        find, asked = side.find, list[str]()

        async def finds_later(replica_id: str, role: Role) -> StreamEndpoint:
            asked.append(replica_id)
            if len(asked) > 3:
                return await find(replica_id, role)
            if isinstance(unlisted, ReplicaFailedError):
                raise unlisted
            return (await find(replica_id, role))._replace(replica_id=unlisted)

        monkeypatch.setattr(side.channels, "_find", finds_later)
        await until(lambda: side.open(request(max_tokens=1)) is not None)
        assert len(asked) == 4
        await side.server.stop()


async def test_a_connection_is_made_again_where_the_replica_lives() -> None:
    async with connected(step_s=0.0) as side:
        for connection in list(side.server._trusted):
            connection.abort()
        await until(lambda: not side.channels.connected(NAME))
        await until(lambda: side.found == 1)
        # After a pause.
        await until(lambda: side.open(request(max_tokens=1)) is not None)
        assert side.found == 2
