"""What a hostile client may send to the socket itself: no way around the keys, no 5xx, no stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from sluice.router.config import AdminConfig, MetricsConfig, RouterConfig
from sluice.router.tenancy.auth import ApiKey
from tests.router.far_side import CHAT_BODY, Edge, FarSide, serve
from tests.router.listening import listening

USER, ADMIN, METRICS = "user-key", "admin-key", "metrics-key"
CONFIG = RouterConfig(
    api_keys=(ApiKey(key=SecretStr(USER), name="acme"),),
    admin=AdminConfig(keys=(SecretStr(ADMIN),)),
    metrics=MetricsConfig(keys=(SecretStr(METRICS),)),
    max_body_bytes=1 << 14,
)
BODY = json.dumps(CHAT_BODY).encode()

Send = Callable[[bytes], Awaitable[bytes]]


@asynccontextmanager
async def attacked(edge: Edge) -> AsyncIterator[Send]:
    """Sends raw bytes on a connection of their own, and reads until the server closes it."""
    # An idle connection is closed at once, so that reading to the end does not wait.
    async with listening(edge, idle_s=0) as system:

        async def send(raw: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
            try:
                writer.write(raw)
                async with asyncio.timeout(120):
                    return await reader.read()
            finally:
                writer.close()

        yield send


def request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    given = b"".join(header + b"\r\n" for header in headers)
    return line + b" HTTP/1.1\r\n" + given + b"\r\n" + body


def statuses(raw: bytes) -> list[int]:
    """Of every response on the connection."""
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


HOST = b"host: sluice"
KEY = b"authorization: Bearer " + USER.encode()
LENGTH = b"content-length: %d" % len(BODY)

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
    "two keys": request(b"GET /v1/models", HOST, KEY, KEY),
    "folded key": request(b"GET /v1/models", HOST, b"authorization:\r\n Bearer " + USER.encode()),
    "key in the query": request(b"GET /v1/models?api_key=" + USER.encode(), HOST),
    "key in a cookie": request(b"GET /v1/models", HOST, b"cookie: authorization=" + USER.encode()),
    "key as a password": request(b"GET /v1/models", HOST, b"authorization: Basic dXNlci1rZXk6"),
    "key and more": request(b"GET /v1/models", HOST, KEY + b", Bearer x"),
    "key with a tail": request(b"GET /v1/models", HOST, KEY + b"\xff"),
}


@pytest.mark.parametrize("name", WITHOUT_A_KEY)
async def test_there_is_no_way_around_the_key(name: str) -> None:
    edge = Edge(FarSide(a=serve), config=CONFIG)
    async with attacked(edge) as send:
        answer = await send(WITHOUT_A_KEY[name])
    assert statuses(answer) and set(statuses(answer)) <= {400, 401, 404}, answer
    assert b'"id": "m"' not in answer and b"sluice_requests" not in answer
    assert USER.encode() not in answer


POST = b"POST /v1/chat/completions"
SMUGGLED = request(b"GET /metrics", HOST)
BROKEN = {
    "length and chunks": request(
        POST, HOST, KEY, LENGTH, b"transfer-encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED
    ),
    "two lengths": request(POST, HOST, KEY, LENGTH, b"content-length: 5", body=BODY + SMUGGLED),
    "negative length": request(POST, HOST, KEY, b"content-length: -1", body=BODY),
    "length with a plus": request(POST, HOST, KEY, b"content-length: +9", body=BODY),
    "huge length": request(POST, HOST, KEY, b"content-length: " + b"9" * 30, body=BODY),
    "bad chunk": request(POST, HOST, KEY, b"transfer-encoding: chunked", body=b"zz\r\n\r\n"),
    "negative chunk": request(POST, HOST, KEY, b"transfer-encoding: chunked", body=b"-5\r\n\r\n"),
    "unknown coding": request(POST, HOST, KEY, b"transfer-encoding: xchunked", body=SMUGGLED),
    "nul in a header": request(POST, HOST, KEY, b"x-a: \x00", LENGTH, body=BODY),
    "space in a name": request(POST, HOST, KEY, b"content-length : 3", body=BODY),
    "huge header": request(POST, HOST, KEY, b"x-a: " + b"a" * (1 << 20), LENGTH, body=BODY),
    "many headers": request(POST, HOST, KEY, *[b"x-a: b"] * 20_000, LENGTH, body=BODY),
    "host in brackets": request(b"GET /nowhere", b"host: [", KEY),
    "odd address": request(b"GET /%ff%fe/\xc3\xa9?\xff", HOST, KEY),
    "no version": b"GET /v1/models\r\n\r\n",
    "binary": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "connect": request(b"CONNECT sluice:443", HOST, KEY),
    "trace": request(b"TRACE /v1/models", HOST, KEY),
    "upgrade": request(b"GET /v1/models", HOST, b"connection: upgrade", b"upgrade: websocket"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_request_breaks_nothing(name: str) -> None:
    edge = Edge(FarSide(a=serve), config=CONFIG)
    async with attacked(edge) as send:
        answer = await send(BROKEN[name])
        assert b"sluice_requests" not in answer, "what was smuggled was served"
        # One request came, whatever it looked like, and none is answered as a second one.
        assert len(statuses(answer)) <= 2
        assert all(status < 500 for status in statuses(answer)), answer
        good = await send(request(POST, HOST, KEY, LENGTH, body=BODY))
        assert statuses(good) == [200]


async def test_each_kind_of_key_opens_its_own_door_only() -> None:
    edge = Edge(FarSide(a=serve), config=CONFIG)
    doors = {"/v1/models": USER, "/metrics": METRICS}
    async with attacked(edge) as send:
        for path in doors:
            for key in (USER, ADMIN, METRICS):
                bearer = b"authorization: Bearer " + key.encode()
                answer = await send(request(b"GET " + path.encode(), HOST, bearer))
                assert statuses(answer) == [200 if doors[path] == key else 401]


async def test_an_error_tells_nothing_of_other_keys_and_names() -> None:
    edge = Edge(FarSide(a=serve), config=CONFIG)
    async with attacked(edge) as send:
        told = {
            (
                await send(request(b"GET /v1/models", HOST, b"authorization: Bearer " + key))
            ).partition(b"\r\n\r\n")[2]
            for key in (b"u", b"user-ke", b"user-keyy", b"acme", ADMIN.encode(), b"x" * 4_000)
        }
    assert len(told) == 1
    assert b"acme" not in told.pop()


async def test_many_keys_and_ids_leave_nothing_behind() -> None:
    edge = Edge(FarSide(a=serve), config=CONFIG)

    def series() -> int:
        return sum(len(family.samples) for family in edge.metrics.registry.collect())

    async with edge.client() as client:

        async def ask(number: int) -> None:
            headers = {
                "authorization": f"Bearer {USER if number % 2 else f'guess-{number}'}",
                "x-request-id": f"id-{number}",
                "x-sluice-session": f"session-{number}",
                "x-slo-class": "interactive" if number % 4 else f"class-{number}",
                "user-agent": f"agent-{number}",
                "traceparent": f"00-{number:032x}-{number:016x}-01",
            }
            body = {**CHAT_BODY, "user": f"user-{number}", "model": "m" if number % 8 else "x"}
            await client.post("/v1/chat/completions", json=body, headers=headers)

        for number in range(16):
            await ask(number)
        before = series()
        for number in range(16, 160):
            await ask(number)
        assert series() == before
