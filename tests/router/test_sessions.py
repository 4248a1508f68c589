"""What the edge knows of a request as a turn of an agent's session."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol.requests import EngineRequest, Turn, tool_key
from sluice.router.request.session import tool_of
from tests.router.test_admission import edge_of, guaranteed, post

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
ASK = {"role": "user", "content": "Which files?"}


def called(*names: str) -> dict[str, Any]:
    """A message of the chat API that calls tools."""
    calls = [{"id": n, "type": "function", "function": {"name": n}} for n in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "done"}


def used(*names: str) -> dict[str, Any]:
    """A message of Anthropic's API that calls tools."""
    text = {"type": "text", "text": "I look."}
    calls = [{"type": "tool_use", "id": n, "name": n, "input": {}} for n in names]
    return {"role": "assistant", "content": [text, *calls]}


def brought(*names: str) -> dict[str, Any]:
    text = {"type": "text", "text": "By the way"}
    results = [{"type": "tool_result", "tool_use_id": n, "content": "done"} for n in names]
    return {"role": "user", "content": [*results, text]}


def call(name: str) -> dict[str, Any]:
    """An item of the responses API."""
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "done"}


SHELL = {"type": "local_shell_call", "call_id": "s", "action": {}}
SHELL_OUTPUT = {"type": "local_shell_call_output", "call_id": "s", "output": ""}


@pytest.mark.parametrize(
    ("endpoint", "conversation", "names"),
    [
        ("chat", [ASK, called("read"), result("read")], ["read"]),
        ("chat", [ASK, called("a"), result("a"), called("b", "c"), *map(result, "bc")], ["b", "c"]),
        ("chat", [ASK, called("read"), result("read"), called(), ASK], None),
        ("chat", [result("read")], []),
        ("messages", [ASK, used("read"), brought("read")], ["read"]),
        ("messages", [ASK, used("a"), brought("a"), used("b", "c"), brought("b", "c")], ["c", "b"]),
        ("messages", [ASK, used("read"), ASK], None),
        ("responses", [ASK, call("read"), output("read")], ["read"]),
        ("responses", [ASK, call("a"), output("a"), call("b"), output("b")], ["b"]),
        ("responses", [ASK, call("b"), call("a"), *map(output, "ab")], ["a", "b"]),
        ("responses", [ASK, SHELL, SHELL_OUTPUT], ["local_shell_call"]),
        ("responses", [ASK, call("read"), output("read"), ASK], None),
        ("responses", "Which files?", None),
    ],
)
def test_the_tools_whose_results_a_turn_brings(
    endpoint: Any, conversation: Any, names: list[str] | None
) -> None:
    body = {"input" if endpoint == "responses" else "messages": conversation}
    assert tool_of(endpoint, body) == (0 if names is None else tool_key(names))


def test_a_tools_key_is_of_the_set_of_names() -> None:
    assert tool_key(["a", "b"]) == tool_key(["b", "a", "b"]) != tool_key(["a"])
    assert 0 < tool_key([]) < 2**63


async def test_a_replica_gets_the_turn_and_nothing_for_a_plain_request() -> None:
    edge = edge_of(guaranteed())
    turn = [ASK, called("read"), result("read")]
    await post(edge, messages=[ASK])
    await post(edge, messages=[ASK], tools=TOOLS)
    await post(edge, messages=turn, tools=TOOLS)
    await post(edge, messages=turn, tools=TOOLS, user="someone")
    requests: list[EngineRequest] = [call[1] for call in edge.side.calls]
    session = edge.controller.queries[3].session
    key = tool_key(["read"])
    assert [each.turn for each in requests] == [
        *(None, None, Turn(tool=key), Turn(session, session, key))
    ]
    assert session > 0
