"""Prompts that are longer than any engine of their model takes are refused at the edge."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.router.dispatch.models import TTL_S, Catalog
from sluice.router.request.call import MAX_INLINE_BYTES
from tests.router.far_side import COMPLETION_BODY, Clock, Edge, FarSide, serve

LONGEST = 50_000


def edge(max_model_len: int | None = LONGEST) -> Edge:
    side = FarSide(a=serve)
    side.max_model_len = max_model_len
    return Edge(side)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [7] * (LONGEST + 1)}, "prompt"),
        ("/v1/completions", {"prompt": [[7], [7] * (LONGEST + 1)]}, "prompt"),
        ("/v1/embeddings", {"input": [7] * (LONGEST + 1)}, "input"),
        ("/v1/embeddings", {"input": [[7] * (LONGEST + 1), "text"]}, "input"),
    ],
)
async def test_a_prompt_that_no_engine_takes_reaches_none(
    path: str, body: dict[str, Any], param: str
) -> None:
    router = edge()
    async with router.client() as client:
        answer = await client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"{LONGEST + 1} token ids; this model takes at most {LONGEST} tokens" in error["message"]
    assert router.side.calls == []


@pytest.mark.parametrize(
    ("max_model_len", "body"),
    [
        (LONGEST, {"prompt": [7] * LONGEST}),
        (LONGEST, {"prompt": [[7] * LONGEST, [7] * LONGEST]}),
        (LONGEST, {"prompt": "x" * 10 * LONGEST}),
        (LONGEST, {"prompt": [7] * 2 * LONGEST, "truncate_prompt_tokens": 10}),
        (None, {"prompt": [7] * 2 * LONGEST}),
    ],
    ids=["fits", "each fits", "text", "is shortened", "nobody says"],
)
async def test_any_other_is_left_to_the_engine(
    max_model_len: int | None, body: dict[str, Any]
) -> None:
    router = edge(max_model_len)
    assert 2 * LONGEST > MAX_INLINE_BYTES
    async with router.client() as client:
        answer = await client.post("/v1/completions", json={**COMPLETION_BODY, **body})
    assert answer.status_code == 200
    assert router.side.calls[0][1].body["prompt"] == body["prompt"]


async def test_a_model_that_nobody_serves_is_unknown_whatever_its_prompt() -> None:
    router = edge()
    async with router.client() as client:
        body = {"model": "other", "prompt": [7] * (LONGEST + 1)}
        assert (await client.post("/v1/completions", json=body)).status_code == 404


async def test_engines_that_take_more_are_noticed() -> None:
    side, clock = FarSide(a=serve), Clock()
    catalog = Catalog(side, clock=clock)
    side.max_model_len = 10
    assert await catalog.exceeded(10) is None
    assert await catalog.exceeded(11) == 10
    side.max_model_len = 20
    clock.now_s += TTL_S
    assert await catalog.exceeded(20) is None
    assert await catalog.exceeded(21) == 20
