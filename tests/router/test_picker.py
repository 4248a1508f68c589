"""The endpoint picker over real gRPC: real router, controller and replicas with simulated engines;
the test is Envoy."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from sluice.deploy.ray_start import free_port
from sluice.protocol.streams import TICKET_HEADER
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.picker import server
from sluice.router.picker.messages import (
    CLASSES,
    ENDPOINT_KEY,
    ENDPOINT_NAMESPACE,
    MAX_HEADERS,
    STREAMED_BYTES,
    BodyMode,
    MalformedError,
    Part,
)
from sluice.router.picker.server import HEALTH
from tests.documents import ROOT, marked
from tests.examples import examples
from tests.replica.waiting import until
from tests.router.far_side import COMPLETION_BODY
from tests.router.picking import (
    NAMES,
    Stream,
    System,
    envoy,
    picking,
    request_body,
    request_headers,
    set_headers,
    streaming,
)

DUPLEX = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
BUFFERED = (BodyMode.BUFFERED, BodyMode.NONE)
KEY = "a-key"


def body(**fields: Any) -> bytes:
    return json.dumps({**COMPLETION_BODY, "stream": True, "max_tokens": 4, **fields}).encode()


def message(part: Part, content: bytes = b"", status: str = "", ends: bool = False) -> bytes:
    """A part of a response."""
    made = CLASSES["ProcessingRequest"]()
    sent = getattr(made, part.value)
    sent.SetInParent()
    if part is Part.RESPONSE_HEADERS:
        sent.headers.headers.add(key=":status", raw_value=status.encode())
    if part is Part.RESPONSE_BODY:
        sent.body, sent.end_of_stream = content, ends
    data: bytes = made.SerializeToString()
    return data


async def begin(stream: Stream, modes: Any = DUPLEX, subset: bytes = b"", **fields: Any) -> None:
    """A whole request for a stream."""
    more = {"subset": subset} if subset else {}
    await stream.send(request_headers(modes=modes, **more))
    await stream.send(request_body(body(**fields)))


async def picked(stream: Stream) -> dict[str, str]:
    """The headers of an answer that names an endpoint, and no body for it."""
    headers = await stream.answer()
    emptied = await stream.answer()
    mutation = emptied.request_body.response.body_mutation.streamed_response
    assert (mutation.body, mutation.end_of_stream) == (b"", True)
    common = headers.request_headers.response
    assert set(common.header_mutation.remove_headers) == {"authorization", "x-api-key", "api-key"}
    named = set_headers(common.header_mutation)
    metadata = Struct.FromString(headers.dynamic_metadata)
    assert metadata[ENDPOINT_NAMESPACE][ENDPOINT_KEY] == named[ENDPOINT_KEY]
    return named


async def fetched(named: dict[str, str]) -> httpx.Response:
    """The endpoint's whole answer."""
    url = f"http://{named[ENDPOINT_KEY]}/v1/completions"
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(url, headers={TICKET_HEADER: named[TICKET_HEADER]})


async def test_an_objective_is_placed_and_its_stream_comes_from_the_replica() -> None:
    async with picking() as system, streaming(system.port) as stream:
        headers = {"x-slo-ttft-ms": "5000", "x-request-id": "mine"}
        await stream.send(request_headers(modes=DUPLEX, headers=headers))
        sent = body(slo={"tpot_ms": 500})
        await stream.send(request_body(sent[:10], ends=False))
        await stream.send(request_body(sent[10:]))
        named = await picked(stream)
        addresses = {port.address for port in system.ports.values()}
        assert named[ENDPOINT_KEY] in addresses
        answer = await fetched(named)
        assert answer.status_code == 200 and answer.content.endswith(b"data: [DONE]\n\n")
        await stream.send(message(Part.RESPONSE_HEADERS, status="200"))
        added = set_headers((await stream.answer()).response_headers.response.header_mutation)
        assert added["x-sluice-admission"] == "guaranteed"
        assert added["x-sluice-promised-ttft-ms"] == "5000.0"
        assert named[ENDPOINT_KEY] == system.ports[added["x-sluice-replica"]].address
        assert not {"x-sluice-stream", "content-type"} & set(added)
        # Envoy needs the body of a response back in this mode, in parts that every proxy takes.
        content = answer.content + b"x" * STREAMED_BYTES
        await stream.send(message(Part.RESPONSE_BODY, content, ends=True))
        echoed = [
            (await stream.answer()).response_body.response.body_mutation.streamed_response
            for _ in range(2)
        ]
        assert b"".join(part.body for part in echoed) == content
        assert [part.end_of_stream for part in echoed] == [False, True]
        await stream.end()
        assert await stream.answer() is None
        assert await stream.status() is grpc.StatusCode.OK
        await system.idle()
        ended = {"class": "standard", "outcome": "ok", "endpoint": "completions"}
        assert system.edge.sample("sluice_requests_total", **ended) == 1
        assert system.edge.sample("sluice_streams_total", way="direct") == 1


async def immediate(stream: Stream) -> tuple[int, dict[str, str], bytes]:
    """An answer in place of the endpoint's, which ends the stream."""
    answer = (await stream.answer()).immediate_response
    assert await stream.answer() is None
    return answer.status.code, set_headers(answer.headers), answer.body


async def asked(system: System, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request that no endpoint gets."""
    sent = fields.pop("body", None)
    async with streaming(system.port) as stream:
        await stream.send(request_headers(**{"modes": DUPLEX, **fields}))
        if sent is not None:
            await stream.send(request_body(sent))
        return await immediate(stream)


async def test_what_is_refused_gets_what_http_clients_get() -> None:
    strict = ServiceClass(ttft_ms=1e4, tpot_ms=1e3, when_unattainable="reject")
    config = RouterConfig(api_keys=(KEY,), classes={"strict": strict}, default_class="strict")
    keyed = {"authorization": f"Bearer {KEY}"}
    async with picking(config) as system:
        for sent in (None, body()):  # the body of a request without a key is not read
            status, headers, content = await asked(system, body=sent)
            assert (status, json.loads(content)["error"]["code"]) == (401, "invalid_api_key")
        status, headers, content = await asked(system, headers=keyed, body=b"{")
        assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_json")
        assert headers["content-type"] == "application/json" and headers["x-sluice-request-id"]
        never = {**keyed, "x-slo-ttft-ms": "0.01"}
        status, headers, content = await asked(system, headers=never, body=body())
        assert (status, json.loads(content)["error"]["code"]) == (429, "slo_unattainable")
        assert headers["x-should-retry"] == "false"
        status, _, content = await asked(system, path="/v1/models", ends=True, headers=keyed)
        assert (status, json.loads(content)["data"][0]["id"]) == (200, "m")
        status, _, content = await asked(system, headers=keyed, body=body(stream=False))
        assert (status, json.loads(content)["usage"]["completion_tokens"]) == (200, 4)
        status, _, content = await asked(system, path="/%ff", headers=keyed, body=body())
        assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_value")
        for mode in (BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL):
            status, _, content = await asked(system, modes=(mode, mode), headers=keyed)
            assert status == 500 and mode.name.encode() in content
        assert await asked(system, modes=(BodyMode.NONE,) * 2, path="/health", ends=True)
        await system.idle()


@pytest.mark.parametrize("lost", [True, False])
async def test_a_lost_stream_of_envoy_ends_the_request(lost: bool) -> None:
    """Before an endpoint was named: the prompt is long."""
    async with picking() as system:
        async with streaming(system.port) as stream:
            await begin(stream, prompt="word " * 6_000)
            await until(lambda: system.held == 1)
            if lost:
                stream.lose()
            else:
                await stream.end()
            await system.idle()
        ended = {"class": "standard", "outcome": "cancelled", "endpoint": "completions"}
        await until(lambda: system.edge.sample("sluice_requests_total", **ended) == 1)


async def test_an_envoy_that_does_not_fetch_the_stream_ends_the_request() -> None:
    async with picking(step_s=0.02) as system:
        async with streaming(system.port) as stream:
            await begin(stream, max_tokens=8_000)
            await picked(stream)
            assert system.held == 1
        await system.idle()


def subset(*addresses: str) -> bytes:
    hint = Struct()
    hint.update({"x-gateway-destination-endpoint-subset": addresses})
    data: bytes = hint.SerializeToString()
    return data


async def test_outside_of_a_subset_no_endpoint_is_named() -> None:
    async with picking() as system:
        for addresses in (["10.0.0.1:80"], []):
            status, _, content = await asked(system, subset=subset(*addresses), body=body())
            assert (status, json.loads(content)["error"]["code"]) == (503, "no_replica")
        await system.idle()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_request_is_placed_within_its_subset(answers: bool) -> None:
    """Also while the controller does not answer, and whatever else a policy would choose."""
    names = (*NAMES, *NAMES, NAMES[0], NAMES[0], NAMES[0])
    async with picking() as system:
        system.local.up = answers
        for name in names:
            address = system.ports[name].address
            async with streaming(system.port) as stream:
                await begin(stream, subset=subset("10.0.0.1:80", address))
                assert (await picked(stream))[ENDPOINT_KEY] == address
        # Nothing was computed elsewhere, or twice.
        assert [name for name, _ in system.edge.side.calls] == [*names]
        everyone = [port.address for port in system.ports.values()]
        async with streaming(system.port) as stream:
            await begin(stream, subset=subset(*everyone))
            assert (await picked(stream))[ENDPOINT_KEY] in everyone
        await system.idle()


@pytest.mark.parametrize(("drained", "readiness"), [(False, b"\x08\x01"), (True, b"\x08\x02")])
async def test_health_is_that_of_the_router(drained: bool, readiness: bytes) -> None:
    async with (
        picking() as system,
        grpc.aio.insecure_channel(f"127.0.0.1:{system.port}") as channel,
    ):
        system.edge.side.drained = drained
        check = channel.unary_unary(f"/{HEALTH}/Check")
        assert await check(b"") == await check(b"\n\x09readiness") == readiness
        assert await check(b"\n\x08liveness") == b"\x08\x01"


# Hostile peers.


async def status_of(system: System, *messages: bytes) -> grpc.StatusCode:
    async with streaming(system.port) as stream:
        for each in messages:
            await stream.send(each)
        await stream.end()
        async with asyncio.timeout(60):
            while await stream.answer() is not None:
                pass
            return await stream.status()


async def test_what_is_no_message_of_the_protocol_is_refused_and_ends_nothing() -> None:
    both = request_headers() + request_body(b"x")
    many = request_headers(headers={f"x-{number}": "1" for number in range(MAX_HEADERS)})
    async with picking() as system:
        for messages in (
            (b"\xff\xff\xff",),
            (b"",),
            (both,),
            (many,),
            (request_headers(headers={"x": "a" * (64 << 10)}),),
            (request_headers(headers={"x": "a\nb"}),),
            (request_headers(subset=b"\xff\xff"),),
            (request_headers() + b"\x50\x01",),  # observability_mode
            (request_body(b"x"),),
            (request_headers(modes=DUPLEX), request_body(body()), request_body(b"more")),
        ):
            assert await status_of(system, *messages) is grpc.StatusCode.INVALID_ARGUMENT
        too_large = (request_headers(modes=DUPLEX), request_body(b" " * (3 << 20)))
        assert await status_of(system, *too_large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status_of(system) is grpc.StatusCode.OK
        await system.idle()
        async with streaming(system.port) as stream:
            await begin(stream)
            await fetched(await picked(stream))


async def test_a_request_that_does_not_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    async with picking() as system, streaming(system.port) as stream:
        assert await stream.status() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with streaming(system.port) as begun:
            await begun.send(request_headers(modes=DUPLEX))
            assert await begun.status() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await server.PickerServer(no_app, no_app, 1, 1).start("127.0.0.1", port)


async def no_app(*_: object) -> None:
    pytest.fail("no request comes")


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MORE_STREAMS", 0)
    async with picking(RouterConfig(max_in_flight=2)) as system, AsyncExitStack() as streams:
        for _ in range(2):
            stream = await streams.enter_async_context(streaming(system.port))
            await stream.send(request_headers(modes=BUFFERED))
            assert await stream.answer()
        async with streaming(system.port) as beyond:
            assert await beyond.status() is grpc.StatusCode.RESOURCE_EXHAUSTED


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_bytes_of_any_kind_end_no_picker(data: st.DataObject) -> None:
    first = bytearray(request_headers(modes=DUPLEX, headers={"x-slo-ttft-ms": "1"}))
    for _ in range(data.draw(st.integers(0, 8))):
        first[data.draw(st.integers(0, len(first) - 1))] = data.draw(st.integers(0, 255))
    first = first[: data.draw(st.integers(0, len(first)))] + data.draw(st.binary())
    later = data.draw(st.lists(st.binary(max_size=40), max_size=4))

    async def one() -> None:
        queue = iter([bytes(first), *later])
        answers: list[bytes] = []

        async def read() -> bytes | None:
            return next(queue, None)

        async def write(data: bytes) -> None:
            answers.append(data)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert all(
                name.isascii() and b"\n" not in name + value for name, value in scope["headers"]
            )
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        calls: set[asyncio.Task[None]] = set()
        try:
            await server.Exchange(app, calls, read, write).run()
        except MalformedError as error:
            assert str(error)
            return
        finally:
            await asyncio.wait(calls) if calls else None
        for answer in answers:
            CLASSES["ProcessingResponse"].FromString(answer)

    asyncio.run(one())


# The endpoint picker behind a real Envoy, with the configuration of the document.


INDENT = "\n" + 14 * " "
ECHOED = (
    ("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED"),
    ("response_header_mode", f"response_trailer_mode: SEND{INDENT}  response_header_mode"),
)
BUFFERED_MODE = (
    ("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: BUFFERED"),
    ("processing_mode:", f"message_timeout: 60s{INDENT}processing_mode:"),
)
MODES = {"as documented": (), "both ways": ECHOED, "buffered": BUFFERED_MODE}


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
