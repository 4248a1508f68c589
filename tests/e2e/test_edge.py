from __future__ import annotations

import asyncio
import hashlib
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from openai import OpenAI

from sluice.deploy.ray_start import free_port
from sluice.protocol.messages import QuotaUse
from sluice.protocol.streams import TICKET_HEADER
from sluice.router.picker.messages import ENDPOINT_KEY
from sluice.router.tenancy.tokens import MAX_TOKEN_BYTES
from tests.e2e import followed
from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.otlp_collector import Collector, collector
from tests.router.picking import request_body, request_headers, set_headers, streaming
from tests.router.token_issuer import Issuer, issuing

pytestmark = pytest.mark.ray

BODY = {"model": "sim", "prompt": "Hello.", "max_tokens": 3, "stream": True}
PER_MINUTE, BURST_S = 0.1, 3_600  # six at once, and no more for as long as the test runs
FIXED = "a-key-in-the-configuration"
KEY = f"authorization: Bearer {FIXED}\r\n"
LINES = 24


def entry(key: str, name: str, more: str = "") -> str:
    return f"- {{sha256: {hashlib.sha256(key.encode()).hexdigest()}, name: {name}{more}}}\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    limits = f", limits: {{requests_per_minute: {PER_MINUTE}, burst_s: {BURST_S}}}"
    path.write_text(entry("limited", "acme", limits) + entry("old-key", "other"))
    return path


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as at:
        yield at


@pytest.fixture(scope="module")
def serving(
    tmp_path_factory: pytest.TempPathFactory, keys: Path, issuer: Issuer, spans: Collector
) -> Iterator[System]:
    fields = {
        "name": "edge",
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 1},
        "controller": PATIENT,
        "telemetry": followed.telemetry(spans),
        "router": {
            **ASKING,
            "replicas": 2,
            "api_keys": [FIXED, {"key": followed.KEY, "name": followed.CLIENT}],
            "metrics": {"keys": [followed.METRICS_KEY]},
            "api_keys_file": str(keys),
            "issuers": {"corp": issuer.config().model_dump(mode="json")},
            "batches": {"directory": str(tmp_path_factory.mktemp("batches"))},
            "picker": {"port": free_port()},
        },
    }
    with system(fields) as running:
        yield running


def test_requests_can_be_followed(serving: System, spans: Collector, tmp_path: Path) -> None:
    """The first test: no alert has a reason yet."""
    followed.check_followed(serving, spans, tmp_path)


@pytest.fixture
def port(serving: System) -> int:
    return serving.config.router.port


def send(port: int, headers: str, trailers: bytes = b"") -> bytes:
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
    answer = send(port, KEY)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
    assert send(port, "", KEY.encode()).startswith(b"HTTP/1.1 401 ")
    for trailers in (
        b"x-slo-class: batch\r\n",
        b"x-slo-ttft-ms: soon\r\n",
        b"x-request-id: \xff\xfe\r\nx-session-id: \xff\r\nx-slo-class: \xff\r\n",
    ):
        answer = send(port, KEY, trailers)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b"x-sluice-class: standard" in answer and b"data: [DONE]" in answer


def test_a_token_is_as_good_as_a_key(port: int, issuer: Issuer) -> None:
    """The longest one, too; and routers had the issuer's keys when they began to serve."""
    token = issuer.sign({"x": "x" * (MAX_TOKEN_BYTES * 3 // 4 - 400)})
    assert MAX_TOKEN_BYTES - 400 < len(token) <= MAX_TOKEN_BYTES
    answer = send(port, f"authorization: Bearer {token}\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
    answer = send(port, f"authorization: Bearer {issuer.sign({'aud': 'mail'})}\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ") and b"audience is another" in answer


def test_envoy_asks_either_router_for_an_endpoint(serving: System) -> None:
    """Several times: they share the port, and connections are spread over them."""

    async def ask(key: str) -> tuple[int, str]:
        port = serving.config.router.picker.port
        assert port is not None
        async with streaming(port) as stream:
            await stream.send(request_headers(headers={"authorization": f"Bearer {key}"}))
            if key == FIXED:  # another one is refused at once, and the stream ends
                await stream.send(request_body(json.dumps(BODY).encode()))
            answer = await stream.answer()
            if answer.HasField("immediate_response"):
                return answer.immediate_response.status.code, ""
            named = set_headers(answer.request_headers.response.header_mutation)
            async with httpx.AsyncClient(timeout=120) as client:
                url = f"http://{named[ENDPOINT_KEY]}/v1/completions"
                found = await client.post(url, headers={TICKET_HEADER: named[TICKET_HEADER]})
                return found.status_code, found.text

    for _ in range(4):
        assert asyncio.run(ask("unknown"))[0] == 401
        status, text = asyncio.run(ask(FIXED))
        assert status == 200 and text.endswith("data: [DONE]\n\n")


def test_a_batch_runs(serving: System) -> None:
    with OpenAI(base_url=f"{serving.url}/v1", api_key=FIXED) as client:
        file = client.files.create(file=("lines.jsonl", _lines()), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(
            lambda: client.batches.retrieve(made.id).status in ("completed", "failed"),
            "the batch ended",
            show=lambda: client.batches.retrieve(made.id),
        )
        ended = client.batches.retrieve(made.id)
        assert ended.status == "completed", ended
        assert ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (LINES, 0)
        assert ended.output_file_id is not None
        output = client.files.content(ended.output_file_id).text
    results = {each["custom_id"]: each for each in map(json.loads, output.splitlines())}
    assert results.keys() == {f"line-{n}" for n in range(LINES)}
    for n in range(LINES):
        response = results[f"line-{n}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 1 + n % 5


def _lines() -> io.BytesIO:
    lines = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "sim", "prompt": f"Number {n}.", "max_tokens": 1 + n % 5},
        }
        for n in range(LINES)
    ]
    return io.BytesIO("\n".join(map(json.dumps, lines)).encode())


def test_keys_and_limits_hold_over_both_routers(serving: System, keys: Path) -> None:
    def ask(key: str) -> httpx.Response:
        # A connection of its own, so that either router may get it.
        url, headers = f"{serving.url}/v1/completions", {"authorization": f"Bearer {key}"}
        return httpx.post(url, json=BODY, headers=headers, timeout=120)

    answer = ask(FIXED)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert ask("unknown").status_code == 401

    # The limit holds over both routers, once they know of each other's use.
    statuses: list[int] = []

    def refused_by_both() -> bool:
        statuses.append(ask("limited").status_code)
        return statuses[-12:] == [429] * 12

    wait_until(refused_by_both, "both routers refuse", show=lambda: statuses)
    admitted = statuses.count(200)
    assert set(statuses) == {200, 429}
    assert 6 <= admitted <= 2 * 6

    def known() -> float:
        use = QuotaUse("requests/name-acme", 0, 0, PER_MINUTE / 60)
        (level,) = ray.get(serving.controller().share_quotas.remote([use]), timeout=120)
        return float(level)

    wait_until(
        lambda: admitted - 1 < known() <= admitted, "the controller knows of all", show=known
    )

    # A key is changed without a restart, and the one in the configuration stays.
    keys.write_text(entry("new-key", "other"))
    codes: list[int] = []

    def changed_in_both() -> bool:
        codes.append(ask("old-key").status_code)
        return codes[-12:] == [401] * 12

    wait_until(changed_in_both, "both routers have read the file again", show=lambda: codes)
    assert {ask("new-key").status_code for _ in range(6)} == {200}
    assert ask(FIXED).status_code == 200
