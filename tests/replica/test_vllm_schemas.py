"""Every keyword of JSON Schema on a real engine: the text obeys it, or the answer names it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from sluice.protocol.requests import Endpoint, EngineRequest, ResponseChunk, ResponseHead
from sluice.scheduling.request.objective import SLO
from tests.documents import ROOT

from .json_schemas import MALFORMED, SCHEMAS, nested

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

AT_ONCE = 16
"""Requests."""

TOKENS = 160

Outcome = tuple[int, Any]
"""Status, and the body as JSON or the text of a stream."""

CHAT = {"messages": [{"role": "user", "content": "Say a word"}]}
PROMPTS: dict[Endpoint, dict[str, Any]] = {
    "chat": CHAT,
    "completions": {"prompt": "Say a word"},
    "responses": {"input": "Say a word"},
    "messages": {**CHAT, "max_tokens": TOKENS},
}


@pytest.fixture(scope="module")
def sampling(vllm: Any) -> dict[str, Any]:
    """The model is random: biases for tokens that end a text, and several texts."""
    tokenizer = vllm.engine._llm.get_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(['"', "]", "}", '"}', "0", "1", "a"])
    known = [each for each in ids if each is not None and each != tokenizer.unk_token_id]
    bias = {**{str(each): 8.0 for each in known}, str(tokenizer.eos_token_id): 12.0}
    return {"temperature": 1.0, "n": 3, "max_tokens": TOKENS, "logit_bias": bias}


async def outcomes(
    engine: Any, name: str, asked: Iterable[tuple[Endpoint, dict[str, Any]]]
) -> list[Outcome]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, endpoint: Endpoint, fields: dict[str, Any]) -> Outcome:
        body = {"model": "small", **PROMPTS[endpoint], **fields}
        async with room:
            request = EngineRequest(f"{name}-{number}", endpoint, body, SLO())
            items = [item async for item in engine.generate(request)]
        assert isinstance(items[0], ResponseHead)
        data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
        plain = items[0].media_type == "application/json"
        return items[0].status, json.loads(data) if plain else data.decode()

    return await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


def by_schema(endpoint: Endpoint, schema: Any) -> dict[str, Any]:
    """The fields of a request for a text that obeys a schema."""
    match endpoint:
        case "responses":
            return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
        case "messages":
            return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": form}


def by_tool(schema: Any, choice: Any = "required") -> dict[str, Any]:
    """The fields of a chat that must call a tool whose arguments obey a schema."""
    function = {"name": "f", "strict": True, "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def message(body: Any) -> str:
    text: str = body["error"]["message"]
    return text


checker = FormatChecker(formats=Draft202012Validator.FORMAT_CHECKER.checkers)


@checker.checks("date", raises=ValueError)
def is_date(value: Any) -> bool:
    """In any year, also a 29 February."""
    return not isinstance(value, str) or bool(date.fromisoformat("2004" + value[4:]))


def obeys(text: str, schema: Any) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema, format_checker=checker).is_valid(value))


def complete(body: dict[str, Any]) -> Iterator[str]:
    """The texts and arguments that were not cut."""
    for choice in body["choices"]:
        if choice["finish_reason"] in ("stop", "tool_calls"):
            calls = choice["message"].get("tool_calls")
            yield calls[0]["function"]["arguments"] if calls else choice["message"]["content"]


async def test_each_keyword_is_obeyed_or_named(vllm: Any, sampling: Any) -> None:
    cases = [(keyword, schema) for keyword, schemas in SCHEMAS.items() for schema in schemas]
    asked: list[tuple[Endpoint, dict[str, Any]]] = [
        ("chat", {**sampling, "seed": number, **by_schema("chat", schema)})
        for number, (_, schema) in enumerate(cases)
    ]
    wrong: list[Any] = []
    cut: list[Any] = []
    found: dict[str, set[int]] = {}
    for (keyword, schema), (status, body) in zip(
        cases, await outcomes(vllm.engine, "schema", asked), strict=True
    ):
        found.setdefault(keyword, set()).add(status)
        if status != 200:
            named = status == 400 and keyword in message(body)
            wrong += [] if named else [(schema, status, message(body))]
            continue
        texts = list(complete(body))
        cut += [] if texts else [schema]
        wrong += [(schema, text) for text in texts if not obeys(text, schema)]
    assert not wrong, "\n".join(map(str, wrong))
    assert len(cut) < 5, "\n".join(map(str, cut))
    rows = {row: {keyword for keyword in found if found[keyword] == on} for row, on in ROWS.items()}
    assert rows == {row: documented(row) for row in ROWS}


ROWS = {"obeyed": {200}, "obeyed or refused": {200, 400}, "refused": {400}}
"""Rows of the table in docs/clients.md: the statuses of requests with their keywords."""


def documented(row: str) -> set[str]:
    text = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    (keywords,) = re.findall(rf"^\| {row} \| (.*) \|$", text, re.M)
    named = set(re.findall("`([^`]+)`", keywords))
    return named | ({"title"} if row == "obeyed" else set())  # which any text obeys


async def test_the_arguments_of_a_tool_obey_each_keyword_or_it_is_named(
    vllm: Any, sampling: Any
) -> None:
    cases = [
        (keyword, {"type": "object", "properties": {"v": schema}, "required": ["v"]})
        for keyword, schemas in SCHEMAS.items()
        for schema in schemas[:3]
        if "$ref" not in json.dumps(schema)
    ]
    asked: list[tuple[Endpoint, dict[str, Any]]] = [
        ("chat", {**sampling, "seed": number, **by_tool(schema)})
        for number, (_, schema) in enumerate(cases)
    ]
    answered = 0
    wrong: list[Any] = []
    for (_, schema), (status, body) in zip(
        cases, await outcomes(vllm.engine, "tool", asked), strict=True
    ):
        if status != 200:
            named = status == 400 and "not enforced" in message(body)
            wrong += [] if named else [(schema, status, message(body))]
            continue
        texts = list(complete(body))
        answered += bool(texts)
        wrong += [(schema, text) for text in texts if not obeys(text, schema)]
    assert not wrong, "\n".join(map(str, wrong))
    assert answered > 20


DEEP = nested({"type": "integer"}, 80)
CONSTRAINTS: list[dict[str, Any]] = [
    *({"json": schema} for schema in MALFORMED),
    *({"json": text} for text in ("", "{", "[1]", "3", "null", "false")),
    {"json": DEEP},
    {"json": json.dumps(DEEP)},
    {"json": 3},
    {"regex": "("},
    {"regex": "a$b"},
    {"regex": "[a-z&&[^b]]"},
    {"regex": "(?=a)a"},
    {"regex": "a{2,1}"},
    {"regex": "\x00"},
    {"regex": 3},
    {"choice": []},
    {"choice": "ab"},
    {"choice": [1]},
    {"grammar": ""},
    {"grammar": "root ::= ("},
    {"grammar": "root ::= other"},
    {"grammar": 'root ::= "a" root'},
    {"grammar": 'root ::= a\na ::= "x" b\nb ::= a | b'},
    {"grammar": 'start: "a" start'},
    {"grammar": 3},
    {"json_object": False},
    {"json": {"type": "integer"}, "whitespace_pattern": " "},
    {"json": {"type": "integer"}, "disable_any_whitespace": True},
    {"json": {"type": "integer"}, "regex": "a"},
    {},
    *({"structural_tag": text} for text in ("", "{", "[]", "3", "{}", '{"type":"structural_tag"}')),
    {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "nothing"}})},
    {
        "structural_tag": json.dumps(
            {
                "format": {"type": "grammar", "grammar": 'root ::= "a" root'},
                "type": "structural_tag",
            }
        )
    },
    {
        "structural_tag": json.dumps(
            {
                "triggers": ["<a"],
                "structures": [{"begin": "<a>", "schema": {"multipleOf": 3}, "end": "</a>"}],
            }
        )
    },
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_constraint_is_the_clients_mistake(vllm: Any, stream: bool) -> None:
    asked: list[tuple[Endpoint, dict[str, Any]]] = [
        (endpoint, {"max_tokens": 8, "stream": stream, "structured_outputs": constraint})
        for constraint in CONSTRAINTS
        for endpoint in (("chat", "completions") if stream else ("chat",))
    ]
    asked += [
        (endpoint, {"stream": stream, **by_schema(endpoint, schema)})
        for schema in (*MALFORMED[::6], {"$ref": "#"}, {"uniqueItems": True}, DEEP)
        for endpoint in PROMPTS
    ]
    asked += [
        ("chat", {"stream": stream, **by_tool(schema, choice)})
        for schema in ({"$ref": "#"}, {"type": "object", "required": ["x"]}, {"type": "nothing"})
        for choice in ("required", {"type": "function", "function": {"name": "f"}})
    ]
    asked += [
        ("chat", {"stream": stream, "response_format": form})
        for form in (
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}},
            {"type": "structural_tag", "format": {"type": "nothing"}},
            {"type": "nothing"},
            "json",
        )
    ]
    found = await outcomes(vllm.engine, f"malformed-{stream}", asked)
    wrong = [(each, *got) for each, got in zip(asked, found, strict=True) if got[0] != 400]
    assert not wrong, "\n".join(map(str, wrong))


async def test_texts_of_every_endpoint_obey_a_schema(vllm: Any, sampling: Any) -> None:
    schema = {"type": "array", "minItems": 1, "maxItems": 2, "items": {"enum": ["x", 7]}}
    least = {"temperature": 0, "logit_bias": sampling["logit_bias"]}
    (_, completed), (_, response), (_, said) = await outcomes(
        vllm.engine,
        "every",
        [
            ("completions", {**least, "max_tokens": TOKENS, **by_schema("completions", schema)}),
            ("responses", {**least, "max_output_tokens": TOKENS, **by_schema("responses", schema)}),
            ("messages", {**least, **by_schema("messages", schema)}),
        ],
    )
    assert obeys(completed["choices"][0]["text"], schema), completed
    assert obeys(response["output"][-1]["content"][0]["text"], schema), response
    assert obeys(said["content"][-1]["text"], schema), said
