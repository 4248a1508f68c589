"""What of a request's bytes counts, at a router that Serve runs: through HAProxy, and at its own
port."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
import ray
from ray.serve.context import _get_global_client

from tests.e2e.conftest import System, system

pytestmark = pytest.mark.ray

KEY = "authorization: Bearer a-key-of-a-client\r\n"
BODY = {"model": "sim", "prompt": "Hello.", "max_tokens": 40, "stream": True}


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    fields = {
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 1},
        "router": {"api_keys": ["a-key-of-a-client"]},
    }
    with system(fields) as running:
        yield running


@pytest.fixture(params=["haproxy", "router"])
def port(request: pytest.FixtureRequest, serving: System) -> int:
    """Where requests go: HAProxy's port, or that of the router's own."""
    if request.param == "haproxy":
        return serving.config.router.port
    groups = ray.get(
        _get_global_client()._controller.get_target_groups.remote(app_name=serving.config.name)
    )
    (target,) = [each for group in groups if group.protocol == "HTTP" for each in group.targets]
    return int(target.port)


def ask(port: int, headers: str, trailers: bytes = b"") -> bytes:
    """All that comes back. The request is one segment, so all of it is parsed at once."""
    body = json.dumps(BODY).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: sluice\r\nconnection: close\r\n"
        f"transfer-encoding: chunked\r\n{headers}\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=120) as wire:
        wire.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers))
        return b"".join(iter(lambda: wire.recv(65_536), b""))


def test_headers_are_those_of_the_head(port: int) -> None:
    answer = ask(port, KEY)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
    assert ask(port, "", KEY.encode()).startswith(b"HTTP/1.1 401 ")
    for trailers in (
        b"x-slo-class: batch\r\n",
        b"x-slo-ttft-ms: soon\r\n",
        b"x-request-timeout-seconds: 0.000001\r\n",
        b"x-request-id: \xff\xfe\r\nx-session-id: \xff\r\nx-slo-class: \xff\r\n",
    ):
        answer = ask(port, KEY, trailers)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b"x-sluice-class: standard" in answer and b"data: [DONE]" in answer


def test_serve_is_not_steered_by_clients(port: int) -> None:
    for header in (
        "x-request-timeout-seconds: 0.000001\r\n",
        "X-Request-Timeout-Seconds: 0.000001\r\n",
        "x-request-disconnect-disabled: ?1\r\n",
    ):
        answer = ask(port, KEY + header)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer, answer
