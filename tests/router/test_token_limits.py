"""How long a request may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import Endpoint
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError
from sluice.router.request.prompt import TokenLimits, output_limit, output_to_expect
from sluice.router.request.validation import (
    MAX_ENTRIES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    MAX_STOP_CHARACTERS,
    check_body,
)
from sluice.router.tenancy.limits import NO_CAPS, TenantLimits
from tests.router.far_side import CHAT_BODY, COMPLETION_BODY, Edge, FarSide, serve

BODIES: dict[Endpoint, dict[str, Any]] = {"chat": CHAT_BODY, "completions": COMPLETION_BODY}

# Options of a body that would cost an engine far more than their bytes.

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
    for endpoint, body in BODIES.items():
        with pytest.raises(ApiError, match="at most") as caught:
            check_body(endpoint, {**body, **change})
        assert caught.value.param == next(iter(change))
        assert caught.value.reason.status == 400
    with pytest.raises(ApiError, match="regular expressions"):
        check_body("responses", {"model": "m", "input": "x", "text": {"format": patterns(3)}})


@pytest.mark.parametrize("name", [*MAX_ENTRIES, "response_format", "structured_outputs", "text"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 10**40, "x", {}, [], [None, 5, [{}]], None])
def test_a_value_of_another_kind_is_left_to_the_engine(name: str, value: Any) -> None:
    check_body("chat", {**CHAT_BODY, name: value})


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


def hold(
    body: dict[str, Any], endpoint: Endpoint = "chat", caps: TenantLimits = NO_CAPS, **router: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    return TokenLimits(RouterConfig(**router)).hold(endpoint, body, caps)


def test_what_is_within_the_limits_is_not_touched() -> None:
    schema = {"type": ["object", "null"], "properties": {"type": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert hold({**CHAT_BODY, "tools": tools}, max_prompt_tokens=1_000)[1] == {}
    for endpoint, body in BODIES.items():
        large = {**body, "max_tokens": 10**9, "n": 16}
        assert hold(large, endpoint) == (large, {})
        assert hold(body, endpoint, TenantLimits(max_prompt_tokens=20)) == (body, {})


@pytest.mark.parametrize(
    ("endpoint", "more", "held"),
    [
        ("chat", {}, {"max_completion_tokens": 100}),
        ("chat", {"max_tokens": 100}, {}),
        ("chat", {"max_tokens": 101}, {"max_tokens": 100}),
        ("chat", {"max_tokens": 40, "n": 4}, {"max_tokens": 25}),
        (
            "chat",
            {"max_completion_tokens": 500, "max_tokens": 30},
            {"max_completion_tokens": 100, "max_tokens": 30},
        ),
        ("completions", {}, {}),
        ("completions", {"n": 10}, {"max_tokens": 10}),
        ("completions", {"prompt": ["a"] * 5, "max_tokens": 30, "n": 2}, {"max_tokens": 10}),
    ],
)
def test_the_output_is_cut_to_what_is_allowed(
    endpoint: Endpoint, more: dict[str, Any], held: dict[str, int]
) -> None:
    body = {**BODIES[endpoint], **more}
    expected = {**body, **held}, {field: str(value) for field, value in held.items()}
    assert hold(body, endpoint, max_output_tokens=100) == expected
    assert (
        hold(body, endpoint, TenantLimits(max_output_tokens=100), max_output_tokens=200) == expected
    )


@given(
    endpoint=st.sampled_from(["chat", "completions"]),
    most=st.integers(1, 300),
    more=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.none() | st.integers(1, 400),
            "max_completion_tokens": st.none() | st.integers(1, 400),
            "n": st.none() | st.integers(1, 16),
        },
    ),
    prompts=st.integers(1, 20),
)
def test_no_body_asks_for_more_than_is_allowed(
    endpoint: Endpoint, most: int, more: dict[str, Any], prompts: int
) -> None:
    body = {**BODIES[endpoint], **more}
    if endpoint == "completions":
        body["prompt"] = ["p"] * prompts
    try:
        held, said = hold(body, endpoint, TenantLimits(max_output_tokens=most))
    except ApiError as error:
        assert (error.reason.status, error.param) == (400, "n")
        assert (more.get("n") or 1) * (prompts if endpoint == "completions" else 1) > most
        return
    assert 0 < output_limit(endpoint, held) <= most
    assert {field: str(held[field]) for field in said} == said


def test_a_key_that_refuses_says_what_is_allowed() -> None:
    caps = TenantLimits(max_output_tokens=60, beyond="refuse")
    with pytest.raises(ApiError) as caught:
        hold({**CHAT_BODY, "max_tokens": 31, "n": 2}, caps=caps)
    assert (caught.value.reason.status, caught.value.param) == (403, "max_tokens")
    assert "at most 30" in caught.value.message
    # It has not asked for any: it gets what there is.
    assert hold(CHAT_BODY, caps=caps)[1] == {"max_completion_tokens": "60"}


LONG = "x" * 400
MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": ["x" * 200] * 2}),
        ("completions", {"prompt": list(range(101))}),
        ("completions", {"prompt": [[1] * 51, [2] * 50]}),
        ("completions", {"prompt": "x", "suffix": LONG}),
        ("chat", {"messages": [{"role": "user", "content": LONG}]}),
        ("chat", {"messages": [{"role": LONG, "content": "x"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("chat", {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [{"a": LONG}]}]}),
        ("chat", {"messages": [MESSAGE], "tools": [{"function": {"description": LONG}}]}),
        ("chat", {"messages": [MESSAGE], "documents": [{"text": LONG}]}),
        ("chat", {"messages": [MESSAGE], "chat_template_kwargs": {"system": LONG}}),
    ],
)
def test_a_long_prompt_is_refused_wherever_it_stands(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    with pytest.raises(ApiError, match="allowed are 99") as caught:
        hold({"model": "m", **body}, endpoint, TenantLimits(max_prompt_tokens=99))
    assert caught.value.reason.status == 400


def test_what_to_expect_of_an_output() -> None:
    assert output_to_expect("chat", 7) == 7
    assert output_to_expect("chat", 0) == output_to_expect("responses", 0) > 0
    assert output_to_expect("embeddings", 1) == 1
    assert output_to_expect("tokenize", 0) == 0


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("responses", {"input": LONG}, "input"),
        ("responses", {"input": "x", "instructions": LONG}, "input"),
        ("embeddings", {"input": [LONG]}, "input"),
        ("tokenize", {"prompt": LONG}, "prompt"),
        ("detokenize", {"tokens": [7] * 100}, "tokens"),
    ],
)
def test_the_other_endpoints_are_held_to_the_prompt_too(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    caps = TenantLimits(max_prompt_tokens=99, max_output_tokens=5)
    with pytest.raises(ApiError) as caught:
        hold({"model": "m", **body}, endpoint, caps)
    assert caught.value.param == param
    if endpoint == "responses":
        body = {"model": "m", "input": "x", "max_output_tokens": 9}
        assert hold(body, endpoint, TenantLimits(max_output_tokens=5))[0]["max_output_tokens"] == 5


def test_text_beside_a_medium_counts() -> None:
    part = {"role": "user", "type": "image_url", "image_url": {"url": "x" * 9_000}}
    assert hold({**CHAT_BODY, "messages": [part]}, max_prompt_tokens=1_000)[1] == {}
    with pytest.raises(ApiError, match="about"):
        hold({**CHAT_BODY, "messages": [{**part, "content": "a" * 9_000}]}, max_prompt_tokens=1_000)
