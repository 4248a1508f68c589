"""The admin API: who may use it, what it says, and draining; with the real controller behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from sluice.deploy.app import build
from sluice.deploy.commands.serve import page_address, with_admin_key
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.router.admin.api import (
    FEW_DECISIONS,
    MAX_DECISIONS,
    REMEMBER_LIMIT_S,
    TTL_S,
    AdminService,
)
from sluice.router.config import RouterConfig
from tests.controller.fleet import decode_row, hello
from tests.examples import examples
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarSide, serve
from tests.router.local_controller import LocalController

ADMIN, USER = "admin-key-of-the-tests", "user-key-of-the-tests"
KEYS = {"api_keys": [USER], "admin": {"keys": [ADMIN]}}
PATHS = ("/admin/v1/fleet", "/admin/v1/decisions", "/admin/v1/nothing")


class Operated:
    """A router, its controller, and two replicas ``a`` and ``b``."""

    def __init__(self, config: dict[str, Any] | None = None, models: int = 1) -> None:
        self.clock = Clock()
        self.controllers = [LocalController(self.clock) for _ in range(models)]
        self.local = self.controllers[0]
        names = ["m", *(f"m{index}" for index in range(1, models))]
        self.edge = Edge(
            FarSide(a=serve, b=serve),
            self.local,  # type: ignore[arg-type]
            RouterConfig.model_validate(KEYS if config is None else config),
            clock=self.clock,
            admin_service=AdminService(dict(zip(names, self.controllers, strict=True)), self.clock),
        )

    async def start(self) -> Operated:
        for name in ("a", "b"):
            await self.local.controller.hello(hello(name))
        return self

    async def ask(
        self, path: str, key: str | None = ADMIN, method: str = "GET", **headers: str
    ) -> httpx.Response:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        async with self.edge.client() as client:
            return await client.request(method, path, headers=headers)

    async def chat(self, key: str = USER, *ids: bytes) -> httpx.Response:
        """A request with these ids of its client's own."""
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-slo-tpot-ms", b"500")]
        headers += [(b"x-request-id", each) for each in ids]
        async with self.edge.client() as client:
            return await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)


async def operated(config: dict[str, Any] | None = None, models: int = 1) -> Operated:
    return await Operated(config, models).start()


@pytest.fixture
async def system() -> Operated:
    return await operated()


def error_of(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    return found


# Keys.


async def test_admin_keys_and_user_keys_open_one_thing_each(system: Operated) -> None:
    for path in PATHS:
        for wrong in (None, USER, ADMIN + "x", ADMIN[:-1], ""):
            refused = await system.ask(path, wrong)
            assert refused.status_code == 401 and ADMIN not in refused.text, (path, wrong)
    assert (await system.ask("/admin/v1/fleet")).status_code == 200
    assert (await system.ask("/admin/v1/replicas/a/drain", USER, "POST")).status_code == 401
    assert (await system.chat(USER)).status_code == 200
    assert (await system.chat(ADMIN)).status_code == 401
    assert (await system.ask("/v1/models", ADMIN)).status_code == 401


async def test_without_an_admin_key_nothing_opens_it_and_the_error_says_what_to_set() -> None:
    for config in ({}, {"api_keys": [USER]}):
        system = await operated(config)
        for key in (None, USER, ""):
            refused = await system.ask("/admin/v1/fleet", key)
            assert refused.status_code == 403
            assert "router.admin.keys" in error_of(refused)["message"]


async def test_where_it_is_off_there_is_neither_api_nor_page() -> None:
    system = await operated({"admin": {"access": "off"}})
    for path in (*PATHS, "/ui", "/ui/page.js"):
        assert (await system.ask(path, None)).status_code == 404


async def test_digests_and_files_of_keys_work_like_those_of_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- name: second\n  key: second-admin-key-of-tests\n")
    digest = hashlib.sha256(ADMIN.encode()).hexdigest()
    system = await operated({"admin": {"keys": [{"sha256": digest}], "keys_file": str(file)}})
    for key, status in ((ADMIN, 200), ("second-admin-key-of-tests", 200), (digest, 401)):
        assert (await system.ask("/admin/v1/fleet", key)).status_code == status


async def test_open_is_for_this_machine_and_not_for_pages_of_other_sites() -> None:
    system = await operated({"admin": {"access": "open"}})
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        assert (await system.ask("/admin/v1/fleet", None, host=host)).status_code == 200
    own = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
    assert (await system.ask("/admin/v1/fleet", None, **own)).status_code == 200
    for wrong in (
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"host": "localhost", "origin": "http://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "sec-fetch-site": "cross-site"},
    ):
        drained = await system.ask("/admin/v1/replicas/a/drain", None, "POST", **wrong)
        assert drained.status_code == 403, wrong
    fleet = await system.ask("/admin/v1/fleet", None, host="localhost")
    assert {each["drain"] for each in fleet.json()["replicas"]} == {None}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"host": "0.0.0.0", "admin": {"access": "open"}}, "loopback"),
        ({"host": "", "admin": {"access": "open"}}, "loopback"),
        ({"picker": {"port": 9002}, "admin": {"access": "open"}}, "picker.port"),
        ({"picker": {"port": 9002}, "metrics": {"access": "open"}}, "picker.port"),
        ({"admin": {"access": "open", "keys": [ADMIN]}}, "would open nothing"),
        ({"admin": {"access": "yes"}}, "off"),
        ({"admin": {"keys": ["with space"]}}, "printable ASCII"),
        ({"api_keys": [ADMIN], "admin": {"keys": [ADMIN]}}, "is also an API or metrics key"),
        ({"admin": {"kyes": []}}, "router.admin.kyes"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        parse_config({"router": config})
    assert ADMIN not in str(refused.value)


def test_open_is_refused_where_serve_says_where_http_listens() -> None:
    with pytest.raises(ValueError, match="sluice serve"):
        build({"router": {"admin": {"access": "open"}}})


def test_a_run_without_an_admin_key_gets_one_of_its_own() -> None:
    first, key = with_admin_key(SluiceConfig())
    _, other = with_admin_key(SluiceConfig())
    assert key is not None and len(key) > 40 and key != other
    assert first.router.admin.keys
    assert page_address(first, "http://h:1", key) == f"http://h:1/ui#key={key}"
    assert key not in str(first.model_dump(mode="json"))
    for admin in ({"keys": [ADMIN]}, {"access": "open"}, {"access": "off"}):
        config = parse_config({"router": {"admin": admin}})
        assert with_admin_key(config) == (config, None)
    assert page_address(config, "http://h:1", None) is None


# What it says.


async def test_the_fleet_is_told_with_the_classes_and_the_controller(system: Operated) -> None:
    for _ in range(3):
        assert (await system.chat()).status_code == 200
    await system.local.hear(system.edge.metrics)
    system.clock.now_s += 10
    # It was a first push, so it was before; now there is more.
    for name in ("a", "b"):
        await system.local.controller.hello(hello(name, [decode_row(5, 10)], now_s=10.0))
    assert (await system.chat()).status_code == 200
    await system.local.hear(system.edge.metrics)
    response = await system.ask("/admin/v1/fleet")
    assert response.headers["cache-control"] == "no-store"
    fleet = response.json()
    assert [each["replica_id"] for each in fleet["replicas"]] == ["a", "b"]
    first = fleet["replicas"][0]
    assert (first["model"], first["condition"], first["running"]) == ("m", "fresh", 1)
    assert first["kv_usage"] == 0.1 and first["pab_tokens"] > 0
    (row,) = fleet["classes"]
    assert (row["class"], row["model"], row["requests"]) == ("standard", "m", 1)
    assert row["attainment"] == 1 and fleet["admission"]["guaranteed"] == 1
    facts = fleet["models"]["m"]
    assert fleet["controller"] == facts and facts["up"] and facts["policy"] == "most_gain"
    assert facts["decision_ms"]["count"] == 4 and fleet["unavailable"] == []


async def test_a_request_is_found_by_the_id_that_its_client_was_told(system: Operated) -> None:
    ids = [(await system.chat()).headers["x-sluice-request-id"] for _ in range(3)]
    listed = (await system.ask("/admin/v1/decisions?limit=2")).json()["decisions"]
    assert [each["request_id"] for each in listed] == [ids[2], ids[1]]
    (found,) = (await system.ask(f"/admin/v1/decisions?request_id={ids[0]}")).json()["decisions"]
    assert found["request_id"] == ids[0] and found["replica_id"] in ("a", "b")
    assert found["model"] == "m" and found["class"] == "standard"
    nothing = await system.ask(f"/admin/v1/decisions?request_id={'0' * 32}")
    assert nothing.json() == {"decisions": []}


async def test_a_request_is_found_by_its_clients_own_id(system: Operated) -> None:
    for own in ("mine-1", "spaces & more", "x" * 1_000):
        system.clock.now_s += TTL_S
        told = (await system.chat(USER, own.encode())).headers["x-sluice-request-id"]
        found = await system.ask(f"/admin/v1/decisions?request_id={quote(own)}")
        (decision,) = found.json()["decisions"]
        assert (decision["request_id"], decision["client_request_id"]) == (told, own[:128])
    odd = await system.chat(USER, b"\xc3\xbcml\t1", b"another")
    (decision,) = (await system.ask("/admin/v1/decisions?limit=1")).json()["decisions"]
    assert decision["request_id"] == odd.headers["x-sluice-request-id"]
    assert decision["client_request_id"] == "??ml?1"
    system.clock.now_s += TTL_S
    await system.chat()
    (decision,) = (await system.ask("/admin/v1/decisions?limit=1")).json()["decisions"]
    assert decision["client_request_id"] is None


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        (f"limit={MAX_DECISIONS + 1}", "limit"),
        ("limit=-1", "limit"),
        ("limit=ten", "limit"),
        ("limit=" + "9" * 5_000, "limit"),
        ("limit=1&limit=2", None),
        ("request_id=", "request_id"),
        ("lim=3", "lim"),
    ],
)
async def test_wrong_parameters_are_named(query: str, param: str | None) -> None:
    refused = await (await operated()).ask(f"/admin/v1/decisions?{query}")
    assert refused.status_code == 400 and error_of(refused)["param"] == param
    assert len(refused.text) < 500


async def test_however_many_pages_are_open_the_controller_is_asked_once_a_second(
    system: Operated,
) -> None:
    await asyncio.gather(*(system.ask("/admin/v1/fleet") for _ in range(20)))
    queries = ["", "?limit=1", f"?limit={FEW_DECISIONS}"]
    await asyncio.gather(*(system.ask(f"/admin/v1/decisions{query}") for query in queries * 5))
    assert (system.local.snapshots, system.local.listings) == (1, 1)
    await system.ask(f"/admin/v1/decisions?limit={MAX_DECISIONS}")
    await system.ask(f"/admin/v1/decisions?request_id={'0' * 32}")
    assert system.local.listings == 2
    system.clock.now_s += TTL_S
    await system.ask("/admin/v1/fleet")
    assert system.local.snapshots == 2


async def test_a_controller_that_is_silent_is_said_to_be_so_and_no_secret(system: Operated) -> None:
    system.local.up = False
    for method, path in (
        ("GET", "/admin/v1/fleet"),
        ("GET", "/admin/v1/decisions"),
        ("POST", "/admin/v1/replicas/a/drain"),
    ):
        refused = await system.ask(path, method=method)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "controller_down")
        assert refused.headers["retry-after"] == "1"
    system.local.up = True
    system.clock.now_s += TTL_S
    assert (await system.ask("/admin/v1/fleet")).status_code == 200


async def test_several_models_are_told_together() -> None:
    system = await operated(models=3)
    await system.controllers[1].controller.hello(hello("c"))
    system.controllers[2].up = False
    fleet = (await system.ask("/admin/v1/fleet")).json()
    models = {each["replica_id"]: each["model"] for each in fleet["replicas"]}
    assert models == {"a": "m", "b": "m", "c": "m1"}
    assert [facts["up"] for facts in fleet["models"].values()] == [True, True, False]
    assert fleet["unavailable"] == ["m2"]
    drained = await system.ask("/admin/v1/replicas/c/drain?force=true", method="POST")
    assert drained.json()["model"] == "m1"
    # The silent one may know it.
    unknown = await system.ask("/admin/v1/replicas/zz/drain", method="POST")
    assert unknown.status_code == 503


# Draining.


async def test_a_replica_is_drained_and_taken_back(system: Operated) -> None:
    await system.ask("/admin/v1/fleet")
    told = await system.ask("/admin/v1/replicas/a/drain", method="POST")
    assert told.status_code == 200
    facts = {"model": "m", "replica_id": "a", "draining": True, "drain": "operator"}
    counts = dict.fromkeys(("left", "waiting", "running", "reserved"), 0)
    assert told.json() == {**facts, **counts, "remembered": True}
    for _ in range(4):
        assert (await system.chat()).headers["x-sluice-replica"] == "b"
    # At once, although the fleet was asked for a moment ago.
    fleet = (await system.ask("/admin/v1/fleet")).json()
    assert [each["drain"] for each in fleet["replicas"]] == ["operator", None]
    again = await system.ask("/admin/v1/replicas/a/drain", method="DELETE")
    assert again.json()["draining"] is False
    await system.ask("/admin/v1/replicas/b/drain", method="POST")
    assert (await system.chat()).headers["x-sluice-replica"] == "a"


async def test_a_drain_is_answered_once_the_replica_remembers_it() -> None:
    controller = LocalController(Clock())
    service = AdminService({"m": controller}, count().__next__)  # a second for each look
    await controller.controller.hello(hello("a"))
    controller.forgets = 2
    assert (await service.drain("a", True, force=True))["remembered"]
    assert controller.asked == 3
    controller.asked, controller.forgets = 0, 1_000_000
    told = await service.drain("a", False)
    assert (told["draining"], told["remembered"]) == (False, False)
    assert controller.asked == REMEMBER_LIMIT_S + 1


async def test_the_last_replica_of_a_model_is_drained_only_with_force(system: Operated) -> None:
    await system.ask("/admin/v1/replicas/a/drain", method="POST")
    refused = await system.ask("/admin/v1/replicas/b/drain", method="POST")
    assert refused.status_code == 409
    error = error_of(refused)
    assert (error["code"], error["param"]) == ("last_replica", "force")
    assert "503" in error["message"]
    assert (await system.chat()).headers["x-sluice-replica"] == "b"
    for wrong in ("force=yes", "force=", "force=true&force=true"):
        path = f"/admin/v1/replicas/b/drain?{wrong}"
        assert (await system.ask(path, method="POST")).status_code == 400
    told = await system.ask("/admin/v1/replicas/b/drain?force=true", method="POST")
    assert told.status_code == 200 and told.json()["draining"]
    path = "/admin/v1/replicas/b/drain?force=true"
    assert (await system.ask(path, method="DELETE")).status_code == 400


async def test_the_log_says_who_drained_what(caplog: pytest.LogCaptureFixture) -> None:
    system = await operated({"admin": {"keys": [{"name": "night-shift", "key": ADMIN}]}})
    await system.ask("/admin/v1/replicas/a/drain", method="POST")
    await system.ask("/admin/v1/replicas/a/drain", method="DELETE")
    drained, taken_back = (
        each for each in caplog.messages if "night-shift" in each and "replica a" in each
    )
    assert "drained" in drained and "taken back" in taken_back
    assert ADMIN not in caplog.text


async def test_there_is_nothing_else_to_drain(system: Operated) -> None:
    unknown = await system.ask("/admin/v1/replicas/zz/drain", method="POST")
    assert unknown.status_code == 404 and "zz" in error_of(unknown)["message"]
    for path in ("/admin/v1/replicas/%20/drain", f"/admin/v1/replicas/{'x' * 300}/drain"):
        assert (await system.ask(path, method="POST")).status_code == 400
    assert (await system.ask("/admin/v1/replicas/a/drain?now=1", method="POST")).status_code == 400
    assert (await system.ask("/admin/v1/replicas/a/drain", method="PUT")).status_code == 405


# The page.


async def test_the_page_needs_no_key_and_trusts_nothing_else(system: Operated) -> None:
    for path, kind in (("/ui", "html"), ("/ui/page.css", "css"), ("/ui/api.js", "javascript")):
        got = await system.ask(path, None)
        assert got.status_code == 200 and kind in got.headers["content-type"]
        assert "default-src 'none'" in got.headers["content-security-policy"]
        assert "unsafe" not in got.headers["content-security-policy"]
        assert "://" not in got.text.replace("http://www.w3.org/2000/svg", "")
        assert ADMIN not in got.text and USER not in got.text
    assert (await system.ask("/ui/../config.py", None)).status_code in (401, 404)
    assert (await system.ask("/ui/page.py", None)).status_code == 404


# Whatever is sent to the admin API, it is never the router's failure, and opens nothing.


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
