"""vLLM's own serving layers, which make the API compatible: one per endpoint that the model and the
version support (a model that embeds generates no text)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Container, Iterator
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final, NamedTuple

from fastapi import UploadFile
from pydantic import TypeAdapter

from sluice.protocol.errors import RequestError, error_event
from sluice.protocol.requests import ANTHROPIC, GENERATING, SPEECH, Endpoint
from sluice.replica.engine import ConfigurationError
from sluice.replica.vllm.contract import binds, located

logger = logging.getLogger(__name__)


class Serving(NamedTuple):
    """The serving layer of one endpoint. ``body`` makes vLLM's request, ``create`` its response
    without HTTP. ``generates``: requests carry sampling parameters with Sluice's arguments."""

    body: TypeAdapter[Any]
    layer: Any
    create: Callable[[Any, None], Awaitable[Any]]
    generates: bool


_OPENAI = "vllm.entrypoints.openai"
_ANTHROPIC = "vllm.entrypoints.anthropic.protocol"
_POOLING = "vllm.entrypoints.pooling"
_SCORING = f"{_POOLING}.scoring.protocol"
_SPEECH = "vllm.entrypoints.speech_to_text"
_TOKENS = "vllm.entrypoints.serve.tokenize.protocol"
PLACES: dict[Endpoint, tuple[str, str]] = {
    "chat": (
        "openai_serving_chat.create_chat_completion",
        f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest",
    ),
    "completions": (
        "openai_serving_completion.create_completion",
        f"{_OPENAI}.completion.protocol:CompletionRequest",
    ),
    "responses": (
        "openai_serving_responses.create_responses",
        f"{_OPENAI}.responses.protocol:ResponsesRequest",
    ),
    "messages": (
        "anthropic_serving_messages.create_messages",
        f"{_ANTHROPIC}:AnthropicMessagesRequest",
    ),
    "count_tokens": (
        "anthropic_serving_messages.count_tokens",
        f"{_ANTHROPIC}:AnthropicCountTokensRequest",
    ),
    "embeddings": ("serving_embedding.__call__", f"{_POOLING}.embed.protocol:EmbeddingRequest"),
    "classify": (
        "serving_classification.__call__",
        f"{_POOLING}.classify.protocol:ClassificationRequest",
    ),
    "pooling": ("serving_pooling.__call__", f"{_POOLING}.pooling.protocol:PoolingRequest"),
    "score": ("serving_scores.__call__", f"{_SCORING}:ScoreRequest"),
    "rerank": ("serving_scores.__call__", f"{_SCORING}:RerankRequest"),
    "transcriptions": (
        "openai_serving_transcription.create_transcription",
        f"{_SPEECH}.transcription.protocol:TranscriptionRequest",
    ),
    "translations": (
        "openai_serving_translation.create_translation",
        f"{_SPEECH}.translation.protocol:TranslationRequest",
    ),
    "tokenize": ("serving_tokenization.create_tokenize", f"{_TOKENS}:TokenizeRequest"),
    "detokenize": ("serving_tokenization.create_detokenize", f"{_TOKENS}:DetokenizeRequest"),
}
"""Endpoint -> the method that serves it in vLLM's state, and where its type of request is."""

_STREAM_ERRORS: Final = ('data: {"error"', "event: error")
"""How an error begins that ends a stream of text."""

_FAILED: Final = "The engine failed to serve this request."
"""Where vLLM gives no message: its error for what it did not expect has none."""

AUDIO_PACKAGES = ("av", "soundfile")
"""What vLLM decodes audio with. Without them it would blame the audio."""

_ALWAYS: Final[tuple[Endpoint, ...]] = ("chat", "completions")
"""What every model that generates text offers."""


def servings(state: Any, tasks: Container[str] = ()) -> dict[Endpoint, Serving]:
    """The endpoints of this vLLM application; ``tasks``: vLLM's names of what the model can do.
    Raises ConfigurationError: this vLLM lacks a layer, or calls it otherwise."""
    offered: dict[Endpoint, Serving] = {}
    for endpoint, (served_by, request_type) in PLACES.items():
        layer_name, _, method = served_by.partition(".")
        layer = getattr(state, layer_name, None)
        if layer is None or (endpoint in SPEECH and not _reads_audio(endpoint, request_type)):
            continue
        body = TypeAdapter(located((request_type,)))
        create = getattr(layer, method, None)
        if create is None or not binds(create, 3 if endpoint in SPEECH else 2):
            raise ConfigurationError(f"{type(layer).__name__}.{method} of this vLLM is not usable")
        if endpoint in SPEECH:
            create = _with_audio(create)
        offered[endpoint] = Serving(body, layer, create, endpoint in GENERATING)
    absent = [each for each in _ALWAYS if "generate" in tasks and each not in offered]
    if absent:
        raise ConfigurationError(f"this vLLM has no layer under the names of {', '.join(absent)}")
    return offered


def _reads_audio(endpoint: Endpoint, request_type: str) -> bool:
    missing = [package for package in AUDIO_PACKAGES if find_spec(package) is None]
    if missing:
        logger.warning(
            "%s are not offered: install %s, or Sluice with its extra `audio`",
            endpoint,
            " and ".join(missing),
        )
        return False
    try:
        return find_spec(request_type.partition(":")[0]) is not None
    except ModuleNotFoundError:
        logger.warning("%s are not offered with this version of vLLM", endpoint)
        return False


def _with_audio(create: Callable[..., Awaitable[Any]]) -> Callable[[Any, None], Awaitable[Any]]:
    """A method of vLLM's that takes the audio beside its request, as one that takes the request."""

    def with_audio(request: Any, raw_request: None) -> Awaitable[Any]:
        return create(request.file.file.read(), request, raw_request)

    return with_audio


def with_upload(body: dict[str, Any]) -> dict[str, Any]:
    """A body with audio, which has it as vLLM's requests do. Raises RequestError: it has none."""
    audio = body.get("file")
    if not isinstance(audio, bytes):
        raise RequestError("file must be audio.", "file")
    return {**body, "file": UploadFile(BytesIO(audio))}


def refused(error: Any) -> RequestError:
    """An error of vLLM's, with its message, ``code`` (an HTTP status) and ``param``."""
    unknown_model = error.code == 404 and error.param == "model"
    code = "model_not_found" if unknown_model else None
    return RequestError(error.message or _FAILED, error.param, int(error.code), code)


def event_bytes(event: Any, endpoint: Endpoint) -> bytes:
    """A server-sent event in bytes, from text (chats, completions) or an object (responses)."""
    if isinstance(event, str):
        error = stream_error(event)
        return event.encode() if error is None else error_event(endpoint, error.document(endpoint))
    status = event.response.status if event.type == "response.completed" else ""
    if status in ("incomplete", "failed"):
        # vLLM ends every response with the same event; clients go by its type.
        event = event.model_copy(update={"type": f"response.{status}"})
    data = event.model_dump_json(indent=None, by_alias=True, warnings=False)
    return f"event: {event.type}\ndata: {data}\n\n".encode()


_CALLED: Final = re.compile(
    rb'"function":\s*\{"name":\s*"([^"\\]+)"'  # of a chat
    rb'|"type":\s*"tool_use",[^{}]*?"name":\s*"([^"\\]+)"'  # of a message
    rb'|"name":\s*"([^"\\]+)",[^{}]*?"type":\s*"function_call"'  # of a response
)


def called_tools(data: bytes) -> Iterator[str]:
    """The tools that an answer, or an event of one, calls. What a model writes has its quotes
    escaped, and is never taken for a call."""
    return (name.decode() for match in _CALLED.finditer(data) for name in match.groups() if name)


_TEXT_EVENT: Final = re.compile(
    rb'data: \{[^\n]*"choices":\[\{"index":0,(?:"delta":\{"content"|"text"):'
    rb'("(?:[^"\\]|\\.)*")\}?,"logprobs":null,"finish_reason":null(?:,"\w+":null)*\}\]\}\n\n'
)
"""An event with nothing but text."""


def template_of(event: bytes) -> tuple[bytes, bytes] | None:
    """What precedes and what follows the text, a JSON string, in a stream of such events."""
    found = _TEXT_EVENT.fullmatch(event)
    return None if found is None else (event[: found.start(1)], event[found.end(1) :])


def is_plain(endpoint: Endpoint, serving: Serving, body: Any) -> bool:
    """Whether an answer may be a stream of events that differ in nothing but their text: one prompt
    and one choice, no parser of reasoning or tools, and no log of what is written. An ``echo`` in a
    chat is an event of text, whatever else the events after it have."""
    layer = serving.layer
    if endpoint == "chat":
        logs = getattr(layer, "enable_log_outputs", True)
        plain = getattr(layer, "parser_cls", layer) is None and not logs and not body.echo
    else:
        prompt = getattr(body, "prompt", None)
        # Embeddings beside a prompt are a prompt of their own.
        alone = getattr(body, "prompt_embeds", None) is None
        plain = (endpoint == "completions" and alone) and (
            isinstance(prompt, str)
            or (isinstance(prompt, list) and isinstance(next(iter(prompt), None), int))
        )
    return plain and bool(body.stream) and body.n in (None, 1)


def stream_error(event: Any) -> RequestError | None:
    """The error with which vLLM ends a stream of text, if ``event`` is one."""
    if not (isinstance(event, str) and event.startswith(_STREAM_ERRORS)):
        return None
    given = json.loads(event.partition("data: ")[2])["error"]
    return RequestError(
        given["message"] or _FAILED, given.get("param"), int(given.get("code") or 500)
    )


def whole_response(endpoint: Endpoint, request: Any, response: Any) -> tuple[str, bytes]:
    """The media type and the body of a response that is not streamed."""
    body = getattr(response, "body", None)  # an HTTP response
    if isinstance(body, bytes):
        return "application/json", body
    if getattr(request, "response_format", None) == "text":
        # Of speech. vLLM's own server answers with JSON, which clients would take for the text.
        return "text/plain", response.text.encode()
    # As vLLM's own server does. Anthropic's API refuses keys that it does not know when a client
    # sends an answer back.
    aliases = getattr(response, "object", None) == "response"
    text: str = response.model_dump_json(by_alias=aliases, exclude_none=endpoint in ANTHROPIC)
    return "application/json", text.encode()
