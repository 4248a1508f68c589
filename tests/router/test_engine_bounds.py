"""Options of a body that would cost an engine far more than their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError
from sluice.router.request.validation import (
    MAX_ENTRIES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    MAX_STOP_CHARACTERS,
    check_body,
)
from tests.router.far_side import CHAT_BODY, COMPLETION_BODY, Edge, FarSide, serve

PATTERN = "a" * (MAX_PATTERN_CHARACTERS // 2)


def patterns(count: int) -> dict[str, Any]:
    return {"properties": {f"p{n}": {"type": "string", "pattern": PATTERN} for n in range(count)}}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


FITS: list[dict[str, Any]] = [
    {"logit_bias": {str(token): 1 for token in range(MAX_ENTRIES["logit_bias"])}},
    {"allowed_token_ids": list(range(MAX_ENTRIES["allowed_token_ids"]))},
    {"stop": ["x" * (MAX_STOP_CHARACTERS // 4)] * 4},
    {"stop": None, "tools": None, "response_format": None, "structured_outputs": "nonsense"},
    {"structured_outputs": {"regex": "a" * MAX_PATTERN_CHARACTERS}},
    {"structured_outputs": {"grammar": "a" * MAX_GRAMMAR_CHARACTERS}},
    {"structured_outputs": {"choice": ["a" * 1_000] * 60}},
    {"structured_outputs": {"json": json.dumps(patterns(2))}},
    {"structured_outputs": {"json": "{"}},
    {"input": []},
    {"input": [{}, 5, None]},
    {"response_format": schema(patterns(2))},
    {"response_format": schema({"properties": {"pattern": {"type": "string"}}})},
]
TOO_LARGE: list[dict[str, Any]] = [
    *({name: [1] * (most + 1)} for name, most in MAX_ENTRIES.items()),
    {"logit_bias": {str(token): 1 for token in range(MAX_ENTRIES["logit_bias"] + 1)}},
    {"stop": "x" * (MAX_STOP_CHARACTERS + 1)},
    {"stop": ["x" * MAX_STOP_CHARACTERS, "x"]},
    {"structured_outputs": {"regex": "a" * (MAX_PATTERN_CHARACTERS + 1)}},
    {"structured_outputs": {"grammar": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}},
    {"structured_outputs": {"choice": ["a" * 1_000] * 66}},
    {"structured_outputs": {"json": patterns(3)}},
    {"structured_outputs": {"json": json.dumps(patterns(3))}},
    {"response_format": schema(patterns(3))},
    {"response_format": schema({"enum": ["a" * MAX_SCHEMA_CHARACTERS]})},
]


def test_what_fits_is_left_to_the_engine() -> None:
    for change in FITS:
        check_body("chat", {**CHAT_BODY, **change})
        check_body("completions", {**COMPLETION_BODY, **change})
    check_body("responses", {"model": "m", "input": "x", "text": {"format": patterns(2)}})


@pytest.mark.parametrize("change", TOO_LARGE, ids=lambda change: next(iter(change)))
def test_what_is_too_large_is_named(change: dict[str, Any]) -> None:
    for body in (CHAT_BODY, COMPLETION_BODY):
        endpoint: Any = "chat" if body is CHAT_BODY else "completions"
        with pytest.raises(ApiError, match="at most") as caught:
            check_body(endpoint, {**body, **change})
        assert caught.value.param == next(iter(change))
        assert caught.value.rule.status == 400


@pytest.mark.parametrize("name", [*MAX_ENTRIES, "response_format", "structured_outputs", "text"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 10**40, "x", {}, [], [None, 5, [{}]], None])
def test_a_value_of_another_kind_is_left_to_the_engine(name: str, value: Any) -> None:
    check_body("chat", {**CHAT_BODY, name: value})


def test_the_shape_of_a_response_is_bounded_too() -> None:
    with pytest.raises(ApiError, match="regular expressions"):
        check_body("responses", {"model": "m", "input": "x", "text": {"format": patterns(3)}})


INSIDE = "http://169.254.169.254/latest/meta-data/"
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": INSIDE}},
    {"type": "image_url", "image_url": INSIDE},
    {"image_url": INSIDE},
    {"type": "input_image", "image_url": INSIDE},
    {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},
    {"type": "video_url", "video_url": {"url": " data:video/mp4;base64,AAAA"}},
    {"type": "input_file", "file_url": INSIDE},
    {"type": "anything", "within": [{"image_url": {"url": INSIDE}}]},
]


@pytest.mark.parametrize("part", MEDIA, ids=json.dumps)
async def test_engines_fetch_nothing_for_clients(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}]
    bodies = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": messages},
        "/v1/embeddings": {"messages": messages},
        "/tokenize": {"messages": messages},
    }
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        for path, body in bodies.items():
            response = await client.post(path, json={"model": "m", **body})
            assert response.status_code == 400
            assert response.json()["error"]["param"] in ("messages", "input")
            assert "data: URL" in response.json()["error"]["message"]
    assert edge.side.calls == []


async def test_media_may_come_with_the_request_or_be_fetched_where_that_is_allowed() -> None:
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for part, allowed in ((inline, False), (MEDIA[0], True)):
        edge = Edge(FarSide(a=serve), config=RouterConfig(fetch_media=allowed))
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        async with edge.client() as client:
            response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
