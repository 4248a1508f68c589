"""What vLLM's serving layers answer, as bytes; which of them there are."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import BaseModel, Field, TypeAdapter
from starlette.responses import JSONResponse

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import SPEECH, Endpoint, RequestBody
from sluice.replica.engine import ConfigurationError
from sluice.replica.vllm import serving
from sluice.replica.vllm.contract import located
from sluice.replica.vllm.engine import validated
from sluice.replica.vllm.serving import (
    PLACES,
    Serving,
    called_tools,
    event_bytes,
    servings,
    whole_response,
    with_upload,
)
from sluice.router.config import RouterConfig
from sluice.router.openapi import document
from sluice.router.request.arrival import Arrival
from sluice.router.request.call import CallReader
from tests.documents import ROOT
from tests.stock.rows import BASES

pytestmark = pytest.mark.vllm


class Kept(BaseModel):
    status: str


class Event(BaseModel):
    type: str
    schema_: int = Field(default=1, alias="schema")
    response: Kept | None = None
    object: str = ""


class Layer:
    async def create_chat_completion(self, body: Any, raw: None) -> None: ...
    async def create_tokenize(self, body: Any, raw: None) -> None: ...
    async def create_transcription(self, audio: bytes, body: Any, raw: None) -> None: ...
    async def create_detokenize(self, body: Any, raw: None) -> None: ...


def data_of(event: bytes) -> tuple[bytes, Any]:
    """The first line of an event, and its data."""
    name, _, data = event.removesuffix(b"\n\n").rpartition(b"\n")
    return name, json.loads(data.removeprefix(b"data: "))


def test_events_of_responses_are_named_and_others_are_passed_on() -> None:
    assert event_bytes("data: [DONE]\n\n", "chat") == b"data: [DONE]\n\n"
    name, data = data_of(event_bytes(Event(type="response.created"), "responses"))
    assert name == b"event: response.created"
    assert data["schema"] == 1
    for status in ("completed", "incomplete", "failed"):
        ending = Event(type="response.completed", response=Kept(status=status))
        name, data = data_of(event_bytes(ending, "responses"))
        assert name == f"event: response.{status}".encode()
        assert data["type"] == f"response.{status}"


def test_errors_in_a_stream_have_the_shape_of_its_api() -> None:
    told = {"message": "m", "type": "InternalServerError", "param": None, "code": 500}
    _, chat = data_of(event_bytes(f"data: {json.dumps({'error': told})}\n\n", "chat"))
    expected = {"message": "m", "type": "server_error", "param": None, "code": "internal_error"}
    assert chat == {"error": expected}
    told = {"type": "error", "error": {"type": "internal_error", "message": "m"}}
    event = event_bytes(f"event: error\ndata: {json.dumps(told)}\n\n", "messages")
    error = {"type": "api_error", "message": "m", "code": "internal_error"}
    assert data_of(event) == (b"event: error", {"type": "error", "error": error})


@pytest.mark.parametrize("endpoint", ["chat", "messages"])
def test_an_error_without_a_message_gets_one(endpoint: Endpoint) -> None:
    """vLLM's ``EngineGenerateError`` has none."""
    event = 'data: {"error": {"message": "", "type": "InternalServerError", "code": 500}}\n\n'
    assert b"The engine failed" in event_bytes(event, endpoint)
    error = SimpleNamespace(message="", param=None, code=500)
    assert "The engine failed" in str(serving.refused(error))


def test_bodies_are_those_of_vllms_own_server() -> None:
    chat = SimpleNamespace(response_format=None)
    kind, body = whole_response("responses", chat, Event(type="t", object="response"))
    assert kind == "application/json" and json.loads(body)["schema"] == 1
    assert b"schema_" in whole_response("chat", chat, Event(type="t", object="chat"))[1]
    plain = ("application/json", b'{"data":[1]}')
    assert whole_response("embeddings", chat, JSONResponse({"data": [1]})) == plain
    spoken = SimpleNamespace(response_format="text"), SimpleNamespace(text="hello")
    assert whole_response("transcriptions", *spoken) == ("text/plain", b"hello")


def test_what_reads_no_sounds_offers_no_speech(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="sluice")
    state = SimpleNamespace(openai_serving_transcription=Layer(), serving_tokenization=Layer())
    monkeypatch.setattr(serving, "AUDIO_PACKAGES", ("asyncio", "av-of-another-name"))
    assert set(servings(state)) == {"tokenize", "detokenize"}
    assert "install av-of-another-name, or Sluice with its extra `audio`" in caplog.text
    monkeypatch.setattr(serving, "AUDIO_PACKAGES", ())
    assert "transcriptions" in servings(state)
    with pytest.raises(RequestError, match="file must be audio"):
        with_upload({"file": "text"})


def test_only_what_the_model_has_is_offered() -> None:
    layer = Layer()
    state = SimpleNamespace(
        openai_serving_chat=layer, openai_serving_completion=None, serving_tokenization=layer
    )
    offered = servings(state)
    assert set(offered) == {"chat", "tokenize", "detokenize"}
    assert [offered[each].generates for each in ("chat", "tokenize")] == [True, False]
    body = offered["tokenize"].body.validate_python({"model": "m", "prompt": "hello"})
    assert body.prompt == "hello"


def test_layers_that_are_missing_or_called_otherwise_are_found_at_start() -> None:
    class Changed:
        async def create_chat_completion(self, body: Any, raw: None, session: str) -> None: ...

    chat = SimpleNamespace(openai_serving_chat=Layer())
    assert set(servings(chat)) == {"chat"}
    with pytest.raises(ConfigurationError, match="no layer under the names of completions"):
        servings(chat, tasks=("generate",))
    with pytest.raises(ConfigurationError, match=r"Changed\.create_chat_completion .* not usable"):
        servings(SimpleNamespace(openai_serving_chat=Changed()))


TASKS = (
    *("generate", "transcription", "realtime"),
    *("embed", "classify", "token_embed", "token_classify"),
)
OF_SLUICE = {"/"}


class AnyModel:
    """A model of which vLLM's application asks what it pools and scores."""

    hf_config = SimpleNamespace(num_labels=1)
    architecture = "JinaForRanking"

    def get_pooling_task(self, _: object) -> str:
        return "classify"

    def __getattr__(self, name: str) -> Any:
        return None


def routes_of_vllm(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths of vLLM's application with all that flags and variables add to it."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    given = ["--enable-tokenizer-info-endpoint", "--enable-fault-tolerance"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = build_app(args, TASKS, AnyModel())  # type: ignore[arg-type]
    return {route.path for route in app.routes if hasattr(route, "path")}


def listed() -> set[str]:
    """Paths that the document says are not served."""
    text = (ROOT / "docs" / "clients.md").read_text()
    table = text.partition("Not served, of what vLLM's own server has:")[2].partition("\n\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {path for row in rows for path in re.findall(r"`(/[^`]*)`", row)}


def test_every_route_is_served_or_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's application sets the level for the whole process; this has it set back.
    caplog.set_level(logging.getLogger().level)
    theirs = routes_of_vllm(monkeypatch)
    assert {"/v1/chat/completions", "/rerank", "/v2/embed", "/sleep"} <= theirs
    ours = set(document(RouterConfig())["paths"]) | OF_SLUICE
    missing = theirs - ours
    assert missing == listed(), "served, or listed with the reason"


SAID = BASES["/v1/chat/completions"]["messages"]
BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat": BASES["/v1/chat/completions"],
    "completions": BASES["/v1/completions"],
    "responses": BASES["/v1/responses"],
    "messages": BASES["/v1/messages"],
    "count_tokens": BASES["/v1/messages/count_tokens"],
    "embeddings": BASES["/v1/embeddings"],
    "classify": BASES["/classify"],
    "pooling": BASES["/pooling"],
    "score": BASES["/score"],
    "rerank": BASES["/rerank"],
    "tokenize": BASES["/tokenize"],
    "detokenize": BASES["/detokenize"],
}
WRONG: tuple[Any, ...] = ("wrong", {"wrong": {}}, [{"wrong": {}}], -1.5)


def request_type(endpoint: Endpoint) -> Any:
    return located(PLACES[endpoint][1:])


def layer_of(endpoint: Endpoint) -> Serving:
    return Serving(TypeAdapter(request_type(endpoint)), None, None, True)  # type: ignore[arg-type]


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The models that a type of request is, or may be."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


def fields(endpoint: Endpoint) -> dict[str, bool]:
    """Whether each field of a request may be null."""
    found: dict[str, bool] = {}
    for model in models_in(request_type(endpoint)):
        for name, field in model.model_fields.items():
            may_be_null = type(None) in get_args(field.annotation)
            found[field.alias or name] = found.get(name, False) or may_be_null
    return found


def test_all_endpoints_of_json_are_here() -> None:
    assert set(BODIES) | SPEECH == set(get_args(Endpoint))


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_null_is_the_default(endpoint: Endpoint) -> None:
    reader = CallReader(RouterConfig())

    def parsed(body: dict[str, Any]) -> Any:
        arrival = Arrival("r", 0.0)
        call = reader.make(RequestBody.of(body), (), endpoint, arrival)
        return validated(dict(call.body), layer_of(endpoint)).model_dump(exclude={"request_id"})

    body = BODIES[endpoint]
    without = parsed(body)
    nullable = [name for name, may_be_null in fields(endpoint).items() if may_be_null]
    assert nullable
    for name in nullable:
        if name not in body:
            assert parsed({**body, name: None}) == without, name


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_wrong_value_is_named(endpoint: Endpoint) -> None:
    refused = 0
    for name in fields(endpoint):
        for value in WRONG:
            try:
                validated({**BODIES[endpoint], name: value}, layer_of(endpoint))
            except RequestError as error:
                refused += 1
                assert error.param is not None, (name, value, str(error))
                assert error.param.split(".")[0] == name, (name, value, error.param, str(error))
    assert refused


def test_the_tools_that_an_answer_calls_are_read_from_its_bytes() -> None:
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputItemDoneEvent
    from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock, AnthropicStreamEvent

    protocol = pytest.importorskip("vllm.entrypoints.generate.base.protocol")
    arguments = json.dumps({"name": "no", "type": "function_call", "function": {"name": "no"}})
    whole = protocol.ToolCall(function=protocol.FunctionCall(name="read", arguments=arguments))
    delta = protocol.DeltaToolCall(
        index=0, type="function", function=protocol.DeltaFunctionCall(name="read", arguments="")
    )
    further = protocol.DeltaToolCall(
        index=0, function=protocol.DeltaFunctionCall(arguments=arguments)
    )
    block = AnthropicContentBlock(type="tool_use", id="1", name="read", input={})
    filled = AnthropicContentBlock(type="tool_use", id="1", name="read", input={"name": "no"})
    start = AnthropicStreamEvent(type="content_block_start", index=0, content_block=block)
    called = ResponseFunctionToolCall(
        arguments=arguments, call_id="1", name="read", type="function_call"
    )
    done = ResponseOutputItemDoneEvent(
        item=called, output_index=0, sequence_number=1, type="response.output_item.done"
    )
    calls = (protocol.DeltaMessage(tool_calls=[delta]), whole, block, filled, start, called, done)
    for each in calls:
        for options in ({}, {"exclude_none": True}, {"exclude_unset": True}):
            text = each.model_dump_json(**options)
            assert set(called_tools(text.encode())) == {"read"}, text
    said = protocol.DeltaMessage(content=whole.model_dump_json() + block.model_dump_json())
    declared = {"type": "function", "name": "read", "parameters": {}, "strict": None}
    texts = (
        said.model_dump_json(),
        protocol.DeltaMessage(tool_calls=[further]).model_dump_json(exclude_none=True),
        json.dumps({"tools": [declared], "tool_choice": {"type": "function", "name": "read"}}),
    )
    for text in texts:
        assert set(called_tools(text.encode())) == set(), text
