"""Streams that go on on another engine, with simulated ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseItem,
    ResponseTail,
    Resume,
)
from sluice.replica.engine import check_resume
from sluice.scheduling.request.objective import SLO
from tests.replica.test_simulated_engine import collect, running

PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a prompt"}]},
    "completions": {"prompt": "a prompt"},
}


def stream(endpoint: Any, **body: Any) -> EngineRequest:
    body = PROMPTS[endpoint] | {"max_tokens": 10, "stream": True} | body
    return EngineRequest("first", endpoint, body, SLO(), resumable=True)


def after(request: EngineRequest, chunks: tuple[int, ...]) -> EngineRequest:
    resume = Resume(tuple(range(sum(chunks))), chunks, request.request_id)
    return replace(request, request_id="second", resume=resume)


def chunks_of(items: list[ResponseItem]) -> list[ResponseChunk]:
    return [item for item in items if isinstance(item, ResponseChunk)]


def told(chunks: list[ResponseChunk]) -> tuple[str, set[str], list[int]]:
    """Text, ids and token ids."""
    lines = b"".join(chunk.data for chunk in chunks).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )
    ids = [number for chunk in chunks for number in chunk.token_ids]
    return text, {event["id"] for event in events}, ids


def _said(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", ""))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("groups", [(1,), (1, 2), (3, 1, 2, 2), (2, 8), (10,), (9, 1, 0)])
async def test_a_stream_goes_on_after_what_was_sent(endpoint: str, groups: tuple[int, ...]) -> None:
    asked = stream(endpoint, stream_options={"include_usage": True})
    sent = ((0,) if endpoint == "chat" else ()) + groups
    async with running() as engine:
        whole = await collect(engine, asked)
        again = await collect(engine, after(asked, sent))
    assert told(chunks_of(again)) == told(chunks_of(whole))
    assert [chunk.tokens for chunk in chunks_of(again)[: len(sent)]] == list(sent)
    tails = [items[-1] for items in (whole, again)]
    assert all(isinstance(tail, ResponseTail) and tail[:2] == (2, 10) for tail in tails)


async def test_the_rest_is_a_prompt_for_the_scheduler() -> None:
    async with running({"step_s": 3600.0}) as engine:
        items = engine.generate(after(stream("completions"), (1, 2)))
        for _ in range(3):  # the head, and what the client has
            await anext(items)
        (row,) = engine.state().rows
        assert row["prompt_tokens"] == 2 + 3
        await items.aclose()


async def test_a_prompt_with_what_was_sent_is_computed_apart_from_the_rest() -> None:
    asked = after(stream("chat"), (0, 3))
    async with running() as first, running() as second:
        leg = replace(asked, request_id="second.prefill", prefill_only=True)
        *_, tail = await collect(first, leg)
        assert isinstance(tail, ResponseTail) and tail.kv_handle is not None
        assert tail.kv_handle.prompt_tokens == 2 + 3
        whole = await collect(first, stream("chat"))
        rest = await collect(second, replace(asked, kv_handle=tail.kv_handle))
    assert told(chunks_of(rest)) == told(chunks_of(whole))


@pytest.mark.parametrize(
    ("body", "resume", "message"),
    [
        ({"stream": False}, Resume((1,), (1,), "r"), "Only a stream can"),
        ({"n": 2}, Resume((1,), (1,), "r"), "one prompt and one choice"),
        ({"prompt": ["a", "b"]}, Resume((1,), (1,), "r"), "one prompt and one choice"),
        ({}, Resume((1, 2), (1,), "r"), "carry 1 tokens, but 2"),
        ({}, Resume((1,), (2, -1), "r"), "carry 1 tokens, but 1"),
    ],
)
def test_what_does_not_add_up_is_refused(
    body: dict[str, Any], resume: Resume, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_resume(replace(stream("completions", **body), resume=resume))
