"""What the controller is asked about a call: its output limit, its session, its prefix."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol.requests import EngineRequest
from sluice.router.request.prompt import MAX_OUTPUT_TOKENS, output_limit
from tests.router.far_side import COMPLETION_BODY
from tests.router.test_admission import edge_of, guaranteed, post


async def test_a_query_carries_what_placing_needs() -> None:
    edge = edge_of(guaranteed())
    long = "word " * 1_000
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 7, "n": 3}
    await post(edge, **body, user="someone")
    query = edge.controller.queries[0]
    request: EngineRequest = edge.side.calls[0][1]
    assert query.output_tokens == 21
    assert query.session > 0
    assert query.prefix
    assert request.prefix.hashes == query.prefix
    await post(edge, **body, user="someone")
    assert edge.controller.queries[1].session == query.session


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("chat", {}, 0),
        ("chat", {"max_tokens": 5}, 5),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 9, "n": 2}, 18),
        ("completions", {}, 16),
        ("completions", {"max_tokens": None, "n": 2}, 32),
        ("completions", {"max_tokens": 3, "prompt": ["a", "b"], "n": 2}, 12),
        ("completions", {"max_tokens": 3, "prompt": [1, 2, 3]}, 3),
        ("completions", {"max_tokens": 2**31 - 1, "n": 16}, MAX_OUTPUT_TOKENS),
    ],
)
def test_the_most_that_a_call_may_generate(
    endpoint: Any, body: dict[str, Any], expected: int
) -> None:
    assert output_limit(endpoint, {**COMPLETION_BODY, **body}) == expected


async def test_an_expected_length_reaches_the_controller_and_the_replica_and_no_engine() -> None:
    edge = edge_of(guaranteed())
    await post(edge, nvext={"agent_hints": {"osl": 300}, "annotations": ["x"]}, max_tokens=9)
    query, request = edge.controller.queries[0], edge.side.calls[0][1]
    assert (query.expected_tokens, query.output_tokens) == (300, 9)
    assert request.turn.expected_tokens == 300
    assert "nvext" not in request.body
    assert [each.expected_tokens for each in edge.controller.endings] == [300]
