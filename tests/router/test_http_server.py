"""The HTTP server of a router, on real sockets: bounds, half-closed clients, and its end."""

from __future__ import annotations

import asyncio
import json
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from sluice.protocol.requests import EngineRequest
from sluice.router.config import RouterConfig
from sluice.router.ingress import http_server
from sluice.router.ingress.http_server import MAX_HEAD_BYTES, MAX_HEADERS
from tests.router.far_side import CHAT_BODY, Edge, FarSide, Items, hang, serve, stall
from tests.router.listening import Listening, listening
from tests.router.test_admin import ADMIN, KEYS, USER, operated

# What of a request's bytes becomes its headers, at the server that Serve starts for routers.

KEY = "user-key"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: sluice\r\ntransfer-encoding: chunked\r\n"
CLOSE = b"connection: close\r\n"
AUTHORIZED = b"authorization: Bearer " + KEY.encode() + b"\r\n"
TRAILERS = {
    "a key": AUTHORIZED,
    "an objective": b"x-slo-ttft-ms: 1\r\nx-slo-class: batch\r\n",
    "a wrong objective": b"x-slo-ttft-ms: soon\r\n",
    "odd bytes": b"x-request-id: \xff\xfe\r\nx-slo-class: \xff\r\ntraceparent: \xff\r\n",
    "what is for the server": b"expect: 100-continue\r\nx-request-timeout-seconds: 0.001\r\n",
}


def chunks(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n" % (len(body), body)


def keyed() -> Edge:
    return Edge(FarSide(a=serve), config=RouterConfig.model_validate({"api_keys": [KEY]}))


@pytest.mark.parametrize("trailers", TRAILERS.values(), ids=TRAILERS)
async def test_trailers_change_nothing(trailers: bytes) -> None:
    async with listening(keyed()) as system:
        body = chunks(BODY) + trailers + b"\r\n"
        head = CHUNKED + CLOSE + AUTHORIZED + b"\r\n"
        for parts in ((head + body,), (head, chunks(BODY), trailers, b"\r\n")):
            answer = await exchange(system, *parts)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"x-sluice-class: standard" in answer
        answer = await exchange(system, CHUNKED + CLOSE + b"\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 401"), answer


async def test_the_next_request_on_a_connection_has_its_own_headers() -> None:
    async with listening(keyed()) as system:
        first = CHUNKED + AUTHORIZED + b"\r\n" + chunks(BODY) + b"x-slo-class: batch\r\n\r\n"
        batch = CHUNKED + CLOSE + AUTHORIZED + b"x-slo-class: batch\r\n\r\n"
        second = batch + chunks(BODY) + b"\r\n"
        third = CHUNKED + CLOSE + b"\r\n" + chunks(BODY) + AUTHORIZED + b"\r\n"
        answer = await exchange(system, first + second)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.index(b"x-sluice-class: standard") < answer.index(b"x-sluice-class: batch")
        answer = await exchange(system, first + third)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 401") == 1


@pytest.mark.parametrize(
    "lines",
    [
        AUTHORIZED + b"authorization: Bearer another\r\n",
        AUTHORIZED + b"x-slo-class: batch\r\nx-slo-class: standard\r\n",
        AUTHORIZED + b"X-Slo-Class: batch\r\nx-slo-class: batch\r\n",
        AUTHORIZED + b"x-sluice-session: a\r\nx-sluice-session: b\r\n",
        AUTHORIZED + b"x-slo-class: stand\r\n ard\r\n",
        AUTHORIZED + b"transfer-encoding: identity\r\n",
    ],
)
async def test_headers_with_two_meanings_are_refused(lines: bytes) -> None:
    async with listening(keyed()) as system:
        sent = CHUNKED + CLOSE + lines + b"\r\n" + chunks(BODY) + b"\r\n"
        answer = await exchange(system, sent)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")), answer
        assert answer.count(b"HTTP/1.1 ") == 1


# Pages of other sites, and what they may ask.

APP = "https://app.example"


def edge(*origins: str) -> Edge:
    config = RouterConfig.model_validate({**KEYS, "cors_origins": origins})
    return Edge(FarSide(a=serve), config=config)


async def preflight(client: httpx.AsyncClient, path: str, origin: str) -> httpx.Response:
    wanted = {"access-control-request-method": "POST"}
    wanted["access-control-request-headers"] = "authorization,content-type,x-slo-class"
    return await client.options(path, headers={"origin": origin, **wanted})


async def test_pages_of_the_origins_in_the_configuration_may_ask() -> None:
    async with edge(APP).client() as client:
        told = await preflight(client, "/v1/chat/completions", APP)
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == APP
        assert "x-slo-class" in told.headers["access-control-allow-headers"]
        headers = {"origin": APP, "authorization": f"Bearer {USER}"}
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == APP
        assert "x-sluice-class" in answer.headers["access-control-expose-headers"]
        refused = await client.post("/v1/chat/completions", json=CHAT_BODY, headers={"origin": APP})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == APP
        for each in (told, answer, refused):
            assert "access-control-allow-credentials" not in each.headers


@pytest.mark.parametrize("origins", [(), (APP,)])
@pytest.mark.parametrize(
    "origin", ["https://other.example", "http://app.example", "https://app.example:444", "null"]
)
async def test_pages_of_other_origins_may_not(origins: tuple[str, ...], origin: str) -> None:
    async with edge(*origins).client() as client:
        told = await preflight(client, "/v1/chat/completions", origin)
        assert told.status_code >= 400
        headers = {"origin": origin, "authorization": f"Bearer {USER}"}
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
        for each in (told, answer):
            assert "access-control-allow-origin" not in each.headers


async def test_what_is_for_operators_is_for_no_other_page() -> None:
    system = await operated({**KEYS, "cors_origins": ["*"]})
    async with system.edge.client() as client:
        assert (await preflight(client, "/v1/models", APP)).headers[
            "access-control-allow-origin"
        ] == "*"
        for path in ("/admin/v1/fleet", "/admin/v1/replicas/a/drain", "/ui", "/metrics"):
            headers = {"origin": APP, "authorization": f"Bearer {ADMIN}"}
            for told in (
                await preflight(client, path, APP),
                await client.get(path, headers=headers),
            ):
                assert not [name for name in told.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["", "app.example", "https://app.example/", "https://*.example", "null", "https://a b"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        RouterConfig.model_validate({"cors_origins": [origin]})


BODY = json.dumps(CHAT_BODY).encode()
JSON = b"content-type: application/json"
STREAMED = json.dumps({**CHAT_BODY, "stream": True}).encode()


def post(*lines: bytes, body: bytes = BODY, version: bytes = b"1.1", close: bool = True) -> bytes:
    head = [b"POST /v1/chat/completions HTTP/" + version, b"host: localhost", JSON, *lines]
    head += [b"content-length: %d" % len(body)] + ([b"connection: close"] if close else [])
    return b"\r\n".join((*head, b"", body))


GET = b"GET /health HTTP/1.1\r\nhost: sluice\r\n"


class Client:
    """A connection that is written to and read by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def half_close(self) -> None:
        self.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)

    async def rest(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.read()


@asynccontextmanager
async def connected(system: Listening) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def exchange(system: Listening, *parts: bytes) -> bytes:
    """All that comes back; each part is sent in a segment of its own."""
    async with connected(system) as client:
        own = client.writer.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.writer.write(part)
            await client.writer.drain()
            await asyncio.sleep(0)
        return await client.rest()


def check_error(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head and b"connection: close" in head
    assert b"x-sluice-request-id: " in head
    assert json.loads(body)["error"]["code"] == code


async def later(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """Serves once the test says so."""
    await side.go.wait()  # type: ignore[attr-defined]
    async for item in serve(side, replica, request):
        yield item


async def test_a_large_head_is_served_up_to_its_bound() -> None:
    async with listening(Edge(FarSide(a=serve))) as system:
        long = b"x-long: " + b"a" * 15_500
        many = [b"x-%d: a" % number for number in range(97)]
        assert (await exchange(system, post(long, *many))).startswith(b"HTTP/1.1 200 ")
        limit = MAX_HEAD_BYTES - 1_000
        assert (await exchange(system, post(b"x: " + b"a" * limit))).startswith(b"HTTP/1.1 200 ")
        answer = await exchange(system, GET + b"x-long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        check_error(answer, 431, "headers_too_large")
        check_error(
            await exchange(system, GET + b"x: " + b"a" * (1 << 20)), 431, "headers_too_large"
        )
        answer = await exchange(system, GET + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
        check_error(answer, 431, "headers_too_large")
        line = b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: a\r\n\r\n"
        check_error(await exchange(system, line), 431, "headers_too_large")


@pytest.mark.parametrize(
    "raw", [b"hello\r\n\r\n", GET + b"a : b\r\n\r\n", b"\x16\x03\x01" + b"a" * 99]
)
async def test_what_is_no_http_gets_json(raw: bytes) -> None:
    async with listening(Edge(FarSide(a=serve))) as system:
        check_error(await exchange(system, raw), 400, "invalid_http")


async def test_valid_requests_before_a_broken_one_are_answered_first() -> None:
    async with listening(Edge(FarSide(a=serve))) as system:
        answer = await exchange(system, post(close=False) * 2 + b"\x00\x00\r\n\r\n" + post())
        assert answer.count(b"HTTP/1.1 200 ") == 2
        check_error(answer[answer.rindex(b"HTTP/1.1 ") :], 400, "invalid_http")
        broken = b"POST /v1/models HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
        answer = await exchange(system, post(close=False) + broken)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        check_error(answer[answer.rindex(b"HTTP/1.1 ") :], 400, "invalid_http")


async def test_a_client_that_is_slow_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    monkeypatch.setattr(http_server, "IDLE_S", 0.1)
    async with listening(Edge(FarSide(a=serve))) as system:
        assert await exchange(system) == b""
        check_error(await exchange(system, GET), 408, "request_timeout")
        check_error(await exchange(system, post()[:-1]), 408, "request_timeout")
        # The second request of a connection, too.
        answer = await exchange(system, post(close=False) + b"GET /")
        check_error(answer[answer.rindex(b"HTTP/1.1 ") :], 408, "request_timeout")


async def test_who_waits_for_an_answer_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.01)
    monkeypatch.setattr(http_server, "IDLE_S", 0.01)
    side = FarSide(a=hang)
    async with listening(Edge(side)) as system, connected(system) as client:
        client.writer.write(post(close=False) + b"GET /hea")
        await side.until(lambda: bool(side.live))
        await asyncio.sleep(2.5)
        assert side.live


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_a_client_that_half_closes_is_answered(body: bytes) -> None:
    side = FarSide(a=later)
    side.go = asyncio.Event()  # type: ignore[attr-defined]
    async with listening(Edge(side)) as system, connected(system) as client:
        client.writer.write(post(body=body, close=False))
        client.half_close()
        await side.until(lambda: bool(side.live))
        await asyncio.sleep(1.5)  # it is looked at meanwhile
        assert side.live
        side.go.set()  # type: ignore[attr-defined]
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b"hello" in answer or b"one" in answer


async def test_requests_before_a_half_close_are_all_answered() -> None:
    async with listening(Edge(FarSide(a=serve))) as system, connected(system) as client:
        client.writer.write(post(close=False) * 3)
        client.half_close()
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("half_first", [False, True])
async def test_a_client_that_is_gone_is_noticed(body: bytes, reset: bool, half_first: bool) -> None:
    side = FarSide(a=hang)
    async with listening(Edge(side)) as system, connected(system) as client:
        client.writer.write(post(body=body, close=False))
        await side.until(lambda: bool(side.live))
        if half_first:
            client.half_close()
            await asyncio.sleep(0.5)
            assert side.live
        if reset:
            client.writer.transport.abort()
        else:
            client.writer.close()
        await side.until(lambda: not side.live)


async def test_a_client_that_is_gone_in_mid_stream_is_noticed() -> None:
    side = FarSide(a=stall)
    async with listening(Edge(side)) as system, connected(system) as client:
        client.writer.write(post(body=STREAMED, close=False))
        await client.reader.readuntil(b"one")
        client.writer.close()
        await side.until(lambda: not side.live)


async def test_an_incomplete_request_of_a_half_closed_client_ends() -> None:
    edge = Edge(FarSide(a=serve))
    async with listening(edge) as system, connected(system) as client:
        client.writer.write(post()[:-1])
        client.half_close()
        await client.rest()
        assert edge.side.calls == []


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_clients_of_http_1_0_get_no_chunks(body: bytes) -> None:
    async with listening(Edge(FarSide(a=serve))) as system:
        answer = await exchange(system, post(body=body, version=b"1.0", close=False))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert rest.startswith(b"data: " if body is STREAMED else b"{"), answer


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_a_request_that_asks_for_another_protocol_gets_this_one(
    protocol: bytes, pieces: int
) -> None:
    """As Java's client does before each first request, whatever its method."""
    asks = b"connection: upgrade, http2-settings", b"upgrade: " + protocol, b"http2-settings: AA"
    head = (b"POST /v1/chat/completions HTTP/1.1", b"host: localhost", JSON, *asks)
    sent = b"".join(
        (
            GET + b"\r\n".join((*asks, b"", b"")),
            post(*asks, close=False),
            b"\r\n".join((*head, b"transfer-encoding: chunked", b"", b"")),
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
            post(*asks),
        )
    )
    edge = Edge(FarSide(a=serve))
    size = -(-len(sent) // pieces)
    async with listening(edge) as system:
        answer = await exchange(system, *(sent[at : at + size] for at in range(0, len(sent), size)))
        assert answer.count(b"HTTP/1.1 200 ") == 4, answer
        assert answer.count(b"connection: close") == 1
    assert [request.body["messages"] for _, request in edge.side.calls] == 3 * [
        CHAT_BODY["messages"]
    ]


@pytest.mark.parametrize("line", [b"CONNECT example.com:443", b"CONNECT /v1/completions"])
async def test_a_tunnel_is_refused(line: bytes) -> None:
    async with listening(Edge(FarSide(a=serve))) as system:
        answer = await exchange(system, line + b" HTTP/1.1\r\nhost: a\r\n\r\n" + post())
        assert answer.startswith(b"HTTP/1.1 4") and b"HTTP/1.1 2" not in answer, answer


async def test_connections_beyond_the_bound_are_refused() -> None:
    edge = Edge(FarSide(a=serve), config=RouterConfig(max_in_flight=1))
    async with listening(edge) as system, connected(system) as one, connected(system) as two:
        for client in (one, two):  # they are counted
            client.writer.write(GET + b"\r\n")
            await client.reader.readuntil(b"}")
        check_error(await exchange(system), 503, "router_full")


async def test_a_refused_body_does_not_cut_its_answer_off() -> None:
    edge = Edge(FarSide(a=serve), config=RouterConfig(max_body_bytes=1 << 10))
    async with listening(edge) as system:
        answer = await exchange(system, post(body=b"a" * (1 << 22)))
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:99]


@pytest.mark.parametrize("listens", [False, True])
async def test_the_end_waits_for_what_runs_and_takes_nothing_new(listens: bool) -> None:
    side = FarSide(a=later)
    side.go = asyncio.Event()  # type: ignore[attr-defined]
    async with (
        listening(Edge(side)) as system,
        connected(system) as busy,
        connected(system) as idle,
    ):
        idle.writer.write(GET + b"\r\n")
        await idle.reader.readuntil(b"}")
        busy.writer.write(post(close=False))
        await side.until(lambda: bool(side.live))
        end = asyncio.create_task(system.server.drain(60, listening=listens))
        await asyncio.sleep(0.1)
        if listens:
            idle.writer.write(GET + b"\r\n")
            check_error(await idle.rest(), 503, "router_stopping")
            check_error(await exchange(system, post()), 503, "router_stopping")
        else:
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await exchange(system, post())
        assert not end.done()
        side.go.set()  # type: ignore[attr-defined]
        answer = await busy.rest()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        await asyncio.wait_for(end, 60)


async def test_what_runs_on_ends_with_an_error() -> None:
    side = FarSide(a=stall, b=hang)
    edge = Edge(side)
    async with listening(edge) as system, connected(system) as stream, connected(system) as whole:
        stream.writer.write(post(body=STREAMED, close=False))
        await stream.reader.readuntil(b"one")
        side.behaviours["a"] = hang
        whole.writer.write(post(close=False))
        await side.until(lambda: len(side.live) == 2)
        await asyncio.wait_for(system.server.drain(0.1), 60)
        rest = await stream.rest()
        assert b'"code": "router_stopping"' in rest and rest.endswith(b"0\r\n\r\n")
        answer = await whole.rest()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        await side.until(lambda: not side.live)
        assert edge.sample("sluice_in_flight_requests") == 0


# What a hostile client may send: no way around the keys, no 5xx, no stall. Idle connections are
# closed at once there, so that reading to the end does not wait.

METRICS = "metrics-key"
GUARDED = RouterConfig.model_validate(
    {
        "api_keys": [{"key": USER, "name": "acme"}],
        "admin": {"keys": [ADMIN]},
        "metrics": {"keys": [METRICS]},
        "max_body_bytes": 1 << 14,
    }
)


def request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    given = b"".join(header + b"\r\n" for header in headers)
    return line + b" HTTP/1.1\r\n" + given + b"\r\n" + body


def statuses(raw: bytes) -> list[int]:
    """Of every response on the connection."""
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


HOST = b"host: sluice"
BEARER = b"authorization: Bearer " + USER.encode()
LENGTH = b"content-length: %d" % len(BODY)
PASSWORD = b64encode(f"{USER}:".encode())
CHUNKS = b"transfer-encoding: chunked"

WITHOUT_A_KEY = {
    "dots": request(b"GET /health/../metrics", HOST),
    "encoded dots": request(b"GET /health/%2e%2e/metrics", HOST),
    "encoded slash": request(b"GET /health%2f..%2fv1/models", HOST),
    "two slashes": request(b"GET //v1/models", HOST),
    "nul": request(b"GET /health%00/../v1/models", HOST),
    "upper case": request(b"GET /HEALTH", HOST),
    "whole address": request(b"GET http://sluice/v1/models", HOST),
    "query": request(b"GET /v1/models?/health", HOST),
    "fragment": request(b"GET /v1/models#/health", HOST),
    "method in a header": request(b"GET /v1/models", HOST, b"x-original-url: /health"),
    "forwarded": request(b"GET /v1/models", HOST, b"x-forwarded-for: 127.0.0.1"),
    "rewritten": request(b"GET /v1/models", HOST, b"x-rewrite-url: /health"),
    "prefix": request(b"GET /v1/models", HOST, b"x-forwarded-prefix: /health"),
    "no host": request(b"GET /v1/models"),
    "host with a path": request(b"GET /v1/models", b"host: sluice/health?"),
    "host in brackets": request(b"GET /v1/models", b"host: ["),
    "two keys": request(b"GET /v1/models", HOST, BEARER, BEARER),
    "folded key": request(b"GET /v1/models", HOST, b"authorization:\r\n Bearer " + USER.encode()),
    "key in the query": request(b"GET /v1/models?api_key=" + USER.encode(), HOST),
    "key in a cookie": request(b"GET /v1/models", HOST, b"cookie: authorization=" + USER.encode()),
    "key as a password": request(
        b"GET /v1/models", HOST, b"authorization: Basic " + b64encode(f"{USER}:".encode())
    ),
    "key and more": request(b"GET /v1/models", HOST, BEARER + b", Bearer x"),
    "key with a tail": request(b"GET /v1/models", HOST, BEARER + b"\xff"),
}


@pytest.mark.parametrize("name", WITHOUT_A_KEY)
async def test_there_is_no_way_around_the_key(name: str) -> None:
    edge = Edge(FarSide(a=serve), config=GUARDED)
    async with listening(edge, idle_s=0) as system:
        answer = await exchange(system, WITHOUT_A_KEY[name])
    assert statuses(answer) and set(statuses(answer)) <= {400, 401, 404}, answer
    assert b'"id": "m"' not in answer and b"sluice_requests" not in answer
    assert USER.encode() not in answer


POST = b"POST /v1/chat/completions"
SMUGGLED = request(b"GET /metrics", HOST)
BROKEN = {
    "length and chunks": request(POST, HOST, BEARER, LENGTH, CHUNKS, body=b"0\r\n\r\n" + SMUGGLED),
    "two lengths": request(POST, HOST, BEARER, LENGTH, b"content-length: 5", body=BODY + SMUGGLED),
    "negative length": request(POST, HOST, BEARER, b"content-length: -1", body=BODY),
    "length with a plus": request(POST, HOST, BEARER, b"content-length: +9", body=BODY),
    "huge length": request(POST, HOST, BEARER, b"content-length: " + b"9" * 30, body=BODY),
    "bad chunk": request(POST, HOST, BEARER, CHUNKS, body=b"zz\r\n\r\n"),
    "negative chunk": request(
        POST, HOST, BEARER, b"transfer-encoding: chunked", body=b"-5\r\n\r\n"
    ),
    "unknown coding": request(POST, HOST, BEARER, b"transfer-encoding: xchunked", body=SMUGGLED),
    "nul in a header": request(POST, HOST, BEARER, b"x-a: \x00", LENGTH, body=BODY),
    "space in a name": request(POST, HOST, BEARER, b"content-length : 3", body=BODY),
    "huge header": request(POST, HOST, BEARER, b"x-a: " + b"a" * (1 << 20), LENGTH, body=BODY),
    "many headers": request(POST, HOST, BEARER, *[b"x-a: b"] * 20_000, LENGTH, body=BODY),
    "host in brackets": request(b"GET /nowhere", b"host: [", BEARER),
    "odd address": request(b"GET /%ff%fe/\xc3\xa9?\xff", HOST, BEARER),
    "no version": b"GET /v1/models\r\n\r\n",
    "binary": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "connect": request(b"CONNECT sluice:443", HOST, BEARER),
    "trace": request(b"TRACE /v1/models", HOST, BEARER),
    "upgrade": request(b"GET /v1/models", HOST, b"connection: upgrade", b"upgrade: websocket"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_request_breaks_nothing(name: str) -> None:
    edge = Edge(FarSide(a=serve), config=GUARDED)
    async with listening(edge, idle_s=0) as system:
        answer = await exchange(system, BROKEN[name])
        assert b"sluice_requests" not in answer, "what was smuggled was served"
        # One request came, whatever it looked like, and none is answered as a second one.
        assert len(statuses(answer)) <= 2
        assert all(status < 500 for status in statuses(answer)), answer
        good = await exchange(system, request(POST, HOST, BEARER, LENGTH, body=BODY))
        assert statuses(good) == [200]


async def test_an_error_tells_nothing_of_other_keys_and_names() -> None:
    edge = Edge(FarSide(a=serve), config=GUARDED)
    async with listening(edge, idle_s=0) as system:
        told = set()
        for key in ("u", USER[:-1], f"{USER}y", "acme", ADMIN, "x" * 4_000):
            bearer = b"authorization: Bearer " + key.encode()
            answer = await exchange(system, request(b"GET /v1/models", HOST, bearer))
            told.add(answer.partition(b"\r\n\r\n")[2])
    assert len(told) == 1
    assert b"acme" not in told.pop()
