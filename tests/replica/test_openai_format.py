"""What the simulated engine writes, read by the official client over HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import Endpoint, EngineRequest, ResponseChunk, ResponseHead
from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.openai_format import output_text, parse_call
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.request.objective import SLO
from tests.replica.waiting import until


def app_of(engine: SimulatedEngine) -> FastAPI:
    """The thinnest HTTP app around an engine."""
    api = FastAPI()
    ids = itertools.count()

    async def serve(endpoint: Endpoint, request: Request) -> Response:
        items = engine.generate(
            EngineRequest(str(next(ids)), endpoint, await request.json(), SLO())
        )
        head = await anext(items)
        assert isinstance(head, ResponseHead)

        async def chunks() -> AsyncIterator[bytes]:
            async for item in items:
                if isinstance(item, ResponseChunk):
                    yield item.data

        return StreamingResponse(chunks(), head.status, media_type=head.media_type)

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await serve("chat", request)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await serve("completions", request)

    @api.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(await engine.models())

    return api


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    engine = SimulatedEngine(
        EngineConfig(
            kind="simulated",
            model="model",
            simulated=SimulatedEngineConfig(step_s=0, token_s=0, context_token_s=0),
        ),
        "r",
        16,
    )
    await engine.start()
    server = uvicorn.Server(uvicorn.Config(app_of(engine), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made
    server.should_exit = True
    await serving
    await engine.stop()


async def test_chat(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "how many?"}]
    plain = await client.chat.completions.create(
        model="model", messages=messages, max_completion_tokens=7, n=2
    )
    assert plain.id.startswith("chatcmpl-")
    assert [choice.finish_reason for choice in plain.choices] == ["length", "length"]
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (3, 14)
    stream = await client.chat.completions.create(
        model="model",
        messages=messages,
        max_tokens=7,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    reasons = []
    usage = None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in plain.choices]
    assert reasons == ["length", "length"]
    assert usage == plain.usage


async def test_completions(client: openai.AsyncOpenAI) -> None:
    plain = await client.completions.create(model="model", prompt=[1, 2, 3], max_tokens=9)
    assert plain.id.startswith("cmpl-")
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == 3
    stream = await client.completions.create(
        model="model", prompt=[1, 2, 3], max_tokens=9, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_models_and_errors(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["model"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as raised:
        await client.completions.create(model="model", prompt="x", max_tokens=9000)
    assert raised.value.param == "max_tokens"


def test_a_prompt_is_measured_by_its_text_or_its_ids() -> None:
    def tokens(**body: object) -> int:
        endpoint: Endpoint = "chat" if "messages" in body else "completions"
        return parse_call(endpoint, body, "m", 10_000).prompts[0].tokens

    assert tokens(prompt="") == 1
    assert tokens(prompt="abcd") == 1
    assert tokens(prompt="abcde") == 2
    assert tokens(prompt=[5] * 77) == 77
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert tokens(messages=[{"role": "user", "content": parts}]) == 1
    assert tokens(messages=[{"role": "assistant", "content": None}]) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
fields = ("prompt", "messages", "model", "n", "max_tokens", "min_tokens", "stream")


# Slow to draw on a busy machine, which says nothing about the code.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["chat", "completions"]), st.dictionaries(st.sampled_from(fields), json_values)
)
def test_any_body_is_read_or_refused(endpoint: Endpoint, body: dict[str, object]) -> None:
    try:
        call = parse_call(endpoint, body, "m", 100)
    except RequestError as error:
        assert error.status in (400, 404)
        error.body(endpoint)
    else:
        assert all(0 < p.tokens + call.max_tokens <= 100 for p in call.prompts)


@given(st.integers(0, 2**32 - 1), st.integers(0, 15), st.lists(st.integers(1, 9), min_size=1))
def test_a_text_in_pieces_is_the_text(seed: int, choice: int, lengths: list[int]) -> None:
    ends = list(itertools.accumulate(lengths, initial=0))
    pieces = [output_text(seed, choice, *span) for span in itertools.pairwise(ends)]
    assert "".join(pieces) == output_text(seed, choice, 0, ends[-1])
    assert len("".join(pieces).split(" ")) == ends[-1]


@pytest.mark.parametrize("endpoint", ["responses", "embeddings", "tokenize", "detokenize"])
def test_what_needs_a_model_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(RequestError, match=f"does not offer {endpoint}") as refused:
        parse_call(endpoint, {"model": "m", "input": "x", "prompt": "x", "tokens": []}, "m", 100)
    assert refused.value.status == 404


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"prompt": "Hello"}
BODIES: dict[Endpoint, dict[str, object]] = {"chat": CHAT, "completions": COMPLETION}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", float("inf")),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", {}),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", "x"),
        ("repetition_penalty", 0),
        ("seed", "x"),
        ("ignore_eos", "perhaps"),
        ("stop", ["a"]),
        ("stop", "a"),
        ("stop_token_ids", [1]),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("logit_bias", {"1": 2}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("prompt_logprobs", 0),
        ("echo", True),
        ("suffix", "x"),
        ("structured_outputs", {"choice": ["a"]}),
        ("response_format", {"type": "json_object"}),
        ("response_format", "json"),
        ("tools", []),
        ("tools", "x"),
        ("tool_choice", "required"),
        ("tool_choice", TOOL),
        ("tool_choice", 3),
    ],
)
def test_what_the_text_could_not_obey_is_refused(
    endpoint: Endpoint, field: str, value: object
) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        parse_call(endpoint, {**BODIES[endpoint], "tools": [TOOL], field: value}, "m", 100)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(field)


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_has_no_effect_on_the_text_is_accepted(endpoint: Endpoint) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": "0.5",
        "repetition_penalty": 1,
        "seed": 7,
        "ignore_eos": True,
        "stop": None,
        "logprobs": None,
        "echo": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [TOOL],
        "tool_choice": "auto",
    }
    assert parse_call(endpoint, {**BODIES[endpoint], **fields}, "m", 100).n == 1
