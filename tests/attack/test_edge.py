"""A thousand hostile requests to a real HTTP server: nothing breaks, and nothing is left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import le
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import SecretStr
from uvicorn.server import ServerState

from sluice.router.config import BatchesConfig, RouterConfig
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import OPERATIONS, PROVIDER, UNNAMED
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.request.body import BODY_TIMEOUT_S
from sluice.router.tenancy.auth import ApiKey
from sluice.router.wire import NO_CLASS
from tests.attack.hostile import (
    Answer,
    Raw,
    Target,
    attack,
    good_request,
    requests,
    responses,
    send,
)
from tests.router.batches.routers import rows
from tests.router.far_side import Edge, FarSide, serve
from tests.router.listening import listening

KEY = "user-key"
TARGET = Target("m", (b"authorization: Bearer " + KEY.encode(),))
KINDS = 17
SERVED = KINDS * 60

LABELS = {
    *(*RouterConfig().classes, *INFERENCE_PATHS.values(), *map(str, range(1, 11))),
    *(*(reason.value for reason in Reason), "acme", UNNAMED, NO_CLASS, "ok", "cancelled"),
    *("client_error", "refused", "best-effort", "guaranteed", "router"),
    # Of tokens and of OpenTelemetry's conventions; the model's name is the served one.
    *("prompt", "cached", "generated", "first", "later", "input", "output", "", "m", PROVIDER),
    *OPERATIONS.values(),
}
"""All that a label may say here. None of it comes from a client."""


class Attacked(NamedTuple):
    edge: Edge
    state: ServerState
    port: int

    async def good(self) -> Answer:
        return await send(self.port, good_request(TARGET))


@asynccontextmanager
async def attacked(config: RouterConfig) -> AsyncIterator[Attacked]:
    edge = Edge(FarSide(a=serve), config=config)
    async with listening(edge) as system:
        yield Attacked(edge, system.server.clients, system.port)


class Kept(NamedTuple):
    """What must not grow."""

    connections: int
    tasks: int
    held_bytes: float
    in_flight: float
    live: int
    uploads: int


def kept(system: Attacked, folder: Path) -> Kept:
    edge, state = system.edge, system.state
    return Kept(
        len(state.connections) + len(state.tasks),
        len(asyncio.all_tasks()),
        edge.sample("sluice_held_body_bytes"),
        edge.sample("sluice_in_flight_requests"),
        len(edge.side.live),
        len(rows(folder, "SELECT id FROM files WHERE state = 'writing'")),
    )


async def until(condition: Callable[[], bool]) -> None:
    """The server needs a moment for what was cut off, and has no event for it; and for a body of
    which the rest does not come as long as one may take."""
    async with asyncio.timeout(3 * BODY_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def labels(edge: Edge) -> set[str]:
    """Every value of a label but the bounds of buckets."""
    samples = [each for family in edge.metrics.registry.collect() for each in family.samples]
    return {text for each in samples for name, text in each.labels.items() if name != "le"}


async def test_a_thousand_hostile_requests_break_nothing_and_leave_nothing(tmp_path: Path) -> None:
    config = RouterConfig(
        api_keys=(ApiKey(key=SecretStr(KEY), name="acme"),),
        batches=BatchesConfig(directory=tmp_path),
    )
    async with attacked(config) as system:
        assert (await system.good()).statuses == [200]
        await until(lambda: not kept(system, tmp_path).connections)
        before = kept(system, tmp_path)
        found = await attack(system.port, requests(TARGET, SERVED))
        assert not found.bad, [(b"".join(raw.parts)[:300], answer) for raw, answer in found.bad]
        assert before[2:] == (0, 0, 0, 0)
        try:
            # What there was before may have ended since.
            await until(lambda: all(map(le, kept(system, tmp_path), before)))
        except TimeoutError:
            pytest.fail(f"left over: {kept(system, tmp_path)}, and before it was {before}")
        assert labels(system.edge) <= LABELS
        # The attack got to where it was to get: all was sent, and some of it was served.
        assert {*found.sent.values()} == {SERVED // KINDS} and len(found.sent) == KINDS
        served = {name for name, statuses in found.statuses.items() if statuses[200]}
        assert served >= {"valid", "slices", "fields", "numbers", "objectives", "headers", "chunks"}
        for name in ("valid", "slices"):
            assert found.statuses[name][200] == SERVED // KINDS - found.statuses[name][503]
        assert not found.statuses["smuggled"][200]
        assert (await system.good()).statuses == [200]


CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}'
JSON = b"content-type: application/json"
PAGE = b"origin: http://evil.example"
OWN = b"host: localhost:8000"


def sent(*head: bytes, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> Raw:
    """A request, with a body if it is a POST."""
    body = CHAT if line.startswith(b"POST") else b""
    rest = (b"connection: close", b"content-length: %d" % len(body), b"", body)
    return Raw("site", (b"\r\n".join((line, *head, *rest)),), whole=True)


SITE = ("https://app.example",)
HERE = RouterConfig(cors_origins=SITE)
OPEN = RouterConfig(host="0.0.0.0", cors_origins=SITE)
KEYED = RouterConfig(api_keys=(ApiKey(key=SecretStr(KEY), name="acme"),))
NAME, ADDRESS = b"host: llm.example.com", b"host: 10.0.0.7:8000"


@pytest.mark.parametrize(
    ("config", "head", "status"),
    [
        # What curl, the SDKs and a page of the server itself send.
        (HERE, (OWN, JSON), 200),
        (HERE, (b"host: 127.0.0.1:8000", JSON), 200),
        (HERE, (b"host: [::1]:8000", b"content-type: Application/JSON ; charset=utf-8"), 200),
        (HERE, (OWN, JSON, b"origin: http://localhost:8000", b"sec-fetch-site: same-origin"), 200),
        (HERE, (OWN, JSON, b"origin: https://app.example", b"sec-fetch-site: cross-site"), 200),
        # Simple requests, which a browser sends without a preflight.
        (HERE, (OWN,), 415),
        (HERE, (OWN, b"content-type: text/plain"), 415),
        (HERE, (OWN, b"content-type: application/x-www-form-urlencoded"), 415),
        (HERE, (OWN, b"content-type: multipart/form-data; boundary=B"), 415),
        (HERE, (OWN, JSON, PAGE), 403),
        (HERE, (OWN, JSON, b"origin: null"), 403),
        (HERE, (OWN, JSON, b"origin: http://localhost:3000"), 403),
        (HERE, (OWN, JSON, b"sec-fetch-site: cross-site"), 403),
        (HERE, (OWN, JSON, b"sec-fetch-site: same-site"), 403),
        # DNS rebinding: the page's host name is that of the server.
        (HERE, (b"host: evil.example:8000", JSON, b"origin: http://evil.example:8000"), 403),
        (HERE, (b"host: evil.example:8000", JSON), 403),
        (HERE, (b"host: 127.0.0.1.evil.example", JSON), 403),
        (HERE, (b"host: 0.0.0.0:8000", JSON), 403),
        (HERE, (b"host: ", JSON, b"origin: null"), 403),
        # An open address serves other hosts by any name: a proxy, a Service of Kubernetes.
        (OPEN, (NAME, JSON), 200),
        (OPEN, (b"host: sluice-serve-svc:8000", JSON), 200),
        (OPEN, (ADDRESS, JSON), 200),
        (OPEN, (ADDRESS, JSON, b"origin: http://10.0.0.7:8000"), 200),
        (OPEN, (NAME, JSON, b"origin: https://app.example"), 200),
        (OPEN, (b"host: app.example", JSON, b"origin: https://app.example"), 200),
        (OPEN, (NAME, JSON, b"sec-fetch-site: same-origin"), 200),
        # And no pages of other sites.
        (OPEN, (NAME, JSON, b"origin: https://llm.example.com"), 403),
        (OPEN, (ADDRESS, JSON, PAGE), 403),
        (OPEN, (ADDRESS, JSON, b"sec-fetch-site: cross-site"), 403),
        (OPEN, (NAME,), 415),
        # With keys the site does not matter.
        (KEYED, (*TARGET.headers, PAGE, b"host: evil.example"), 200),
    ],
)
async def test_without_keys_a_server_serves_its_own_host_and_no_other_site(
    config: RouterConfig, head: tuple[bytes, ...], status: int
) -> None:
    async with attacked(config) as system:
        answer = await send(system.port, sent(*head))
        assert answer.statuses == [status]
        if status == 415:
            assert b"content-type must be application/json" in answer.raw
        assert len(system.edge.side.calls) == (status == 200)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 403) for path in (b"/v1/models", b"/metrics", b"/openapi.json", b"/v1/files")),
        *((path, 403) for path in (b"/v1/batches", b"/nothing", b"/v1/responses/x")),
        *((path, 200) for path in (b"/health", b"/")),
    ],
)
async def test_a_page_whose_name_resolves_to_the_server_reads_its_health_only(
    path: bytes, status: int
) -> None:
    async with attacked(RouterConfig()) as system:
        line = b"GET " + path + b" HTTP/1.1"
        answer = await send(system.port, sent(b"host: evil.example", line=line))
        assert answer.statuses == [status]


@pytest.mark.parametrize("form", [b"/v1/audio/transcriptions", b"/v1/files"])
async def test_a_form_of_another_site_is_refused_before_it_is_read(
    form: bytes, tmp_path: Path
) -> None:
    config = RouterConfig(batches=BatchesConfig(directory=tmp_path))
    async with attacked(config) as system:
        media = b"content-type: multipart/form-data; boundary=B"
        raw = sent(OWN, PAGE, media, line=b"POST " + form + b" HTTP/1.1")
        assert (await send(system.port, raw)).statuses == [403]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", []),
        (b"junk", [0]),
        (b"HTTP/1.1 400 Bad\r\n\r\nuntil the end HTTP/1.1 200 ", [400]),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            [100, 200],
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
            [200, 503],
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nXjunk", [200, 0]),
    ],
)
def test_answers_are_told_apart(raw: bytes, told: list[int]) -> None:
    assert [response.status for response in responses(raw)] == told


async def test_a_server_that_takes_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attack.hostile.HANG_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        raw = Raw("x", (bytes(1 << 25),))
        async with asyncio.timeout(120):
            answer = await send(listener.getsockname()[1], raw)
    assert answer.hung


@pytest.mark.parametrize(
    ("head", "bad"),
    [
        (b"HTTP/1.1 500 No", True),
        (b"HTTP/1.1 503 No", True),
        (b"HTTP/1.1 503 No\r\nRetry-After: 1", False),
        (b"HTTP/1.1 404 No", False),
        (b"no HTTP", True),
    ],
)
async def test_a_bad_answer_is_noticed(head: bytes, bad: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await attack(port, [Raw("x", (b"GET / HTTP/1.1\r\n\r\n",))])
    assert bool(found.bad) == bad
