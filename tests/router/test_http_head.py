"""What of a request's bytes becomes its headers, at the server that Serve starts for routers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.router.config import RouterConfig
from sluice.router.request.http_head import use_strict_heads
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


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """The port of a server that answers with the headers which the application gets."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        names = [name.decode("latin-1") for name, _ in scope["headers"]]
        response: Response = JSONResponse(names)
        await request.body()
        await response(scope, receive, send)

    use_strict_heads()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize(
    "line",
    [
        b"x-request-timeout-seconds: 0.001",
        b"X-Request-Timeout-Seconds: 0",
        b"x-request-disconnect-disabled: ?1",
        b"x-session-id: a",
        b"X_Session_Id: a",
        b"serve_multiplexed_model_id: a",
        b"serve-multiplexed-model-id: \xff",
        b"x-request-id: \xff",
        b"traceparent: \xff",
        b"tracestate: a=\xff",
    ],
)
async def test_what_only_serve_would_read_or_fail_at_is_dropped(line: bytes) -> None:
    async with echoing() as port:
        sent = b"GET / HTTP/1.1\r\nhost: sluice\r\nconnection: close\r\n" + line + b"\r\n\r\n"
        answer = await exchange(port, sent)
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == ["host", "connection"]


async def test_what_serve_can_read_is_kept() -> None:
    sent = b"x-request-id: mine 1\r\ntraceparent: 00-1\r\ntracestate: a=1\r\nx-slo-class: \xff\r\n"
    async with echoing() as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\n" + CLOSE + sent + b"\r\n")
        names = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert names == ["connection", "x-request-id", "traceparent", "tracestate", "x-slo-class"]


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
