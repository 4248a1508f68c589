"""What the edge knows of a request as a turn of an agent's session."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice.protocol.requests import EngineRequest, Turn, tool_key
from sluice.router.errors import ApiError
from sluice.router.request.session import (
    MAX_SESSION_CHARACTERS,
    SESSION_FIELDS,
    SESSION_HEADERS,
    Recognised,
    SessionReader,
    short,
    tool_of,
)
from tests.documents import ROOT, section
from tests.router.test_admission import CONFIG, edge_of, guaranteed, post

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


REMINDER = {"role": "system", "content": "The file has changed since."}
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
        ("messages", [ASK, used("read"), brought("read"), REMINDER], ["read"]),
        ("responses", [ASK, call("read"), output("read")], ["read"]),
        ("responses", [ASK, call("a"), output("a"), call("b"), output("b")], ["b"]),
        ("responses", [ASK, call("b"), call("a"), *map(output, "ab")], ["a", "b"]),
        ("responses", [ASK, SHELL, SHELL_OUTPUT], ["local_shell_call"]),
        ("responses", [ASK, call("read"), output("read"), ASK], None),
        ("responses", [ASK, call("a"), output("a"), {**REMINDER, "role": "developer"}], ["a"]),
        ("responses", "Which files?", None),
    ],
)
def test_the_tools_whose_results_a_turn_brings(
    endpoint: Any, conversation: Any, names: list[str] | None
) -> None:
    body = {"input" if endpoint == "responses" else "messages": conversation}
    assert tool_of(endpoint, body) == (0 if names is None else tool_key(names))


class Id(str):
    """An id that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_time_to_find_the_tools_is_linear_in_the_results() -> None:
    ids = [str(number) for number in range(1_000)]
    calls = [{"type": "function_call", "call_id": Id(each), "name": "read"} for each in ids]
    results = [{"type": "function_call_output", "call_id": Id(each)} for each in ids]
    odd = {"type": "function_call_output", "call_id": ["no text"]}
    assert tool_of("responses", {"input": [*calls, *results, odd]}) == tool_key(["read"])
    assert Id.compared <= 4_000


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
        *(None, None, Turn(tool=key), Turn(0, session, key))
    ]
    assert session > 0


# Names of sessions.

UUID = "2c4e1cf0-7a67-4d2e-9a4b-1d16d3f44752"


def recognised(
    body: dict[str, Any], *headers: tuple[str, str], owner: str = "o", endpoint: Any = "chat"
) -> Recognised:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return SessionReader().read(endpoint, {"messages": [ASK], **body}, raw, owner)


def turn_of(body: dict[str, Any], *headers: tuple[str, str], **more: Any) -> Turn:
    turn = recognised(body, *headers, **more).turn
    assert turn is not None
    return turn


@pytest.mark.parametrize("name", [each for each in SESSION_HEADERS if not each.shared])
def test_a_header_of_each_client_names_a_conversation(name: Any) -> None:
    turn, said, affinity = recognised({}, (name.name, "s1"), ("accept", "*/*"))
    assert turn is not None
    assert turn.session == turn.program == affinity > 0
    assert said == f"{name.name}={short(turn.session)}"
    # The same whatever a client calls it, another one for another owner.
    assert turn == turn_of({}, ("x-sluice-session", "s1"))
    assert turn.session != turn_of({}, (name.name, "s1"), owner="p").session
    assert turn.session != turn_of({}, (name.name, "s2")).session


def test_the_first_name_of_the_table_is_taken() -> None:
    ours, theirs = ("x-sluice-session", "a"), ("session-id", "b")
    assert recognised({"user": "c"}, theirs, ours) == recognised({}, ours)
    assert recognised({"user": "c"}, theirs) == recognised({}, theirs)
    assert recognised({"user": "c"}, ("x-sluice-session", ""), theirs) == recognised({}, theirs)
    both = {"prompt_cache_key": "cache", "user": "c"}
    assert recognised(both) == recognised({"prompt_cache_key": "cache"})


@pytest.mark.parametrize(
    ("headers", "root", "said"),
    [
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            {"x-claude-code-session-id": "s"},
            ["x-claude-code-session-id", "x-claude-code-agent-id"],
        ),
        (
            {"session-id": "s", "thread-id": "a"},
            {"session-id": "s", "thread-id": "s"},
            ["session-id", "thread-id"],
        ),
        (
            {"x-session-affinity": "a", "x-session-id": "a", "x-parent-session-id": "s"},
            {"x-session-affinity": "s", "x-session-id": "s"},
            ["x-session-affinity", "x-parent-session-id"],
        ),
        (
            {"x-dynamo-session-id": "a", "x-dynamo-parent-session-id": "s"},
            {"x-dynamo-session-id": "s"},
            ["x-dynamo-session-id", "x-dynamo-parent-session-id"],
        ),
    ],
)
def test_a_sub_agent_has_a_conversation_of_its_own_and_works_for_its_session(
    headers: dict[str, str], root: dict[str, str], said: list[str]
) -> None:
    child, names, affinity = recognised({}, *headers.items())
    parent = turn_of({}, *root.items())
    assert child is not None
    assert child.program == parent.program == parent.session == affinity
    assert recognised({}, *headers.items()).loop == parent.session
    assert child.session not in (0, parent.session)
    assert [each.partition("=")[0] for each in names.split(", ")] == said


def test_a_client_says_that_its_session_ends() -> None:
    session, final = ("x-session-id", "s"), "x-dynamo-session-final"
    turn = turn_of({}, session)
    assert not turn.final
    for value, ends in (("true", True), ("True", True), ("false", False), ("", False)):
        assert turn_of({}, session, (final, value)) == turn._replace(final=ends)
    # Of no conversation, and of one that has not begun, there is nothing to end.
    assert recognised({}, (final, "true")) == Recognised()
    assert not turn_of({"user": "bob"}, (final, "true")).final
    one = {"tools": TOOLS, "messages": [ASK, drawn("1")]}
    assert turn_of(one, (final, "true")).final
    with pytest.raises(ApiError, match=f"{final} must be true or false, got 'yes'") as caught:
        turn_of({}, session, (final, "yes"))
    assert caught.value.reason.status == 400


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"user": "bob"}, ()),
        ({"safety_identifier": "bob"}, ()),
        ({"prompt_cache_key": "bob"}, ()),
        ({"metadata": {"user_id": "bob"}}, ()),
        ({}, (("x-llm-d-inference-fairness-id", "bob"),)),
    ],
)
def test_a_shared_name_is_no_conversation(body: dict[str, Any], headers: Any) -> None:
    turn, said, affinity = recognised(body, *headers)
    assert turn is not None
    assert (turn.session, said.endswith(f"={short(turn.program)}")) == (0, True)
    assert affinity == (0 if headers else turn.program)
    # Two loops of one person are two conversations that count for the same.
    loops = [
        turn_of({**body, "tools": TOOLS, "messages": [ASK, drawn(number)]}, *headers)
        for number in "12"
    ]
    assert loops[0].program == loops[1].program == turn.program
    assert loops[0].session != loops[1].session
    one = {**body, "tools": TOOLS, "messages": [ASK, drawn("1")]}
    assert [recognised(each, *headers).loop for each in (body, one)] == [0, loops[0].session]


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_0a1b_account__session_{UUID}",
        f'{{"device_id": "d", "account_uuid": "", "session_id": "{UUID}"}}',
    ],
)
def test_claude_codes_session_is_found_in_its_users_id(user_id: str) -> None:
    expected = turn_of({}, ("x-claude-code-session-id", UUID))
    for body in ({"metadata": {"user_id": user_id}}, {"user": user_id}):
        assert turn_of(body, endpoint="messages") == expected


@pytest.mark.parametrize("field", ["user", "prompt_cache_key"])
def test_a_name_in_the_body_may_be_long(field: str) -> None:
    one, other = "session" * 10_000, "session" * 10_001
    assert turn_of({field: one}) == turn_of({field: one}) != turn_of({field: other})


LONG = "x" * (MAX_SESSION_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"user": 5}, (), "user"),
        ({"prompt_cache_key": ["x"]}, (), "prompt_cache_key"),
        ({"metadata": {"user_id": 5}}, (), "metadata"),
        ({}, (("x-sluice-session", LONG),), "x-sluice-session"),
        ({}, (("x-session-affinity", LONG),), "x-session-affinity"),
        ({}, (("session-id", "x"), ("session-id", "x")), "session-id"),
        ({}, (("session-id", "x"), ("thread-id", LONG)), "thread-id"),
        ({}, (("session-id", "x"), ("thread-id", "x"), ("thread-id", "y")), "thread-id"),
    ],
)
def test_a_bad_name_is_named(body: dict[str, Any], headers: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        recognised(body, *headers)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


def test_claude_codes_session_is_looked_for_in_short_names_only() -> None:
    """A search in megabytes would hold up other requests."""
    name = f"_session_{UUID}"
    assert (recognised({"user": name}).turn or Turn()).session
    assert not (recognised({"user": "x" * 2**20 + name}).turn or Turn()).session


def test_names_of_the_configuration_go_before_those_of_agents() -> None:
    reader = SessionReader(["x-conversation"])
    raw = [(b"session-id", b"a"), (b"x-conversation", b"b")]
    expected = turn_of({}, ("session-id", "b"))
    said = f"x-conversation={short(expected.session)}"
    assert reader.read("chat", {}, raw, "o") == (expected, said, expected.session)
    raw.append((b"x-sluice-session", b"c"))
    assert reader.read("chat", {}, raw, "o").turn == turn_of({}, ("session-id", "c"))


# Conversations without a name.


def drawn(number: str) -> dict[str, Any]:
    """A message of the chat API with a call whose id is random, as engines draw it."""
    call = {"id": f"chatcmpl-tool-b97a{number * 28}", "type": "function"}
    return {"role": "assistant", "tool_calls": [{**call, "function": {"name": "read"}}]}


def test_the_first_tool_call_identifies_a_conversation_at_any_router() -> None:
    system = {"role": "system", "content": "You are an agent. " * 1_000}
    begin = [system, ASK]
    first = [*begin, drawn("1"), result("read")]
    later = [*first, drawn("2"), result("read")]
    other = [*begin, drawn("3"), result("read")]
    assert recognised({"tools": TOOLS, "messages": begin}) == Recognised()
    of = [turn_of({"tools": TOOLS, "messages": each}) for each in (first, later, other)]
    assert of[0] == of[1]
    assert of[0].session == of[0].program > 0
    assert of[2].session != of[0].session
    said = recognised({"tools": TOOLS, "messages": later}).header
    assert said == f"tool_call={short(of[0].session)}"
    # Of one owner, and not of a request that can call nothing.
    assert turn_of({"tools": TOOLS, "messages": first}, owner="p").session != of[0].session
    assert recognised({"messages": first}) == Recognised()


def test_the_first_tool_call_of_each_api_identifies() -> None:
    use = {"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "read", "input": {}}
    messages = [ASK, {"role": "assistant", "content": [use]}, brought("read")]
    item = {"type": "function_call", "call_id": "call_9fQ2mVb81LqKe", "name": "read"}
    body = {"tools": TOOLS, "input": [ASK, item, output("call_9fQ2mVb81LqKe")]}
    assert turn_of({"tools": TOOLS, "messages": messages}, endpoint="messages").session
    assert turn_of(body, endpoint="responses").session


@pytest.mark.parametrize(
    "number", ["functions.read:0", "call_0", "tool_call_00012", "read-4711a", "x" * 8, "", None, 5]
)
def test_an_id_that_may_be_counted_identifies_nothing(number: Any) -> None:
    message = drawn("1")
    message["tool_calls"][0]["id"] = number
    found = recognised({"tools": TOOLS, "messages": [ASK, message, result("read")]})
    assert found == (Turn(tool=tool_key(["read"])), "", 0)


async def test_two_routers_know_the_same_session_and_say_so() -> None:
    conversation = [ASK, drawn("1"), result("read")]
    answers = []
    for _ in range(2):
        edge = edge_of(guaranteed())
        response = await post(edge, messages=conversation, tools=TOOLS)
        request: EngineRequest = edge.side.calls[0][1]
        assert request.turn is not None
        assert edge.controller.queries[0].session == request.turn.program
        assert response.headers["x-sluice-session"] == f"tool_call={short(request.turn.session)}"
        answers.append(request.turn)
    assert answers[0] == answers[1]


async def test_a_stated_loop_is_the_conversation_unless_a_header_names_it() -> None:
    edge = edge_of(guaranteed())
    slo = {"class": "standard", "loop": {"id": "fix-42", "deadline_ms": 60_000}}
    await post(edge, slo=slo)
    request: EngineRequest = edge.side.calls[0][1]
    assert request.turn is not None
    assert request.turn.session == request.turn.program == edge.controller.queries[0].session > 0
    body = {"slo": slo, "user": "bob"}
    assert recognised(body).header.startswith("slo.loop.id=")
    assert recognised(body, ("session-id", "s")) == recognised({}, ("session-id", "s"))


async def test_a_plain_request_has_no_session() -> None:
    edge = edge_of(guaranteed())
    response = await post(edge)
    assert "x-sluice-session" not in response.headers
    assert edge.controller.queries[0].session == 0


def test_names_of_headers_are_checked_in_the_configuration() -> None:
    sessions = CONFIG.model_validate({"sessions": {"headers": ["X-Conversation"]}}).sessions
    assert sessions.headers == ("x-conversation",)
    for bad in (["x conversation"], [""], ["x:y"], ["x" * 65], ["x"] * 17, "x"):
        with pytest.raises(ValueError, match="headers"):
            CONFIG.model_validate({"sessions": {"headers": bad}})


def test_the_table_of_names_is_documented_in_its_order() -> None:
    text = section(ROOT / "docs" / "agents.md", "Which session a request belongs to")
    cells = re.findall(r"^\| ([^|]*`[^|]*)\|", text, re.MULTILINE)
    own, *others = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    names = (*SESSION_HEADERS, *SESSION_FIELDS)
    assert [own, *others] == [
        names[0].name,
        "router.sessions.headers",
        *[n.name for n in names[1:]],
    ]
    assert all(f"`{name}`" in text for each in names for name in each[:3] if name)
