"""A model that does what its prompt says: the user's text holds the tool calls that it is to answer
with, in order, and it looks which of them have their results. Over the three APIs of agents."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
)
from tests.router.far_side import FarSide

Call = tuple[str, dict[str, Any]]
Script = list[Call]

_SCRIPT = re.compile(r"SCRIPT:([A-Za-z0-9+/=]+):END")
DONE = "All is done."


def asking(*calls: Call) -> str:
    """A prompt for these tool calls, each by name and arguments."""
    text = base64.b64encode(json.dumps(calls).encode()).decode()
    return f"SCRIPT:{text}:END"


def next_call(asked: list[str], results: list[int]) -> Call | None:
    """The call to answer with. ``asked``: the user's texts; ``results``: for each, how many results
    of tools come after it."""
    for text, done in zip(reversed(asked), reversed(results), strict=True):
        found = _SCRIPT.search(text)
        if found is not None:
            script = json.loads(base64.b64decode(found[1]))
            return tuple(script[done]) if done < len(script) else None
    return None


def call_for(body: dict[str, Any]) -> Call | None:
    """The call with which a request of any of the APIs is answered; ``None``: a text."""
    asked: list[str] = []
    results: list[int] = []
    for item in body.get("messages") or _items(body.get("input")):
        parts = item.get("content") or item.get("output") or ""
        parts = [parts] if isinstance(parts, str) else parts
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        done = kinds.count("tool_result")
        done += item.get("role") == "tool" or str(item.get("type", "")).endswith("_call_output")
        if done:
            results = [each + done for each in results]
        elif item.get("role") == "user":
            texts = [part if isinstance(part, str) else part.get("text", "") for part in parts]
            asked.append("\n".join(map(str, texts)))
            results.append(0)
    return next_call(asked, results) if body.get("tools") else None


def _items(given: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())


def chat(body: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A chat's answer, as the events of its stream."""
    base = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": 1}
    base["model"] = body["model"]

    def event(delta: dict[str, Any], finish: str | None = None) -> tuple[str, dict[str, Any]]:
        return "", {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield event({"role": "assistant", "content": ""})
    call = call_for(body)
    if call is None:
        yield event({"content": DONE})
        yield event({}, "stop")
    else:
        function = {"name": call[0], "arguments": ""}
        head = {"index": 0, "id": f"call_{name}", "type": "function", "function": function}
        yield event({"tool_calls": [head]})
        for piece in _pieces(call[1]):
            yield event({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        yield event({}, "tool_calls")
    usage = {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}
    yield "", {**base, "choices": [], "usage": usage}


def messages(body: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of Anthropic's API."""

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, **fields}

    usage = {"input_tokens": 50, "output_tokens": 1}
    message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
    message |= {"model": body["model"], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=message)
    call = call_for(body)
    if call is None:
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": DONE})
    else:
        block = {"type": "tool_use", "id": f"toolu_{name}", "name": call[0], "input": {}}
        yield event("content_block_start", index=0, content_block=block)
        for piece in _pieces(call[1]):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield event("content_block_delta", index=0, delta=delta)
    yield event("content_block_stop", index=0)
    reason = "end_turn" if call is None else "tool_use"
    delta = {"stop_reason": reason, "stop_sequence": None}
    yield event("message_delta", delta=delta, usage={**usage, "output_tokens": 7})
    yield event("message_stop")


def responses(body: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of the responses API."""
    number = iter(range(100))

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, "sequence_number": next(number), **fields}

    whole = {"id": f"resp_{name}", "object": "response", "created_at": 1, "model": body["model"]}
    whole |= {"output": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    yield event("response.created", response={**whole, "status": "in_progress"})
    call = call_for(body)
    at: dict[str, Any] = {"output_index": 0}
    if call is None:
        part = {"type": "output_text", "text": "", "annotations": []}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        started = {**item, "status": "in_progress", "content": []}
        yield event("response.output_item.added", **at, item=started)
        within = {**at, "item_id": item["id"], "content_index": 0}
        yield event("response.content_part.added", **within, part=part)
        yield event("response.output_text.delta", **within, delta=DONE, logprobs=[])
        yield event("response.output_text.done", **within, text=DONE, logprobs=[])
        part = {**part, "text": DONE}
        yield event("response.content_part.done", **within, part=part)
        item |= {"status": "completed", "content": [part]}
    else:
        item = {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}"}
        space, _, tool = call[0].rpartition("__")  # as vLLM names the tools of a namespace
        item |= {"name": tool, "arguments": "", **({"namespace": space} if space else {})}
        yield event("response.output_item.added", **at, item={**item, "status": "in_progress"})
        within = {**at, "item_id": item["id"]}
        for piece in _pieces(call[1]):
            yield event("response.function_call_arguments.delta", **within, delta=piece)
        item |= {"arguments": json.dumps(call[1]), "status": "completed"}
        ended = {"arguments": item["arguments"], "name": tool}
        yield event("response.function_call_arguments.done", **within, **ended)
    yield event("response.output_item.done", **at, item=item)
    usage: dict[str, Any] = {"input_tokens": 50, "output_tokens": 7, "total_tokens": 57}
    usage |= {"input_tokens_details": {"cached_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    whole |= {"status": "completed", "output": [item], "usage": usage}
    yield event("response.completed", response=whole)


def _pieces(arguments: dict[str, Any]) -> Iterator[str]:
    text = json.dumps(arguments)
    yield text[: len(text) // 2]
    yield text[len(text) // 2 :]


_APIS = {"chat": chat, "messages": messages, "responses": responses}


def stream(endpoint: str, body: dict[str, Any], name: str) -> Iterator[bytes]:
    """A streamed answer's server-sent events."""
    for kind, data in _APIS[endpoint](body, name):
        head = f"event: {kind}\n" if kind else ""
        yield f"{head}data: {json.dumps(data)}\n\n".encode()
    if endpoint == "chat":
        yield b"data: [DONE]\n\n"


def whole(endpoint: str, body: dict[str, Any], name: str) -> dict[str, Any]:
    """An answer that is not streamed."""
    call = call_for(body)
    if endpoint == "count_tokens":
        return {"input_tokens": 50}
    if endpoint == "responses":
        *_, (_, last) = responses(body, name)
        answer: dict[str, Any] = last["response"]
        return answer
    if endpoint == "messages":
        block: dict[str, Any] = {"type": "text", "text": DONE}
        if call is not None:
            block = {"type": "tool_use", "id": f"toolu_{name}", "name": call[0], "input": call[1]}
        answer = dict(next(messages(body, name))[1]["message"])
        reason = "end_turn" if call is None else "tool_use"
        return {**answer, "content": [block], "stop_reason": reason}
    message: dict[str, Any] = {"role": "assistant", "content": DONE if call is None else None}
    if call is not None:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        message["tool_calls"] = [{"id": f"call_{name}", "type": "function", "function": function}]
    *_, (_, last) = chat(body, name)
    reason = "stop" if call is None else "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {**last, "object": "chat.completion", "choices": [choice]}


async def obey(side: FarSide, replica: str, request: EngineRequest) -> AsyncIterator[ResponseItem]:
    """A replica with this model."""
    body = dict(request.body)
    if body.get("stream"):
        yield ResponseHead(200, EVENT_STREAM, replica)
        for part in stream(request.endpoint, body, request.request_id):
            yield ResponseChunk(part, 1)
        yield ResponseTail(50, 7)
        return
    yield ResponseHead(200, "application/json", replica)
    yield ResponseChunk(json.dumps(whole(request.endpoint, body, request.request_id)).encode())
    yield ResponseTail(50, 7, (0.1,))
