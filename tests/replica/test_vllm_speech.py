"""Speech: a real Whisper in one vLLM engine process, asked by OpenAI's client through a router."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections.abc import AsyncIterator
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import pytest_asyncio

from sluice.protocol.requests import (
    EngineRequest,
    ResponseItem,
)
from sluice.replica.scheduler.xargs import ID, from_xargs
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.serving import AUDIO_PACKAGES
from sluice.replica.vllm.warm_up import silence
from sluice.scheduling.request.objective import SLO
from tests.documents import ROOT, marked
from tests.lacking import lacking
from tests.replica.small_engine import items_of, small_config, split
from tests.router.far_side import Edge, FarSide
from tests.router.listening import listening
from tests.speech_model import CLIP_S, heard, speech_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.asyncio(loop_scope="module"),
]

if not all(map(find_spec, AUDIO_PACKAGES)):
    lacking(f"not installed: {' or '.join(AUDIO_PACKAGES)}")

TOKENS = 12
AUDIO = silence(1.0)
LONG = silence(2.5 * CLIP_S)


def noise(seed: int) -> bytes:
    """A second that sounds like no other."""
    return AUDIO[:44] + random.Random(seed).randbytes(len(AUDIO) - 44)


class Served(NamedTuple):
    engine: VllmEngine
    client: openai.AsyncOpenAI
    url: str
    side: FarSide
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("speech")
    model = speech_model(directory / "model")
    args = {
        "kv_cache_memory_bytes": 3 << 20,  # seven requests at their longest
        # Two audio files, or one longest prompt: prompts are cut into chunks.
        "max_num_batched_tokens": 256,
        "max_model_len": None,
    }
    config = small_config(model, directory, {"served_model_name": "m"}, **args)
    engine = VllmEngine(config, "replica-1", 32)
    await engine.start()

    async def answer(
        side: FarSide, replica: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        async for item in engine.generate(request):
            yield item

    try:
        side = FarSide(a=answer)
        async with (
            listening(Edge(side)) as system,
            openai.AsyncOpenAI(
                base_url=f"{system.url}/v1", api_key="k", max_retries=0, timeout=120
            ) as client,
        ):
            yield Served(engine, client, system.url, side, model)
    finally:
        await engine.stop()


async def asked(served: Served, **given: Any) -> Any:
    extra = {"max_completion_tokens": TOKENS, **given.pop("extra_body", {})}
    given = {"model": "m", "file": ("a.wav", AUDIO), "language": "en", **given}
    return await served.client.audio.transcriptions.create(**given, extra_body=extra)


# OpenAI's client deprecates its translations.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_what_is_heard_in_each_form(served: Served) -> None:
    audio: Any = {"file": ("a.wav", noise(1))}
    plain = await asked(served, **audio)
    assert plain.text == heard(served.model, noise(1), TOKENS)
    assert plain.usage.seconds == 1
    assert await asked(served, **audio, response_format="text") == plain.text
    stream = await asked(served, **audio, stream=True)
    words = [event.choices[0]["delta"]["content"] async for event in stream]
    assert "".join(words) == plain.text and len(words) > 1
    verbose = await asked(served, **audio, response_format="verbose_json")
    assert verbose.duration == 1.0
    english = await served.client.audio.translations.create(
        model="m", file=("a.wav", AUDIO), extra_body={"language": "en"}
    )
    assert english.text


async def test_a_long_sound_is_heard_in_clips(served: Served) -> None:
    whole = await asked(served, file=("a.wav", LONG))
    events = [each async for each in await asked(served, file=("a.wav", LONG), stream=True)]
    assert "".join(each.choices[0]["delta"]["content"] for each in events) == whole.text
    assert whole.usage.seconds == 5 and len(whole.text.split(" ")) >= 3


async def test_a_stream_of_clips_is_planned_and_counted_as_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[dict[str, Any]] = []
    core = served.engine._llm.engine_core
    send = core.add_request_async

    async def note(request: Any) -> None:
        planned.append(request.sampling_params.extra_args)
        await send(request)

    monkeypatch.setattr(core, "add_request_async", note)
    slo = SLO(ttft_s=5.0, tpot_s=1.0, e2e_s=60.0)
    body = {"model": "m", "file": LONG, "max_completion_tokens": TOKENS, "stream": True}
    request = EngineRequest("each", "transcriptions", body, slo)
    head, chunks, tail = split(await items_of(served.engine, request))
    assert head.media_type == "text/event-stream"
    tokens = sum(chunk.tokens for chunk in chunks)
    assert tokens == tail.output_tokens >= 3 * TOKENS
    # Without a language vLLM asks for it first. A later clip is due after the one before it, and
    # the end of all is due when it was.
    language, *clips = planned
    assert {each[ID] for each in planned} == {"each"}
    assert len(clips) * TOKENS == tokens
    assert language == clips[0]
    asked = [from_xargs(each, "", inf) for each in clips]
    begun = [each.arrival_s for each in asked]
    assert begun == sorted(set(begun))
    ends = [each.arrival_s + each.slo.e2e_s for each in asked]
    assert ends == pytest.approx([ends[0]] * len(ends))
    assert {each.slo.ttft_s for each in asked} == {5.0}


async def test_the_sounds_of_a_key_share_no_kv_with_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's serving layer for speech has no salt; its prompts have one."""
    from vllm.v1.engine.async_llm import AsyncLLM

    salts = []
    generate = AsyncLLM.generate

    def note(llm: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        salts.append(prompt.get("cache_salt"))
        return generate(llm, prompt, *args, **kwargs)

    monkeypatch.setattr(AsyncLLM, "generate", note)
    for salt in ({}, {"cache_salt": "x"}):
        assert (await asked(served, extra_body=salt)).text
    assert salts == [None, "x"]


async def test_many_at_once_hear_what_each_hears_alone(served: Served) -> None:
    """Also where the plan cuts a prompt in two: its audio is encoded with the first part. And where
    the KV of all does not fit: none is preempted, as vLLM would continue it wrongly."""

    async def text(number: int, name: str) -> str:
        fixed = {"model": "m", "language": "en", "max_completion_tokens": 150}
        body = {**fixed, "file": noise(number), "prompt": "word " * (number % 2 * 7)}
        slo = SLO(ttft_s=1.0, tpot_s=0.05)
        request = EngineRequest(f"{name}-{number}", "transcriptions", body, slo)
        _, (chunk,), _ = split(await items_of(served.engine, request))
        return str(json.loads(chunk.data)["text"])

    alone = [await text(number, "alone") for number in range(24)]
    together = await asyncio.gather(*(text(number, "together") for number in range(24)))
    assert alone == together and len(set(alone)) == 24


async def test_what_is_no_sound_or_no_speech_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="Invalid or corrupted audio data"):
        await asked(served, file=("a.wav", b"RIFF" + bytes(100)))
    with pytest.raises(openai.BadRequestError, match="Unsupported language"):
        await asked(served, language="xx")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        await asked(served, response_format="srt")
    with pytest.raises(openai.BadRequestError, match="Beam search is not supported"):
        await asked(served, extra_body={"use_beam_search": True})
    with pytest.raises(openai.NotFoundError, match="transcriptions, translations"):
        await served.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    assert (await asked(served)).text


async def test_the_documents_example_runs(served: Served, tmp_path: Path) -> None:
    (block,) = marked(ROOT / "docs" / "clients.md", "run: speech")
    code = block.replace("http://127.0.0.1:8000", served.url).replace('"whisper"', '"m"')
    output = io.StringIO()

    def run() -> None:
        with contextlib.chdir(tmp_path), contextlib.redirect_stdout(output):
            Path("speech.wav").write_bytes(AUDIO)
            exec(code, {})

    await asyncio.to_thread(run)
    plain, streamed = output.getvalue().splitlines()
    assert plain == streamed
    _, request = served.side.calls[-1]
    assert request.slo.e2e_s is not None
