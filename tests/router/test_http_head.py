"""What of a request's bytes becomes its headers, at the server that Serve starts for routers."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from sluice.router.config import RouterConfig
from tests.router.far_side import CHAT_BODY, Edge, FarSide, serve
from tests.router.listening import listening

KEY = "user-key"
BODY = json.dumps(CHAT_BODY).encode()
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


async def exchange(port: int, *parts: bytes) -> bytes:
    """All that comes back; each part is sent in a segment of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(120):
            return await reader.read()
    finally:
        writer.close()


def keyed() -> Edge:
    return Edge(FarSide(a=serve), config=RouterConfig.model_validate({"api_keys": [KEY]}))


@pytest.mark.parametrize("trailers", TRAILERS.values(), ids=TRAILERS)
async def test_trailers_change_nothing(trailers: bytes) -> None:
    async with listening(keyed()) as system:
        body = chunks(BODY) + trailers + b"\r\n"
        head = CHUNKED + CLOSE + AUTHORIZED + b"\r\n"
        for parts in ((head + body,), (head, chunks(BODY), trailers, b"\r\n")):
            answer = await exchange(system.port, *parts)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"x-sluice-class: standard" in answer
        answer = await exchange(system.port, CHUNKED + CLOSE + b"\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 401"), answer


async def test_the_next_request_on_a_connection_has_its_own_headers() -> None:
    async with listening(keyed()) as system:
        first = CHUNKED + AUTHORIZED + b"\r\n" + chunks(BODY) + b"x-slo-class: batch\r\n\r\n"
        batch = CHUNKED + CLOSE + AUTHORIZED + b"x-slo-class: batch\r\n\r\n"
        second = batch + chunks(BODY) + b"\r\n"
        third = CHUNKED + CLOSE + b"\r\n" + chunks(BODY) + AUTHORIZED + b"\r\n"
        answer = await exchange(system.port, first + second)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.index(b"x-sluice-class: standard") < answer.index(b"x-sluice-class: batch")
        answer = await exchange(system.port, first + third)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 401") == 1


@pytest.mark.parametrize(
    "lines",
    [
        AUTHORIZED + AUTHORIZED,
        AUTHORIZED + b"authorization: Bearer another\r\n",
        AUTHORIZED + b"x-slo-class: batch\r\nx-slo-class: standard\r\n",
        AUTHORIZED + b"X-Slo-Class: batch\r\nx-slo-class: batch\r\n",
        AUTHORIZED + b"x-sluice-session: a\r\nx-sluice-session: b\r\n",
        AUTHORIZED + b"x-slo-class: stand\r\n ard\r\n",
        AUTHORIZED + b"content-length: 3\r\n",
        AUTHORIZED + b"transfer-encoding: identity\r\n",
        AUTHORIZED + b"x-slo-class : batch\r\n",
    ],
)
async def test_headers_with_two_meanings_are_refused(lines: bytes) -> None:
    async with listening(keyed()) as system:
        sent = CHUNKED + CLOSE + lines + b"\r\n" + chunks(BODY) + b"\r\n"
        answer = await exchange(system.port, sent)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")), answer
        assert answer.count(b"HTTP/1.1 ") == 1
