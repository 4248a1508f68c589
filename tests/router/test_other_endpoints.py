"""Messages as Anthropic's API has them, and scores: what is refused, how long they count, and which
prefixes they share."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol.requests import Endpoint
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.request.prompt import (
    MEDIA_TOKENS,
    MESSAGE_TOKENS,
    PromptSize,
    TokenLimits,
    measure,
    output_limit,
    prefix_of,
)
from sluice.router.request.validation import MAX_INPUTS, check_body, is_structured
from sluice.router.tenancy.limits import NO_CAPS

SAID: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
}
SCORE: dict[str, Any] = {"model": "m", "queries": "red", "documents": ["a car", "a cat", "tea"]}
RERANK: dict[str, Any] = {"model": "m", "query": "red", "documents": ["a car", "a cat"]}


def image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


def with_parts(*parts: Any, field: str = "messages") -> dict[str, Any]:
    given = [*parts] if field == "system" else [{"role": "user", "content": [*parts]}]
    return {**SAID, field: given}


HELD = image(type="base64", media_type="image/png", data="QUJD" * 1_000)
FETCHED = image(type="url", url="http://10.0.0.1/secret")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("messages", SAID),
        ("messages", with_parts(HELD)),
        ("messages", {**SAID, "tool_choice": {"type": "auto"}, "stop_sequences": ["."] * 16}),
        ("score", SCORE),
        ("score", {"model": "m", "text_1": ["a", "b"], "text_2": ["c", "d"]}),
        ("score", {"model": "m", "data_1": "a", "data_2": {"content": [{"text": "b"}]}}),
        ("rerank", {**RERANK, "top_n": 1}),
    ],
)
def test_what_an_engine_may_see(endpoint: Endpoint, body: dict[str, Any]) -> None:
    check_body(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "body", "told"),
    [
        ("messages", {**SAID, "messages": []}, "messages must be a list of at least one"),
        ("messages", {**SAID, "system": 5}, "system must be a string or a list"),
        ("messages", {**SAID, "max_tokens": 0}, "max_tokens must be an integer from 1"),
        ("messages", {**SAID, "stop_sequences": ["."] * 17}, "stop_sequences must have at most 16"),
        ("messages", {**SAID, "stop_sequences": ["x" * 5_000]}, "stop_sequences must have at most"),
        ("messages", {**SAID, "kv_transfer_params": {}}, "kv_transfer_params is for the server"),
        ("messages", with_parts(FETCHED), "source must contain the medium itself"),
        ("messages", with_parts(FETCHED, field="system"), "source must contain the medium itself"),
        (
            "messages",
            with_parts({"type": "tool_result", "tool_use_id": "t", "content": [FETCHED]}),
            "source must contain the medium itself",
        ),
        ("score", {"model": "m", "queries": "a"}, "documents must be a string"),
        ("score", {**SCORE, "documents": []}, "documents must have 1 to 2048 entries, got 0"),
        ("score", {**SCORE, "documents": ["a"] * (MAX_INPUTS + 1)}, "1 to 2048 entries, got 2049"),
        ("score", {**SCORE, "documents": ["a", 5]}, "queries and documents must be a string"),
        ("rerank", {"model": "m", "documents": ["a"]}, "query must be a string"),
        (
            "rerank",
            {**RERANK, "query": {"content": [{"image_url": {"url": "http://10.0.0.1/"}}]}},
            "image_url must contain the medium itself",
        ),
    ],
)
def test_what_is_refused(endpoint: Endpoint, body: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        check_body(endpoint, body)
    assert refused.value.reason is Reason.INVALID_VALUE


def test_how_long_they_count() -> None:
    assert measure("messages", SAID) == PromptSize(len("Be brief.hello"), 2 * MESSAGE_TOKENS)
    assert measure("messages", with_parts(HELD)).tokens == 2 * MESSAGE_TOKENS + MEDIA_TOKENS
    # The engine reads the query once for each document.
    assert measure("score", SCORE) == PromptSize(3 * len("red") + len("a cara cattea"), 0)
    pairs = {"model": "m", "text_1": ["ab", "c"], "text_2": ["d", "e"]}
    assert measure("score", pairs) == PromptSize(5, 0)
    assert [output_limit("messages", SAID), output_limit("score", SCORE)] == [50, 3]
    assert output_limit("rerank", RERANK) == 2


def test_limits_of_a_request_hold() -> None:
    limits = TokenLimits(RouterConfig(max_output_tokens=40, max_prompt_tokens=600))
    body, changed = limits.hold("messages", SAID, NO_CAPS)
    assert (body["max_tokens"], changed) == (40, {"max_tokens": "40"})
    # An image counts as what it is taken for, not by its bytes.
    limits.hold("messages", with_parts(HELD), NO_CAPS)
    for endpoint, given in (
        ("messages", {**SAID, "system": "x" * 2_500}),
        ("rerank", {**RERANK, "query": "x" * 2_500}),
        ("score", {**SCORE, "documents": ["x" * 2_500]}),
    ):
        with pytest.raises(ApiError, match="allowed are 600"):
            limits.hold(endpoint, given, NO_CAPS)  # type: ignore[arg-type]


def test_a_conversation_shares_its_prefix_with_what_its_system_says() -> None:
    long = {**SAID, "system": "word " * 1_000}
    other = {**long, "messages": [{"role": "user", "content": "bye"}]}
    hashes = prefix_of("messages", long).hashes
    assert hashes
    assert hashes == prefix_of("messages", other).hashes
    assert hashes != prefix_of("messages", {**long, "system": "more " * 1_000}).hashes
    assert not prefix_of("score", SCORE).hashes


@pytest.mark.parametrize(
    ("choice", "structured"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({}, True),
        ("required", True),
        ("auto", False),
    ],
)
def test_a_choice_of_tools_that_demands_a_call_is_structured(choice: Any, structured: bool) -> None:
    assert is_structured({**SAID, "tool_choice": choice}) == structured


def test_a_schema_in_the_output_is_structured() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert is_structured({**SAID, "output_config": {"format": form}})
    assert not is_structured({**SAID, "output_config": {"effort": "low"}})
