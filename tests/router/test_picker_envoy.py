"""The endpoint picker behind a real Envoy, with the configuration of the document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from sluice.deploy.ray_start import free_port
from sluice.router.config import RouterConfig, ServiceClass
from tests.documents import ROOT, marked
from tests.replica.waiting import until
from tests.router.far_side import COMPLETION_BODY
from tests.router.picking import NAMES, System, envoy, picking

INDENT = "\n" + 14 * " "
ECHOED = (
    ("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED"),
    ("response_header_mode", f"response_trailer_mode: SEND{INDENT}  response_header_mode"),
)
BUFFERED = (
    ("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: BUFFERED"),
    ("processing_mode:", f"message_timeout: 60s{INDENT}processing_mode:"),
)
MODES = {"as documented": (), "both ways": ECHOED, "buffered": BUFFERED}


@asynccontextmanager
async def behind_envoy(
    system: System, folder: Path, changes: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    (config,) = marked(ROOT / "docs" / "endpoint-picker.md", "run: envoy")
    port = free_port()
    ports = (("port_value: 10000", f"port_value: {port}"), ("9002", str(system.port)))
    for old, new in (*ports, *changes):
        assert config.count(old) == 1
        config = config.replace(old, new)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        envoy(config, folder, client) as system.envoy,
    ):
        yield client


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_gets_its_stream_and_the_headers_of_the_router(
    mode: str, tmp_path: Path
) -> None:
    body = {**COMPLETION_BODY, "stream": True, "max_tokens": 20, "slo": {"tpot_ms": 500}}
    async with picking() as system, behind_envoy(system, tmp_path, MODES[mode]) as client:
        headers = {
            "x-slo-ttft-ms": "5000",
            "x-sluice-ticket": "mine",
            "x-gateway-destination-endpoint": "127.0.0.1:1",
        }
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert answer.headers["x-sluice-replica"] in NAMES
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert len([each for each in events if json.loads(each)["choices"]]) >= 20
        assert answer.text.endswith("data: [DONE]\n\n")
        # A body in many parts, and one answer that is no stream.
        long = {**body, "prompt": "word " * 6_000}
        answer = await client.post("/v1/completions", json=long)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        whole = await client.post("/v1/completions", json={**body, "stream": False})
        assert whole.json()["usage"]["completion_tokens"] == 20
        assert whole.headers["x-sluice-admission"] == "guaranteed"
        async with AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none") as openai:
            assert [model.id async for model in openai.models.list()] == ["m"]
            chat = await openai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
            )
            assert [chunk async for chunk in chat][-1].choices[0].finish_reason == "length"
        await system.idle()
        ended = {"class": "standard", "outcome": "ok", "endpoint": "completions"}
        assert system.edge.sample("sluice_requests_total", **ended) == 3
        assert system.edge.sample("sluice_streams_total", way="direct") == 3


async def test_what_cannot_be_promised_gets_429_by_envoy(tmp_path: Path) -> None:
    strict = ServiceClass(ttft_ms=2_000, tpot_ms=1_000, when_unattainable="reject")
    config = RouterConfig(classes={"strict": strict}, default_class="strict")
    body = {**COMPLETION_BODY, "stream": True, "max_tokens": 2, "prompt": "word " * 4_000}
    async with picking(config) as system, behind_envoy(system, tmp_path) as client:
        posts = [client.post("/v1/completions", json=body) for _ in range(24)]
        answers = await asyncio.gather(*posts)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) < len(answers)
        for answer in refused:
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == "slo_unattainable"
        served = [answer for answer in answers if answer.status_code == 200]
        assert {answer.headers["x-sluice-admission"] for answer in served} == {"guaranteed"}
        assert {answer.headers["x-sluice-replica"] for answer in served} == set(NAMES)
        await system.idle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    mode: str, begun: bool, tmp_path: Path
) -> None:
    long = {"max_tokens": 2_000} if begun else {"prompt": "word " * 6_000}
    body = {**COMPLETION_BODY, "stream": True, **long}
    async with (
        picking(step_s=0.02) as system,
        behind_envoy(system, tmp_path, MODES[mode]) as client,
    ):

        async def read() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_raw():
                    streaming.set()

        streaming = asyncio.Event()
        reading = asyncio.create_task(read())
        if begun:
            await streaming.wait()
        else:
            await until(lambda: system.held == 1)
        reading.cancel()
        await system.idle()
        ended = {"class": "standard", "outcome": "cancelled", "endpoint": "completions"}
        await until(lambda: system.edge.sample("sluice_requests_total", **ended) == 1)


async def test_a_replica_that_fails_and_an_envoy_that_dies_leave_nothing(tmp_path: Path) -> None:
    body = {**COMPLETION_BODY, "stream": True, "max_tokens": 2_000}
    async with picking(step_s=0.02) as system, behind_envoy(system, tmp_path) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            await system.replicas[answer.headers["x-sluice-replica"]].stop()
            with pytest.raises(httpx.HTTPError):
                async for _ in pieces:
                    pass
        failed = {"class": "standard", "outcome": "failed", "endpoint": "completions"}
        assert system.edge.sample("sluice_requests_total", **failed) == 1
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_raw())
            assert system.envoy is not None
            system.envoy.kill()
            await system.idle()
