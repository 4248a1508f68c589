"""vLLM's own serving layers, one per endpoint that the model and the version support.

They make the API compatible: chat templates, tools, log probabilities, structured output, error
texts. Which of them exist depends on the model: one that embeds generates no text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from sluice.replica.engine import GENERATING, Endpoint


class Serving(NamedTuple):
    """The serving layer of one endpoint.

    Attributes:
        body: checks a body and makes vLLM's request of it.
        layer: makes error responses.
        create: makes the response to vLLM's request, without an HTTP request: a model, an HTTP
            response, a stream of events, or an error response.
        generates: its requests carry sampling parameters, and Sluice's arguments with them.
    """

    body: TypeAdapter[Any]
    layer: Any
    create: Callable[[Any, None], Awaitable[Any]]
    generates: bool


_OPENAI = "vllm.entrypoints.openai"
_SCORING = "vllm.entrypoints.pooling.scoring.protocol"
_PLACES: dict[Endpoint, tuple[str, str, str, str]] = {
    "chat": (
        "openai_serving_chat",
        "create_chat_completion",
        f"{_OPENAI}.chat_completion.protocol",
        "ChatCompletionRequest",
    ),
    "completions": (
        "openai_serving_completion",
        "create_completion",
        f"{_OPENAI}.completion.protocol",
        "CompletionRequest",
    ),
    "responses": (
        "openai_serving_responses",
        "create_responses",
        f"{_OPENAI}.responses.protocol",
        "ResponsesRequest",
    ),
    "messages": (
        "anthropic_serving_messages",
        "create_messages",
        "vllm.entrypoints.anthropic.protocol",
        "AnthropicMessagesRequest",
    ),
    "embeddings": (
        "serving_embedding",
        "__call__",
        "vllm.entrypoints.pooling.embed.protocol",
        "EmbeddingRequest",
    ),
    "score": ("serving_scores", "__call__", _SCORING, "ScoreRequest"),
    "rerank": ("serving_scores", "__call__", _SCORING, "RerankRequest"),
    "tokenize": (
        "serving_tokenization",
        "create_tokenize",
        "vllm.entrypoints.serve.tokenize.protocol",
        "TokenizeRequest",
    ),
    "detokenize": (
        "serving_tokenization",
        "create_detokenize",
        "vllm.entrypoints.serve.tokenize.protocol",
        "DetokenizeRequest",
    ),
}
"""Endpoint -> the layer's name in vLLM's state, its method, and where its type of request is."""


def servings(state: Any) -> dict[Endpoint, Serving]:
    """The endpoints that the engine of this vLLM application state offers."""
    offered: dict[Endpoint, Serving] = {}
    for endpoint, (layer_name, method, module, request_type) in _PLACES.items():
        layer = getattr(state, layer_name, None)
        if layer is None:
            continue
        body = TypeAdapter(getattr(import_module(module), request_type))
        generates = endpoint in GENERATING
        offered[endpoint] = Serving(body, layer, getattr(layer, method), generates)
    return offered


def event_bytes(event: Any) -> bytes:
    """A server-sent event as it goes over the wire. Chats and completions come as text, responses
    as objects with a type."""
    if isinstance(event, str):
        return event.encode()
    data = event.model_dump_json(indent=None, by_alias=True)
    return f"event: {event.type}\ndata: {data}\n\n".encode()


def response_bytes(response: Any) -> bytes:
    """The body of a response that is not streamed."""
    body = getattr(response, "body", None)  # an HTTP response
    if isinstance(body, bytes):
        return body
    aliases = getattr(response, "object", None) == "response"  # as vLLM's own server does
    text: str = response.model_dump_json(by_alias=aliases)
    return text.encode()
