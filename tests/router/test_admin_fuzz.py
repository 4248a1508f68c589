"""Whatever is sent to the admin API, it is never the router's failure, and opens nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from tests.examples import examples
from tests.router.test_admin import ADMIN, Operated, operated

Header = tuple[bytes, bytes]
Sent = tuple[str, str, bytes, list[Header], bytes]
"""Method, decoded path, query, headers, body."""

OPEN = {"admin": {"access": "open"}}

LOCAL = (
    *(b"127.0.0.1:8000", b"localhost", b"[::1]:8000", b"localhost:\xb2", b"localhost:99999999"),
    *(b"a@localhost", b"[::1%25lo]"),
)
"""Names of this machine, however odd the rest."""

HOSTS = (
    *(*LOCAL, b"[::1", b"::1]", b"[", b"", b"[x]:1", b"\xe2\x84\x80", b"\xff", b"127.1"),
    *(b"//[", b"[v1.x]", b"localhost\\@evil.example", b"0x7f000001", b"evil.example"),
)
ORIGINS = (
    *(*HOSTS, b"null", b"http://[", b"http://127.0.0.1:8000", b"http://localhost", b"http://[::1"),
)

hosts = st.sampled_from(HOSTS) | st.binary(max_size=20)
origins = st.sampled_from(ORIGINS) | hosts.map(lambda host: b"http://" + host)
headers = st.lists(
    st.tuples(st.just(b"host"), hosts)
    | st.tuples(st.just(b"origin"), origins)
    | st.tuples(st.just(b"sec-fetch-site"), st.sampled_from([b"none", b"same-origin", b"\xff"]))
    | st.tuples(
        st.just(b"authorization"),
        st.sampled_from([f"Bearer {ADMIN}".encode(), b"Bearer ", b"Bearer \xff"]) | st.binary(),
    )
    | st.tuples(st.sampled_from([b"content-length", b"content-type", b"x"]), st.binary()),
    max_size=5,
)
ids = st.sampled_from(["a", "b", "~", "%", "..", "a/../b", "\x00", "\ufffd", "x" * 300]) | st.text()
paths = (
    st.sampled_from(["/admin/v1/fleet", "/admin/v1/decisions", "/admin/", "/admin/v1/", "/ui"])
    | ids.map(lambda name: f"/admin/v1/replicas/{name}/drain")
    | ids.map(lambda name: f"/admin/v1/{name}")
    | ids.map(lambda name: f"/ui/{name}")
)
limits = st.integers().map(str) | st.sampled_from(["1", "256", "257", "٣", "1.0", "1e2", "", "+1"])
parameters = (
    st.tuples(st.just("limit"), limits)
    | st.tuples(st.just("request_id"), st.sampled_from(["0" * 32, "0" * 33, "A" * 32, ""]))
    | st.tuples(st.text(max_size=70), st.text(max_size=5))
)
queries = st.lists(parameters, max_size=3).map(
    lambda found: "&".join(
        f"{quote(name, errors='ignore')}={quote(value, errors='ignore')}" for name, value in found
    ).encode()
) | st.binary(max_size=30)
sent = st.tuples(
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"]),
    paths,
    queries,
    headers,
    st.binary(max_size=50),
)


async def ask(system: Operated, request: Sent) -> tuple[int, bytes]:
    """The status and the body that the application answers with, without a client between."""
    method, path, query, given_headers, body = request
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "root_path": "",
        "query_string": query,
        "headers": given_headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    told: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        told.append(message)

    await system.edge.api(scope, receive, send)
    return told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])


class Asked:
    """One application, asked again and again."""

    def __init__(self, runner: asyncio.Runner, config: dict[str, Any] | None) -> None:
        self._runner = runner
        self._system = runner.run(operated(config))

    def check(self, request: Sent) -> int:
        """Ask, and hold the answer to what every answer must be; its status."""
        return self._runner.run(self._check(request))

    async def _check(self, request: Sent) -> int:
        controller = self._system.local.controller
        status, body = await ask(self._system, request)
        assert 200 <= status < 500, (status, body)
        if status >= 400 and request[0] != "HEAD":
            error = json.loads(body)["error"]
            assert error["message"] and ADMIN not in body.decode()
        replicas = (await controller.snapshot())["replicas"]
        drained = [each["replica_id"] for each in replicas if each["drain"]]
        changed = status == 200 and request[0] == "POST"
        assert drained == ([request[1].split("/")[4]] if changed else [])
        for replica_id in drained:
            await controller.drain(replica_id, False)
        return status


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def at(path: str, *given_headers: Header) -> Sent:
    return "GET", path, b"", list(given_headers), b""


def test_where_it_is_open_nothing_that_is_sent_breaks_it(runner: asyncio.Runner) -> None:
    asked = Asked(runner, OPEN)

    @settings(max_examples=examples(200))
    @given(sent)
    @example(at("/admin/v1/fleet", (b"host", b"[::1")))
    @example(at("/admin/v1/fleet", (b"host", b"localhost"), (b"origin", b"http://[")))
    @example(at("/ui/nothing", (b"host", b"[::1")))
    @example(("GET", "/ui/nothing", b"\x80", [], b""))
    def holds(request: Sent) -> None:
        status = asked.check(request)
        if status < 300 and request[1].startswith("/admin/"):
            hosts_sent = [value for name, value in request[3] if name == b"host"]
            assert hosts_sent[-1] in LOCAL, "this machine was asked for by another name"

    holds()


@pytest.mark.parametrize("has_key", [False, True])
def test_where_a_key_opens_it_nothing_else_does(runner: asyncio.Runner, has_key: bool) -> None:
    asked = Asked(runner, None)
    key = (b"authorization", f"Bearer {ADMIN}".encode())

    @settings(max_examples=examples(200))
    @given(sent)
    def holds(request: Sent) -> None:
        *rest, given_headers, body = request
        if has_key:
            others = [header for header in given_headers if header[0] != b"authorization"]
            given_headers = [*others, key]
        method, path, query = rest
        status = asked.check((method, path, query, given_headers, body))
        keys = [value for name, value in given_headers if name == b"authorization"]
        if status < 300 and path.startswith("/admin/"):
            assert [each[7:].strip() for each in keys] == [ADMIN.encode()]

    holds()
