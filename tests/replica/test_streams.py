"""A replica's plain connections: frames, strangers and malformed messages, over real sockets."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol import connection
from sluice.protocol.connection import MAX_STRANGERS, WELCOME, Frames
from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    RequestBody,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
    Resume,
)
from sluice.protocol.streams import (
    MAX_ASKED_BYTES,
    WINDOW_BYTES,
    Asked,
    Consumed,
    Delivery,
    Ending,
    Open,
    cost,
)
from sluice.replica.streams.server import Response, StreamServer
from sluice.scheduling.fleet.prefix import PromptPrefix
from sluice.scheduling.request.objective import SLO
from tests.replica.waiting import until

REQUEST = EngineRequest("r", "chat", RequestBody.of({"messages": []}), SLO())


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def asked(message: object) -> bytes:
    return frame(msgspec.msgpack.encode(message))


class Answers:
    """Serves requests with what it is given, and notes them."""

    def __init__(self, *items: ResponseHead | ResponseChunk | ResponseTail) -> None:
        self.items = items
        self.requests: list[EngineRequest] = []

    def __call__(self, request: EngineRequest, wake: Callable[[], None]) -> Response:
        self.requests.append(request)
        return Response(wake, self.items)


class Router(NamedTuple):
    """A connection of a router."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def welcomed(self) -> None:
        assert await self.reader.readexactly(6) == frame(WELCOME)

    async def deliveries(self) -> list[Delivery]:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return msgspec.msgpack.decode(await self.reader.readexactly(size), type=list[Delivery])


def right(token: str) -> bytes:
    return frame(token.encode())


@asynccontextmanager
async def listening(
    serve: Callable[[EngineRequest, Callable[[], None]], Response],
) -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    """Connects routers, which send what ``greeting`` makes of the token, and then messages."""
    server = StreamServer("replica-1", serve)
    endpoint = await server.endpoint("127.0.0.1")
    routers: list[Router] = []

    async def connect(*messages: bytes, greeting: Callable[[str], bytes] = right) -> Router:
        router = Router(*await asyncio.open_connection(endpoint.host, endpoint.port))
        router.writer.write(greeting(server.token) + b"".join(messages))
        routers.append(router)
        return router

    try:
        yield connect
    finally:
        for router in routers:
            router.writer.close()
        await server.stop()


class Kept(Frames):
    """Keeps its frames."""

    def __init__(self) -> None:
        super().__init__(limit=1000)
        self.frames: list[bytes] = []

    def frame_received(self, frame: bytes | bytearray) -> None:
        self.frames.append(bytes(frame))


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 50)))
def test_frames_arrive_whole_however_the_network_cuts_them(
    payloads: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(map(frame, payloads))
    kept = Kept()
    for size in cuts:
        kept.data_received(data[:size])
        data = data[size:]
    kept.data_received(data)
    assert kept.frames == payloads


def test_a_frame_above_the_limit_ends_the_connection_before_it_is_kept() -> None:
    kept = Kept()
    kept.data_received(frame(b"x") + (1001).to_bytes(4, "big"))
    assert kept.frames == [b"x"]
    assert kept.closed


texts = st.text(max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(texts, plain, max_size=4),
    changes=st.dictionaries(texts, plain, max_size=3),
    removed=st.sets(texts, max_size=2),
    hashes=st.lists(st.integers(1, 2**63 - 1), max_size=4),
    tokens=st.lists(st.integers(0, 2**31), max_size=4),
    weight=st.floats(0.1, 10),
)
def test_a_request_arrives_as_it_was_sent(
    body: dict[str, object],
    changes: dict[str, object],
    removed: set[str],
    hashes: list[int],
    tokens: list[int],
    weight: float,
) -> None:
    sent = RequestBody.of(body)
    kept = {name: value for name, value in sent.items() if name not in removed}
    request = EngineRequest(
        "request-1",
        "completions",
        sent.with_fields({**kept, **changes}),
        SLO(0.5, None, 20.0, 7, "fast"),
        1.5,
        True,
        PromptPrefix(tuple(hashes), 600),
        {"traceparent": "00-1"},
        kv_handle=KVHandle("other", {"address": ["h", 1], "secret": b"\x00\xff"}, 12),
        resume=Resume(tuple(tokens), (1, 0), "id"),
        resumable=True,
        confirm=True,
        tenant=2**63 - 1,
        weight=weight,
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(Open.of(3, request)), type=Asked)
    assert isinstance(read, Open)
    assert read.stream == 3
    assert read.asked() == request


async def test_who_knows_the_token_gets_answers_and_nobody_else() -> None:
    serve = Answers(ResponseHead(200, "text/event-stream", "replica-1"), ResponseTail(1, 2))
    opened = asked(Open.of(7, REQUEST))
    async with listening(serve) as connect:
        router = await connect(opened)
        await router.welcomed()
        (delivery,) = await router.deliveries()
        assert delivery == Delivery(7, None, serve.items[0], [], serve.items[1])
        for wrong in (lambda _: "", lambda _: "x" * 64, lambda it: it[:-1], lambda it: it + "x"):
            stranger = await connect(opened, greeting=lambda token: right(wrong(token)))  # noqa: B023
            assert await stranger.reader.read() == b""
    assert serve.requests == [REQUEST]


async def test_strangers_keep_nobody_out_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(Answers()) as connect:
        strangers = [await connect(greeting=lambda _: b"") for _ in range(MAX_STRANGERS + 8)]
        assert await strangers[0].reader.read() == b"", "the oldest made room"
        await (await connect()).welcomed()
        monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", 0.01)
        late = await connect(greeting=lambda _: b"")
        assert await late.reader.read() == b"", "it never showed the token"


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode([9, 1]),
        msgspec.msgpack.encode([2, "one"]),
        msgspec.msgpack.encode(Open(1, REQUEST, b"[1]", {}, frozenset())),
        msgspec.msgpack.encode(Open(1, REQUEST, b"{", {}, frozenset())),
        msgspec.msgpack.encode(Open(1, REQUEST, b"[" * 100_000, {}, frozenset())),
    ],
)
async def test_a_malformed_message_ends_its_connection_only(message: bytes) -> None:
    async with listening(Answers(ResponseTail(1, 2))) as connect:
        other = await connect()
        await other.welcomed()
        router = await connect(frame(message))
        assert await router.reader.read() in (frame(WELCOME), b"")
        other.writer.write(asked(Open.of(1, REQUEST)))
        assert (await other.deliveries())[0].tail == ResponseTail(1, 2)


async def test_a_frame_that_is_too_long_is_not_read() -> None:
    async with listening(Answers()) as connect:
        router = await connect((MAX_ASKED_BYTES + 1).to_bytes(4, "big"))
        assert await router.reader.read() in (frame(WELCOME), b"")


@pytest.mark.parametrize("listened", [True, False])
async def test_who_asks_where_a_stopped_replica_listens_gets_an_answer(listened: bool) -> None:
    server = StreamServer("replica-1", Answers())
    if listened:
        await server.endpoint("127.0.0.1")
    await server.stop()
    with pytest.raises(ConnectionRefusedError, match="no connections"):
        await server.endpoint("127.0.0.1")


async def test_a_response_that_cannot_be_sent_fails_alone() -> None:
    odd = KVHandle("replica-1", {"what": object()}, 3)
    tails = {"odd": ResponseTail(1, 0, kv_handle=odd), "sound": ResponseTail(1, 2)}
    opened = [
        asked(Open.of(number, replace(REQUEST, request_id=name)))
        for number, name in enumerate(tails)
    ]
    async with listening(
        lambda request, wake: Response(wake, [tails[request.request_id]])
    ) as connect:
        router = await connect(*opened)
        await router.welcomed()
        got: dict[int, Delivery] = {}
        while len(got) < 2:
            got |= {each.stream: each for each in await router.deliveries()}
    assert got[0].ending is Ending.FAILED
    assert got[1].tail == tails["sound"]


async def test_a_router_that_reads_nothing_gets_a_window_and_holds_nobody_up() -> None:
    chunk = ResponseChunk(b"x" * 4096)
    opened: list[Response] = []

    def serve(request: EngineRequest, wake: Callable[[], None]) -> Response:
        opened.append(Response(wake, [ResponseTail(1, 1)] if opened else []))
        return opened[-1]

    async def fill() -> None:
        while True:
            await opened[0].put(chunk)

    async with listening(serve) as connect:
        router = await connect(asked(Open.of(1, REQUEST)))
        await router.welcomed()
        await until(lambda: len(opened) == 1)
        filling = asyncio.create_task(fill())
        got = 0
        for more in (0, WINDOW_BYTES):
            if more:
                router.writer.write(asked(Consumed(1, more)))
            while got < WINDOW_BYTES + more:
                got += sum(cost(each.chunks) for each in await router.deliveries())
            assert got < WINDOW_BYTES + more + 2 * len(chunk.data)
        router.writer.write(asked(Open.of(2, REQUEST)))
        (other,) = await router.deliveries()
        assert other.stream == 2
        filling.cancel()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Half surrogate pairs are no text.
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)
FIELDS = st.dictionaries(st.sampled_from("abcdef"), JSON)


def sent(body: RequestBody) -> RequestBody:
    arrived = pickle.loads(pickle.dumps(body))
    assert isinstance(arrived, RequestBody)
    return arrived


@given(FIELDS, st.lists(FIELDS, max_size=3), st.data())
def test_a_body_is_parsed_as_the_standard_library_does_and_changes_arrive_with_it(
    first: dict[str, Any], others: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = json.dumps(first, ensure_ascii=data.draw(st.booleans()))
    body = RequestBody.parse(text.encode())
    assert body == json.loads(text) == RequestBody.of(first)
    for other in others:
        names = st.sets(st.sampled_from(sorted(body)) if body else st.nothing())
        removed = data.draw(names)
        fields = {name: value for name, value in body.items() if name not in removed} | other
        body = body.with_fields(fields)
        assert body == fields
        assert sent(body) == fields
    assert sent(sent(body)) == body


def test_what_was_not_changed_travels_as_the_bytes_that_came() -> None:
    ids = list(range(100_000))
    raw = json.dumps({"prompt": ids, "slo": {}, "max_tokens": 9}).encode()
    body = RequestBody.parse(raw)
    changed = body.with_fields({"prompt": body["prompt"], "max_tokens": 5})
    assert raw in pickle.dumps(changed)
    assert len(pickle.dumps(changed)) < len(raw) + 500
    assert sent(changed) == {"prompt": ids, "max_tokens": 5}


@pytest.mark.parametrize("raw", [b"[]", b"1", b'{"a": NaN}', b'{"a": 1e999}', b"{} {}"])
def test_anything_but_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        RequestBody.parse(raw)
