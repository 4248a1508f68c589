"""Limits on the prompt and output length of one request, of the router and of its key."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

from sluice.protocol.requests import Endpoint
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.prompt_size import (
    MEDIA_TOKENS,
    SCORED,
    audio_characters,
    output_limit,
)
from sluice.router.tenancy.limits import TenantLimits

CHARACTERS_PER_TOKEN: Final = 4
"""Characters that count as a token, whatever the tokenizer: a client can compute it beforehand."""

UNSTATED_OUTPUT_TOKENS: Final = 512
"""Expected output tokens of a request without any limit of them."""

_PROMPT_FIELDS: Final = (
    "messages",
    "system",
    "prompt",
    "tokens",
    "input",
    "instructions",
    "suffix",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
    "query",
    "instruction",
    "file",
    *(name for pair in SCORED for name in pair),
)
"""All fields that a chat template may put into the prompt, and tokens to be decoded."""

_PROMPTS: Final = ("file", "prompt", "messages", "input", "tokens", "documents", "query")
"""The fields that a refusal names."""

_MEDIA: Final = frozenset(
    ("image_url", "input_image", "image_pil", "audio_url", "input_audio", "video_url")
)
_SOURCES: Final = {"image": "source"}
"""By the kind of a part of a message of Anthropic's, where the medium is."""

_OUTPUT_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "transcriptions": ("max_completion_tokens",),
    "translations": ("max_completion_tokens",),
}
"""Endpoints that generate, and their fields for output tokens; the first given one counts."""


def output_to_expect(endpoint: Endpoint, most: int) -> int:
    """Output tokens to reserve for a request that may have at most ``most``; 0 is no limit."""
    return most or (UNSTATED_OUTPUT_TOKENS if endpoint in _OUTPUT_FIELDS else 0)


class TokenLimits:
    """Applies the limits to bodies: the smaller of the router's and the key's."""

    def __init__(self, config: RouterConfig) -> None:
        self._prompt = config.max_prompt_tokens
        self._output = config.max_output_tokens

    def hold(
        self, endpoint: Endpoint, body: dict[str, Any], caps: TenantLimits
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The validated ``body`` within the limits, and the changed fields with their new values.

        ``O(body)`` where prompts are limited, else ``O(1)``.

        Raises:
            ApiError: 400, the prompt is too long, or there are more choices than output tokens.
                403, the request states more output, and the key's limits refuse that.
        """
        most = _least(self._prompt, caps.max_prompt_tokens)
        if most is not None:
            _check_prompt(body, most)
        most = _least(self._output, caps.max_output_tokens)
        fields = _OUTPUT_FIELDS.get(endpoint)
        if most is None or fields is None:
            return body, {}
        return _hold_output(endpoint, body, fields, most, caps)


def _hold_output(
    endpoint: Endpoint, body: dict[str, Any], fields: tuple[str, ...], most: int, caps: TenantLimits
) -> tuple[dict[str, Any], dict[str, str]]:
    asked = output_limit(endpoint, body)
    if 0 < asked <= most:
        return body, {}
    stated = [field for field in fields if body.get(field) is not None]
    each = most // (output_limit(endpoint, {**body, **dict.fromkeys(fields, 1)}) or 1)
    if stated and caps.beyond == "refuse" and asked > most:
        raise ApiError(
            Reason.NOT_PERMITTED,
            f"{stated[0]} must be at most {each} with this API key and this number of choices, "
            f"got {shown(body[stated[0]])}",
            stated[0],
        )
    if each < 1:
        raise invalid(f"a request may ask for at most {most} choices over all its prompts", "n")
    held = {field: min(body[field], each) for field in stated} or {fields[0]: each}
    return {**body, **held}, {field: str(value) for field, value in held.items()}


def _check_prompt(body: dict[str, Any], most: int) -> None:
    characters = tokens = 0
    level: list[Any] = [body[field] for field in _PROMPT_FIELDS if field in body]
    while level:
        value = level.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, bytes):
            characters += audio_characters(value)
        elif isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and (kind in _MEDIA or kind in _SOURCES):
                tokens += MEDIA_TOKENS
                # The object's other fields are text that may become part of the prompt.
                medium = _MEDIA | {_SOURCES.get(kind, "")}
                value = {name: part for name, part in value.items() if name not in medium}
            level.extend(value.values())
            characters += sum(map(len, value))
        elif isinstance(value, list):
            if value and all(type(entry) is int for entry in value):
                tokens += len(value)
            else:
                level.extend(value)
    tokens += ceil(characters / CHARACTERS_PER_TOKEN)
    if tokens > most:
        raise invalid(
            f"the prompt has about {tokens} tokens, a token for each {CHARACTERS_PER_TOKEN} "
            f"characters of text; allowed are {most}",
            next((field for field in _PROMPTS if body.get(field)), None),
        )


def _least(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given, default=None)
