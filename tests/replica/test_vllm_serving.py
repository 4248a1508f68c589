"""What vLLM's serving layers answer, as bytes; which of them there are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from sluice.protocol.errors import RequestError
from sluice.replica.engine import ConfigurationError
from sluice.replica.vllm import serving
from sluice.replica.vllm.serving import event_bytes, servings, whole_response, with_upload

pytestmark = pytest.mark.vllm


class Event(BaseModel):
    type: str
    schema_: int = Field(alias="schema")


class Kept(BaseModel):
    status: str


class Ending(BaseModel):
    type: str
    response: Kept


class Answer(Event):
    object: str


class Layer:
    async def create_chat_completion(self, body: Any, raw: None) -> None: ...
    async def create_tokenize(self, body: Any, raw: None) -> None: ...
    async def create_transcription(self, audio: bytes, body: Any, raw: None) -> None: ...
    async def create_detokenize(self, body: Any, raw: None) -> None: ...


def test_events_of_responses_are_named_and_others_are_passed_on() -> None:
    assert event_bytes("data: [DONE]\n\n", "chat") == b"data: [DONE]\n\n"
    event = event_bytes(Event(type="response.created", schema=1), "responses")
    assert event == b'event: response.created\ndata: {"type":"response.created","schema":1}\n\n'


def test_errors_in_a_stream_have_the_shape_of_its_api() -> None:
    told = {"message": "m", "type": "InternalServerError", "param": None, "code": 500}
    chat = event_bytes(f"data: {json.dumps({'error': told})}\n\n", "chat")
    expected = {"message": "m", "type": "server_error", "param": None, "code": "internal_error"}
    assert json.loads(chat.removeprefix(b"data: ")) == {"error": expected}
    told = {"type": "error", "error": {"type": "internal_error", "message": "m"}}
    name, data = event_bytes(f"event: error\ndata: {json.dumps(told)}\n\n", "messages").split(
        b"\n"
    )[:2]
    assert name == b"event: error"
    error = {"type": "api_error", "message": "m", "code": "internal_error"}
    assert json.loads(data.removeprefix(b"data: ")) == {"type": "error", "error": error}


def test_a_response_that_was_cut_is_incomplete() -> None:
    for status in ("completed", "incomplete", "failed"):
        response = Kept(status=status)
        sent = event_bytes(Ending(type="response.completed", response=response), "responses")
        name, data = sent.split(b"\n")[:2]
        assert name == f"event: response.{status}".encode()
        assert json.loads(data.removeprefix(b"data: "))["type"] == f"response.{status}"


def test_bodies_are_those_of_vllms_own_server() -> None:
    given = {"type": "t", "schema": 1}
    chat = SimpleNamespace(response_format=None)
    kind, body = whole_response("responses", chat, Answer(**given, object="response"))
    assert (kind, json.loads(body)) == ("application/json", {**given, "object": "response"})
    assert b"schema_" in whole_response("chat", chat, Answer(**given, object="chat.completion"))[1]
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
