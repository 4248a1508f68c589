"""The official client against the API on a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr

from sluice.router.config import RouterConfig
from sluice.router.dispatch.response import with_tier
from tests.router.far_side import DIED, Edge, FarSide, answer, fail, serve
from tests.router.listening import listening

MESSAGES = [{"role": "user", "content": "hello there"}]
KEY = "test-key"


@asynccontextmanager
async def served(edge: Edge, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of ``edge`` behind uvicorn on a free port."""
    async with listening(edge) as system:
        url = f"{system.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client


def router(**behaviours: object) -> Edge:
    return Edge(FarSide(**behaviours), config=RouterConfig(api_keys=(SecretStr(KEY),)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "headers", "told"),
    [
        (None, {}, None),
        (None, {"x-slo-class": "batch"}, None),
        ("priority", {}, "priority"),
        ("auto", {}, "default"),
        ("flex", {"x-slo-class": "interactive"}, "priority"),
    ],
)
async def test_the_tier_that_served_comes_back_where_one_was_asked_for(
    asked: str | None, headers: dict[str, str], told: str | None
) -> None:
    question = {"model": "m", "messages": MESSAGES, "extra_headers": headers}
    if asked is not None:
        question["service_tier"] = asked
    async with served(router(a=serve)) as client:
        plain = await client.chat.completions.create(**question)
        assert plain.service_tier == told and plain.choices[0].message.content == "one two three"
        stream = await client.chat.completions.create(**question, stream=True)
        chunks = [chunk async for chunk in stream]
        assert {chunk.service_tier for chunk in chunks} == {told}
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == "one two three"


@given(content=st.text(), tier=st.text(min_size=1), streams=st.booleans(), empty=st.booleans())
@example(content='data: {"id"', tier="flex", streams=True, empty=False)
@example(content='"service_tier":null', tier='a"b', streams=False, empty=True)
def test_a_tier_in_the_bytes_changes_nothing_else(
    content: str, tier: str, streams: bool, empty: bool
) -> None:
    body: dict[str, Any] = {"id": "x", "text": content}
    if empty and not streams:
        body["service_tier"] = None
    raw = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    expected = {**json.loads(raw), "service_tier": tier}
    if not streams:
        assert json.loads(with_tier(raw, "chat", tier, streams=False)) == expected
        return
    sent = (b"data: %s\n\n" % raw) * 2 + b"data: [DONE]\n\n"
    first, second, done = with_tier(sent, "chat", tier, streams=True).split(b"\n\n")[:3]
    assert json.loads(first[6:]) == json.loads(second[6:]) == expected
    assert done == b"data: [DONE]"


async def test_errors_are_the_clients_own_exceptions() -> None:
    edge = router(a=serve)
    async with served(edge) as client:
        with pytest.raises(openai.BadRequestError, match=r"slo\.ttft_ms must be a number") as bad:
            await client.chat.completions.create(
                model="m", messages=MESSAGES, extra_body={"slo": {"ttft_ms": 0}}
            )
        assert (bad.value.param, bad.value.code) == ("slo.ttft_ms", "invalid_value")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError, match="'x' does not exist") as unknown:
            await client.chat.completions.create(model="x", messages=MESSAGES)
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        edge.side.behaviours["a"] = answer(404, b'{"error": {"message": "not offered"}}')
        with pytest.raises(openai.NotFoundError, match="not offered"):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        edge.side.behaviours["a"] = fail(DIED)
        with pytest.raises(openai.InternalServerError, match="The replica died") as lost:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert lost.value.status_code == 503


async def test_a_broken_stream_raises_after_what_was_good() -> None:
    got = []
    async with served(router(a=fail(DIED, after=2))) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            async for chunk in stream:
                got.append(chunk.choices[0].delta.content)  # noqa: PERF401  it ends by an error
    assert got == ["one", " two"]
