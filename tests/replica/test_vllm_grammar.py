"""Grammars that cost an engine more than their length: tried before, and bounded in the engine."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from sluice.protocol.requests import EngineRequest, ResponseHead, ResponseTail
from sluice.scheduling.request.objective import SLO

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LOOPS = 'a ::= [a-z]* b\nb ::= [a-z]* a | ""\n'
POISON = "root ::= " + " ".join(['(a|b|"")'] * 500) + "\n" + LOOPS
"""4.5 KB. Each letter can be read in thousands of ways."""


@pytest.fixture
def engine(vllm):
    return vllm.engine


@pytest.fixture
def unchecked(engine, monkeypatch):
    """The same one, where nothing is tried before."""
    monkeypatch.setattr(engine._llm, "grammars", None)
    return engine


async def answer(engine, name, **body):
    """Status and body of a chat; of a stream, its events."""
    request = EngineRequest(name, "chat", given(**body), SLO())
    items = [item async for item in engine.generate(request)]
    head, *chunks, tail = items
    assert isinstance(head, ResponseHead)
    assert isinstance(tail, ResponseTail)
    data = [chunk.data for chunk in chunks]
    if head.media_type == "application/json":
        return head.status, json.loads(b"".join(data))
    return head.status, events(data)


def given(**body):
    messages = [{"role": "user", "content": "Say a word"}]
    return {"model": "small", "messages": messages, "max_tokens": 24, "temperature": 0, **body}


def events(data):
    lines = [line.removeprefix("data: ") for line in b"".join(data).decode().split("\n\n")]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")]


NAMED = {"type": "function", "function": {"name": "f"}}


def tool(schema):
    """One whose arguments must match the schema."""
    function = {"name": "f", "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


SLOW_PATTERN = "(a?){1,1000}" * 30 + "a{300}"
SLOW_TEXT = {"type": "string", "pattern": SLOW_PATTERN}

COSTLY = {
    "grammar": {"structured_outputs": {"grammar": POISON}},
    "pattern": {"structured_outputs": {"regex": SLOW_PATTERN}},
    "schema": {"structured_outputs": {"json": SLOW_TEXT}},
    "tool": {
        "tools": [
            tool(
                {"type": "object", "properties": {"a": {"type": "string", "pattern": SLOW_PATTERN}}}
            )
        ],
        "tool_choice": NAMED,
    },
    "structural tag": {
        "response_format": {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": SLOW_TEXT},
        }
    },
}
GOOD = {
    "choices": {"structured_outputs": {"choice": ["yes", "no"]}},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        }
    },
    "object": {"response_format": {"type": "json_object"}},
    "not for xgrammar": {
        "structured_outputs": {"json": {"type": "integer", "multipleOf": 5}},
    },
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}},
    "pattern": {"structured_outputs": {"regex": "[a-z]{3,300}"}},
    "tool": {"tools": [tool({"type": "object"})], "tool_choice": NAMED},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", COSTLY)
async def test_a_costly_grammar_is_refused_before_the_engine_sees_it(engine, kind, stream):
    name = f"costly-{kind}-{stream}".replace(" ", "-")
    status, body = await answer(engine, name, stream=stream, **COSTLY[kind])
    assert (status, body["error"]["type"]) == (400, "invalid_request_error"), body
    # xgrammar gives some of them up by itself; the engine would say "is costly: the engine".
    assert re.search("is (costly|malformed): (?!the engine)", body["error"]["message"])


@pytest.mark.parametrize("kind", GOOD)
async def test_an_ordinary_grammar_passes_and_is_tried_once(engine, kind):
    name = f"good-{kind}".replace(" ", "-")
    for turn in range(2):
        status, body = await answer(engine, f"{name}-{turn}", **GOOD[kind])
        assert status == 200, body
    known = len(engine._llm.grammars._results)
    await answer(engine, f"{name}-again", **GOOD[kind])
    assert len(engine._llm.grammars._results) == known


async def stock(engine, **body):
    """What vLLM's own layer and client make of the same chat, without Sluice's around them."""
    serving = engine._servings["chat"]
    asked = serving.body.validate_python(given(**body))
    response = await serving.create(asked, None)
    if body.get("stream"):
        return 200, events([event.encode() async for event in response])
    error = getattr(response, "error", None)
    return 200 if error is None else error.code, response.model_dump(mode="json")


def plain(value):
    """Without names and times, which differ in each answer."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("id", "created")}
    return [plain(each) for each in value] if isinstance(value, list) else value


def joined(events):
    """A stream's deltas as one: how many tokens come in one event depends on the machine's pace."""
    content, calls, ends, others = "", {}, [], []
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"type": call.get("type")})
                for field, text in call["function"].items():
                    known[field] = known.get(field, "") + (text or "")
            if choice["finish_reason"] is not None:
                ends.append((choice["finish_reason"], choice.get("stop_reason")))
        if not event.get("choices"):
            others.append(plain(event))
    return content, calls, ends, others


LONG = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{64,}$"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["named", "required", "auto"])
@pytest.mark.parametrize("tokens", [1, 3, 9])
async def test_tool_calls_that_are_cut_are_those_of_stock_vllm(
    engine, choice, strict, stream, tokens
):
    made = tool({**LONG, "required": ["a"]})
    made["function"]["strict"] = strict
    body = {
        "tools": [made],
        "tool_choice": NAMED if choice == "named" else choice,
        "max_tokens": tokens,
        "stream": stream,
    }
    name = f"cut-{choice}-{strict}-{stream}-{tokens}"
    ours, theirs = await answer(engine, name, **body), await stock(engine, **body)
    assert ours[0] == theirs[0]
    same = joined if stream and ours[0] == 200 else plain
    assert same(ours[1]) == same(theirs[1])


@pytest.mark.release
async def test_a_check_that_was_killed_is_started_anew(engine):
    checker = engine._llm.grammars
    status, _ = await answer(engine, "first", structured_outputs={"choice": ["a", "b"]})
    assert status == 200
    checker._process.kill()
    checker._process.join()
    status, _ = await answer(engine, "second", structured_outputs={"choice": ["a", "c"]})
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_stops_a_request_whose_grammar_takes_its_steps(unchecked, stream):
    other = asyncio.create_task(answer(unchecked, f"other-{stream}", max_tokens=200))
    name = f"poison-{stream}"
    status, body = await answer(
        unchecked, name, stream=stream, max_tokens=200, structured_outputs={"grammar": POISON}
    )
    error = body[-1]["error"] if stream else body["error"]
    assert (status, error["code"]) == (200 if stream else 400, "invalid_value"), body
    assert "costly" in error["message"]
    assert (await other)[0] == 200
    assert (await answer(unchecked, f"after-{stream}"))[0] == 200
