"""Bounds on the engine cost of one body's options, in addition to its tokens.

Without them the size of the body would be the only bound: a hundred thousand biases are read in
each step of a batch, and the time to compile a pattern grows with the cube of its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from sluice.router.errors import ApiError, Reason, invalid, shown

MAX_ENTRIES: Final = {
    "allowed_token_ids": 65_536,
    "bad_words": 128,
    "documents": 1_024,
    "functions": 1_024,
    "logit_bias": 1_024,
    "logprob_token_ids": 128,
    "stop": 16,
    "stop_sequences": 16,
    "stop_token_ids": 1_024,
    "tools": 1_024,
}
"""Maximum entries of lists and objects, by field. An engine may allow fewer."""

MAX_STOP_CHARACTERS: Final = 4_096
"""Maximum characters of all stop texts: a stream holds back as many."""

MAX_SCHEMA_CHARACTERS: Final = 65_536
"""Maximum characters of an output constraint as JSON: schemas, choices, grammars."""

MAX_GRAMMAR_CHARACTERS: Final = 8_192
"""Maximum characters of a grammar in it."""

MAX_PATTERN_CHARACTERS: Final = 2_048
"""Maximum characters of all regular expressions in it. The worst patterns of this length, such as
``a?`` and then ``a`` hundreds of times, take xgrammar seconds of one core."""

_STOPS: Final = ("stop", "stop_sequences")
_CONSTRAINTS: Final = ("response_format", "structured_outputs", "text", "output_config")
_FORMATTED: Final = ("text", "output_config")
"""Of these, the ones with the constraint in their field `format`."""
_PATTERNS: Final = frozenset(("pattern", "regex", "whitespace_pattern"))
_TEXTS_OF_JSON: Final = ("json", "structural_tag")
"""Fields of `structured_outputs` that may be a string of JSON."""


def check_options(body: dict[str, Any]) -> None:
    """Refuse options that are too large. ``O(options)``.

    Raises:
        ApiError: 400; the message names the field and what is allowed.
    """
    for name, most in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise invalid(f"{name} must have at most {most} entries, got {len(value)}", name)
    for name in _STOPS:
        stop = body.get(name)
        if _characters([stop] if isinstance(stop, str) else stop) > MAX_STOP_CHARACTERS:
            raise invalid(f"{name} must have at most {MAX_STOP_CHARACTERS} characters in all", name)
    for name in _CONSTRAINTS:
        if isinstance(body.get(name), dict):
            _check_constraint(name, body[name])


def is_structured(body: dict[str, Any]) -> bool:
    """Whether the output must match a grammar that the body states. ``O(tools)``."""
    for name in _CONSTRAINTS:
        value = body.get(name)
        form = value.get("format") if name in _FORMATTED and isinstance(value, dict) else value
        if isinstance(form, dict) and form and form.get("type") != "text":
            return True
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("type", "required")
    if choice not in (None, "auto", "none"):
        return True
    tools = body.get("tools")
    return isinstance(tools, list) and any(map(_is_strict, tools))


def refuse_structured(body: dict[str, Any]) -> None:
    """Refuse structured output, for a client or router that does not allow it. ``O(tools)``.

    Raises:
        ApiError: 403.
    """
    if is_structured(body):
        raise ApiError(
            Reason.NOT_PERMITTED,
            "Structured output is disabled for this API key or for all keys: leave out "
            f"{', '.join(_CONSTRAINTS)}, strict tools and a tool_choice that demands a call.",
        )


def _is_strict(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, dict) and function.get("strict")))


def check_media(contents: list[Any], name: str) -> None:
    """Refuse media that an engine would have to fetch. ``O(contents)``.

    Args:
        contents: of messages. name: of the field that holds them.

    Raises:
        ApiError: 400.
    """
    for key, value in _entries(contents):
        if key == "source" and isinstance(value, dict):
            # Anthropic's: with another type than `url` it holds the medium.
            address = value.get("url") if value.get("type") == "url" else None
        elif key.endswith("_url"):
            address = value.get("url") if isinstance(value, dict) else value
        else:
            continue
        if isinstance(address, str) and address[:5].lower() != "data:":
            raise invalid(
                f"{key} must contain the medium itself, as a data: URL, got {shown(address)}: "
                "fetching media from URLs is disabled (router.fetch_media)",
                name,
            )


def _check_constraint(name: str, value: dict[str, Any]) -> None:
    if len(json.dumps(value)) > MAX_SCHEMA_CHARACTERS:
        raise invalid(f"{name} must have at most {MAX_SCHEMA_CHARACTERS} characters", name)
    patterns = grammars = 0
    for key, text in _entries([value, *map(_parsed, map(value.get, _TEXTS_OF_JSON))]):
        if isinstance(text, str):
            patterns += len(text) if key in _PATTERNS else 0
            grammars += len(text) if key == "grammar" else 0
    if patterns > MAX_PATTERN_CHARACTERS:
        raise invalid(
            f"{name} must have at most {MAX_PATTERN_CHARACTERS} characters of regular expressions, "
            f"got {patterns}",
            name,
        )
    if grammars > MAX_GRAMMAR_CHARACTERS:
        raise invalid(
            f"{name} must have at most {MAX_GRAMMAR_CHARACTERS} characters of grammars, "
            f"got {grammars}",
            name,
        )


def _entries(values: list[Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values of all objects in ``values``."""
    level = list(values)
    while level:
        value = level.pop()
        if isinstance(value, dict):
            yield from value.items()
            level.extend(value.values())
        elif isinstance(value, list):
            level.extend(value)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None  # which the engine refuses


def _characters(texts: Any) -> int:
    """Characters of all texts in a list; the engine refuses other values."""
    if not isinstance(texts, list):
        return 0
    return sum(len(text) for text in texts if isinstance(text, str))
