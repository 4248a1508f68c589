"""What the simulated engine takes, and what it writes."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import Endpoint, EngineRequest, ResponseChunk
from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.openai_format import output_text, parse_call
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.request.objective import SLO

Chunk = TypeVar("Chunk", bound=BaseModel)


async def answer(endpoint: Endpoint, **body: Any) -> bytes:
    """What a simulated engine answers, in bytes."""
    truth = SimulatedEngineConfig(step_s=0, token_s=0, context_token_s=0)
    config = EngineConfig(kind="simulated", model="model", simulated=truth)
    engine = SimulatedEngine(config, "r", 16)
    await engine.start()
    try:
        request = EngineRequest("r", endpoint, {"model": "model", **body}, SLO())
        items = [item async for item in engine.generate(request)]
    finally:
        await engine.stop()
    return b"".join(item.data for item in items if isinstance(item, ResponseChunk))


def chunks(kind: type[Chunk], data: bytes) -> list[Chunk]:
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [kind.model_validate_json(each.removeprefix("data: ")) for each in lines[:-2]]


async def test_chats_are_as_openais_client_reads_them() -> None:
    body = {"messages": [{"role": "user", "content": "how many?"}], "n": 2}
    plain = ChatCompletion.model_validate_json(
        await answer("chat", max_completion_tokens=7, **body)
    )
    assert plain.id.startswith("chatcmpl-")
    assert [choice.finish_reason for choice in plain.choices] == ["length", "length"]
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (3, 14)
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    data = await answer("chat", max_tokens=7, **body, **streaming)
    texts, reasons = ["", ""], []
    for chunk in (found := chunks(ChatCompletionChunk, data)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in plain.choices]
    assert reasons == ["length", "length"]
    assert found[-1].usage == plain.usage


async def test_completions_are_as_openais_client_reads_them() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 9}
    plain = Completion.model_validate_json(await answer("completions", **body))
    assert plain.id.startswith("cmpl-")
    assert plain.usage is not None and plain.usage.prompt_tokens == 3
    found = chunks(CompletionPart, await answer("completions", stream=True, **body))
    assert "".join(chunk.choices[0].text for chunk in found) == plain.choices[0].text
    assert found[-1].choices[0].finish_reason == "length"


class CompletionPart(BaseModel):
    """OpenAI's client has no type for the chunks of completions, which end with a reason."""

    class Choice(BaseModel):
        text: str
        finish_reason: str | None

    choices: list[Choice]


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


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "message"),
    [
        *((each, {}, 404, f"does not offer {each}") for each in ("responses", "embeddings")),
        ("completions", {"model": "other"}, 404, "does not exist"),
        ("completions", {"max_tokens": 9000}, 400, "maximum context length is 8192"),
    ],
)
def test_what_no_answer_can_be_to_is_refused(
    endpoint: Endpoint, body: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        parse_call(endpoint, {"model": "m", "prompt": "x", **body}, "m", 8192)
    assert refused.value.status == status


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
