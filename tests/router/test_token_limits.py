"""How long a request may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import Endpoint
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError
from sluice.router.request.prompt import TokenLimits, output_limit, output_to_expect
from sluice.router.tenancy.limits import NO_CAPS, TenantLimits
from tests.router.far_side import CHAT_BODY, COMPLETION_BODY

BODIES: dict[Endpoint, dict[str, Any]] = {"chat": CHAT_BODY, "completions": COMPLETION_BODY}


def hold(
    body: dict[str, Any], endpoint: Endpoint = "chat", caps: TenantLimits = NO_CAPS, **router: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    return TokenLimits(RouterConfig(**router)).hold(endpoint, body, caps)


def test_without_limits_nothing_is_touched() -> None:
    for endpoint, body in BODIES.items():
        assert hold({**body, "max_tokens": 10**9, "n": 16}, endpoint) == (
            {**body, "max_tokens": 10**9, "n": 16},
            {},
        )


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
        assert (error.rule.status, error.param) == (400, "n")
        assert (more.get("n") or 1) * (prompts if endpoint == "completions" else 1) > most
        return
    assert 0 < output_limit(endpoint, held) <= most
    assert {field: str(held[field]) for field in said} == said


def test_a_key_that_refuses_says_what_is_allowed() -> None:
    caps = TenantLimits(max_output_tokens=60, beyond="refuse")
    with pytest.raises(ApiError) as caught:
        hold({**CHAT_BODY, "max_tokens": 31, "n": 2}, caps=caps)
    assert (caught.value.rule.status, caught.value.param) == (403, "max_tokens")
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
    assert caught.value.rule.status == 400


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
    ],
)
def test_the_other_endpoints_are_held_to_the_prompt_too(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        hold(
            {"model": "m", **body},
            endpoint,
            TenantLimits(max_prompt_tokens=99, max_output_tokens=5),
        )
    assert caught.value.param == param
    if endpoint == "responses":
        body = {"model": "m", "input": "x", "max_output_tokens": 9}
        assert hold(body, endpoint, TenantLimits(max_output_tokens=5))[0]["max_output_tokens"] == 5


def test_a_short_prompt_is_not() -> None:
    for endpoint, body in BODIES.items():
        assert hold(body, endpoint, TenantLimits(max_prompt_tokens=20)) == (body, {})


def test_schemas_of_tools_may_call_a_property_type() -> None:
    schema = {"type": ["object", "null"], "properties": {"type": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert hold({**CHAT_BODY, "tools": tools}, max_prompt_tokens=1_000)[1] == {}


def test_text_beside_a_medium_counts() -> None:
    part = {"role": "user", "type": "image_url", "image_url": {"url": "x" * 9_000}}
    assert hold({**CHAT_BODY, "messages": [part]}, max_prompt_tokens=1_000)[1] == {}
    with pytest.raises(ApiError, match="about"):
        hold({**CHAT_BODY, "messages": [{**part, "content": "a" * 9_000}]}, max_prompt_tokens=1_000)
