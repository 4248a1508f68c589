"""The light check of an OpenAI body before an engine sees it.

It refuses what would be unsafe, what bounds the work of one request, and what the router itself
relies on. All else is left to the engine, whose own 4xx answers pass through.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replica.engine import Endpoint
from router import wire
from router.errors import ApiError, invalid, shown

MAX_CHOICES = 16
"""Most choices (``n``) of a prompt."""

MAX_PROMPTS = 128
"""Most prompts of one completion request."""

MAX_MESSAGES = 4096
"""Most messages of one chat request."""

MAX_CONTENT_PARTS = 16_384
"""Most content parts of one chat request, over all its messages."""

MAX_TOKENS = 2**31 - 1
"""Largest token count or token id."""

_ENGINE_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_SERVER_FIELDS = {
    "request_id": "the server makes it; see the response header " + wire.REQUEST_ID_HEADER,
    "priority": f"state {wire.SLO_FIELD}.{wire.PRIORITY} instead",
}
_ARGS_FIELD = "vllm_xargs"
_RESERVED_ARGS_PREFIX = "sluice"

_Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None
_COUNT = f"an integer from 1 to {MAX_TOKENS}"
_ALLOWED = {
    "model": "a string of 1 to 512 characters",
    "stream": "true or false",
    "n": f"an integer from 1 to {MAX_CHOICES}",
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
}


class _Body(BaseModel):
    """The fields that both endpoints share and the router relies on."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: _Count = None
    max_completion_tokens: _Count = None


def check_body(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Refuse a body that no engine should see.

    ``O(messages)`` or ``O(prompt tokens)``.

    Raises:
        ApiError: 400; the message names the field and what is allowed.
    """
    _check_internal(body)
    try:
        _Body.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, body) from None
    if endpoint == "chat":
        _check_messages(body.get("messages"))
    else:
        _check_prompt(body.get("prompt"))


def engine_body(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without the fields that are the router's own."""
    own = (wire.SLO_FIELD, wire.SERVICE_TIER_FIELD, *_SERVER_FIELDS)
    return {name: value for name, value in body.items() if name not in own}


def _check_internal(body: dict[str, Any]) -> None:
    for name in _ENGINE_FIELDS:
        if body.get(name) is not None:
            raise invalid(f"{name} is for the server's own use; leave it out", name)
    for name, why in _SERVER_FIELDS.items():
        if body.get(name) is not None:
            raise invalid(f"{name} cannot be set: {why}", name)
    extra = body.get(_ARGS_FIELD)
    if extra is None:
        return
    if not isinstance(extra, dict):
        raise invalid(f"{_ARGS_FIELD} must be an object, got {shown(extra)}", _ARGS_FIELD)
    for key in extra:
        if key.lower().startswith(_RESERVED_ARGS_PREFIX) or key in _ENGINE_FIELDS:
            raise invalid(
                f"{_ARGS_FIELD} must not have the key {shown(key)}: it is for the server's own use",
                _ARGS_FIELD,
            )


def _refusal(error: ValidationError, body: dict[str, Any]) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0])
    got = shown(body[name]) if name in body else "nothing"
    return invalid(f"{name} must be {_ALLOWED[name]}, got {got}", name)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise invalid(
            f"messages must be a list of at least one message, got {shown(messages)}", "messages"
        )
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            f"messages must be at most {MAX_MESSAGES} messages, got {len(messages)}", "messages"
        )
    parts = 0
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role:
            raise invalid(
                f"messages[{index}] must be an object with a role, which is a string", "messages"
            )
        content = message.get("content")
        parts += len(content) if isinstance(content, list) else 0
    if parts > MAX_CONTENT_PARTS:
        raise invalid(
            f"messages must have at most {MAX_CONTENT_PARTS} content parts together, got {parts}",
            "messages",
        )


def _check_prompt(prompt: Any) -> None:
    """A prompt is text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            if _are_token_ids(prompt):
                return
        elif len(prompt) > MAX_PROMPTS:
            raise invalid(
                f"prompt must be at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt"
            )
        elif all(isinstance(entry, str) for entry in prompt) or all(
            isinstance(entry, list) and _are_token_ids(entry) for entry in prompt
        ):
            return
    raise invalid(
        "prompt must be a string, a list of strings, a list of token ids "
        f"(integers from 0 to {MAX_TOKENS}) or a list of lists of token ids; none may be an "
        "empty list",
        "prompt",
    )


def _are_token_ids(values: list[Any]) -> bool:
    # type() rather than isinstance(): JSON's true is an int to Python. Built-in functions, as there
    # may be millions.
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKENS
