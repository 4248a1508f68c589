"""Transcriptions and translations at the edge: the form of OpenAI's own client becomes a body with
audio in it, each part is bounded, and a replica gets the audio as it is."""

from __future__ import annotations

import io
import wave
from typing import Any

import msgspec
import openai
import pytest

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.protocol.streams import Open
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.request.form import MAX_PARTS
from sluice.router.request.prompt import (
    AUDIO_BYTES_PER_S,
    AUDIO_CHARACTERS_PER_S,
    TokenLimits,
    audio_characters,
    measure,
    prefix_of,
)
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.limits import NO_CAPS
from tests.router.far_side import Edge, FarSide, Items, fail
from tests.router.listening import listening

PATH = "/v1/audio/transcriptions"


def wav(seconds: float, rate: int = 16_000, channels: int = 1) -> bytes:
    """Silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(channels)
        audio.setsampwidth(2)
        audio.setframerate(rate)
        audio.writeframes(bytes(2 * channels * round(seconds * rate)))
    return file.getvalue()


AUDIO = wav(1.5)
BODY = {"model": "m", "prompt": "hi", "file": AUDIO}


async def hear(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """A replica that hears how long the audio is, once it has come over the wire."""
    sent = msgspec.msgpack.encode(Open.of(1, request))
    body = msgspec.msgpack.decode(sent, type=Open).asked().body
    assert body == request.body
    text = f"{len(body['file'])} bytes"
    if body.get("stream"):
        yield ResponseHead(200, "text/event-stream", replica)
        yield ResponseChunk(
            b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode(), 1
        )
        yield ResponseChunk(b"data: [DONE]\n\n")
    elif body.get("response_format") == "text":
        yield ResponseHead(200, "text/plain", replica)
        yield ResponseChunk(text.encode())
    else:
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(msgspec.json.encode({"text": text}))
    yield ResponseTail(20, 3, (0.1, 0.2, 0.3))


# OpenAI's client deprecates its translations.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_what_openais_client_sends_reaches_a_replica() -> None:
    edge = Edge(FarSide(a=hear))
    asked: Any = {"model": "m", "file": ("a.wav", AUDIO), "language": "en"}
    objective = {"slo": {"ttft_ms": 2_000, "tpot_ms": 0.5, "priority": 3, "class": "batch"}}
    async with (
        listening(edge) as system,
        openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="k", max_retries=0) as client,
    ):
        audio = client.audio
        plain = await audio.transcriptions.create(
            **asked,
            temperature=0.5,
            timestamp_granularities=["word", "segment"],
            extra_body={**objective, "max_completion_tokens": 40.0},
        )
        assert plain.text == f"{len(AUDIO)} bytes"
        text = await audio.transcriptions.create(
            **asked, response_format="text", extra_headers={"x-slo-e2e-ms": "4000"}
        )
        assert text == f"{len(AUDIO)} bytes"
        stream = await audio.transcriptions.create(**asked, stream=True)
        (event,) = [each async for each in stream]
        assert event.choices[0]["delta"]["content"] == f"{len(AUDIO)} bytes"  # type: ignore[union-attr]
        await audio.translations.create(model="m", file=("a.wav", AUDIO))
        with pytest.raises(openai.NotFoundError, match="'x' does not exist"):
            await audio.transcriptions.create(model="x", file=("a.wav", AUDIO))
    first, second, third, fourth = (request for _, request in edge.side.calls)
    assert first.body == {
        "model": "m",
        "file": AUDIO,
        "language": "en",
        "temperature": "0.5",
        "timestamp_granularities[]": ["word", "segment"],
        "max_completion_tokens": 40,
    }
    slo = first.slo
    assert (slo.ttft_s, slo.tpot_s, slo.priority, slo.service_class) == (2.0, 0.0005, 3, "batch")
    assert second.slo.e2e_s == 4.0
    assert third.body["stream"] is True
    assert [each.endpoint for each in (third, fourth)] == ["transcriptions", "translations"]
    # 1.5 s of audio, whatever its bytes.
    assert edge.controller.queries[0].prompt_tokens == round(1.5 * AUDIO_CHARACTERS_PER_S / 4)


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no file": ({"files": {"x": b"1"}}, 400, "must have a file"),
    "empty file": ({"files": {"file": b""}}, 400, "file is empty"),
    "no form": ({"json": {"model": "m"}}, 415, "must be multipart/form-data"),
    "no model": ({"data": {}}, 400, "model must be a string"),
    "unknown model": ({"data": {"model": "x"}}, 404, "'x' does not exist"),
    "too large": ({"files": {"file": wav(3.0)}}, 413, "allowed: 64000 bytes"),
    "flag": ({"data": {"model": "m", "stream": "yes"}}, 400, "stream must be true or false"),
    "count": (
        {"data": {"model": "m", "max_completion_tokens": "0"}},
        400,
        "max_completion_tokens must be an integer from 1",
    ),
    "several": ({"data": {"model": "m", "n": "2"}}, 400, "n must be an integer from 1 to 1"),
    "objective": (
        {"data": {"model": "m", "slo[ttft_ms]": "soon"}},
        400,
        "slo.ttft_ms must be a number of milliseconds",
    ),
    "key": ({"data": {"model": "m", "slo[ttft]": "5"}}, 400, "slo has the unknown key 'ttft'"),
    "whole objective": ({"data": {"model": "m", "slo": "{}"}}, 400, "slo must be an object"),
    "both": ({"data": {"slo": "x", "slo[ttft_ms]": "5"}}, 400, "is no part of an objective"),
    "stages": ({"data": {"slo[stages][][until]": "end"}}, 400, "is no part of an objective"),
    "list": ({"data": {"slo[stages][]": "end"}}, 400, "is no part of an objective"),
    "deep": ({"data": {"slo" + "[a]" * 900: "1"}}, 400, "is no part of an objective"),
    "the server's": ({"data": {"model": "m", "kv_transfer_params": "x"}}, 400, "server's own use"),
    "arguments": ({"data": {"model": "m", "vllm_xargs": "{}"}}, 400, "must be an object"),
    "twice": ({"data": {"model": ["m", "m"]}}, 400, "must be given once"),
    "many": ({"data": {f"f{n}": "" for n in range(MAX_PARTS)}}, 400, f"at most {MAX_PARTS} parts"),
    "long": ({"data": {"model": "m", "prompt": "x" * 5_000}}, 400, "at most 4096 bytes"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.router.request.call.MAX_AUDIO_BYTES", 64_000)
    given, status, told = BAD[name]
    edge = Edge(FarSide(a=hear))
    async with edge.client() as client:
        if "json" not in given:
            given = {"data": {"model": "m"}, "files": {"file": AUDIO}} | given
        refused = await client.post(PATH, **given)
    assert (refused.status_code, edge.side.calls) == (status, [])
    assert told in refused.json()["error"]["message"]
    assert edge.metrics.held_bytes.collect()[0].samples[0].value == 0


async def test_a_sound_is_sent_again_where_nothing_was_answered_and_never_twice() -> None:
    lost = ReplicaFailedError(Reason.REPLICA_FAILED, "It died.", dead=True)
    form: Any = {"data": {"model": "m", "stream": "true"}, "files": {"file": AUDIO}}
    edge = Edge(FarSide(a=fail(lost), b=hear))
    async with edge.client() as client:
        answered = await client.post(PATH, **form)
    assert f"{len(AUDIO)} bytes" in answered.text
    assert [(name, len(request.body["file"])) for name, request in edge.side.calls] == [
        ("a", len(AUDIO)),
        ("b", len(AUDIO)),
    ]
    edge = Edge(FarSide(a=fail(lost, after=1), b=hear))
    async with edge.client() as client:
        broken = await client.post(PATH, **form)
    assert broken.text.rstrip().splitlines()[-1].startswith('data: {"error"')
    assert len(edge.side.calls) == 1


async def test_a_sound_that_ends_two_replicas_is_known_by_its_bytes() -> None:
    lost = ReplicaFailedError(Reason.REPLICA_FAILED, "It died.", dead=True)
    edge = Edge(FarSide(a=fail(lost), b=fail(lost)), config=RouterConfig(max_attempts=5))
    codes = []
    async with edge.client() as client:
        for _ in range(2):
            refused = await client.post(PATH, data={"model": "m"}, files={"file": AUDIO})
            codes.append(refused.json()["error"]["code"])
        edge.side.behaviours = {"a": hear}
        other = AUDIO[:-1] + b"\1"
        answered = await client.post(PATH, data={"model": "m"}, files={"file": other})
    assert codes == [Reason.REQUEST_SUSPECTED.value, Reason.REQUEST_QUARANTINED.value]
    assert len(edge.side.calls) == 3
    assert answered.status_code == 200


def test_how_long_a_sound_counts() -> None:
    seconds = AUDIO_CHARACTERS_PER_S
    for audio in (wav(2.0), wav(2.0, rate=8_000), wav(2.0, channels=2)):
        assert audio_characters(audio) == pytest.approx(2 * seconds, rel=0.01)
    assert audio_characters(bytes(2 * AUDIO_BYTES_PER_S)) == 2 * seconds
    # What says that it is short by a field that no decoder reads; what says that it is endless.
    lying = bytearray(wav(2.0))
    lying[28:32] = b"\xff\xff\xff\x7f"
    assert audio_characters(bytes(lying)) == pytest.approx(2 * seconds, rel=0.01)
    lying[24:28] = b"\1\0\0\0"
    assert audio_characters(bytes(lying)) < 65 * seconds
    assert measure("transcriptions", BODY).characters == audio_characters(AUDIO) + 2
    assert not prefix_of("translations", BODY).hashes


def test_limits_of_a_request_hold() -> None:
    limits = TokenLimits(RouterConfig(max_output_tokens=40, max_prompt_tokens=20))
    body, changed = limits.hold("transcriptions", BODY, NO_CAPS)
    assert (body["max_completion_tokens"], changed) == (40, {"max_completion_tokens": "40"})
    with pytest.raises(ApiError, match=r"about 26 tokens.*allowed are 20") as refused:
        limits.hold("transcriptions", {**BODY, "file": wav(2.0)}, NO_CAPS)
    assert refused.value.param == "file"
