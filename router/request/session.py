"""A request's session."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice, takewhile
from typing import Any

from sluice.protocol.requests import Endpoint, tool_key
from sluice.router import wire
from sluice.router.errors import invalid, shown

MAX_SESSION_CHARACTERS = 512
"""Longest name of a session in its header, and of a tool loop. The body's own bound holds for
:data:`~sluice.router.wire.SESSION_FIELDS`: they are hashed only."""


def session_of(body: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]], owner: str) -> int:
    """A 63-bit hash of the session's name, distinct per owner; 0 if none. The header goes before
    :data:`~sluice.router.wire.SESSION_FIELDS`. Raises ApiError: 400."""
    values = [value for name, value in headers if name == wire.SESSION_HEADER.encode()]
    if len(values) > 1:
        raise invalid(f"{wire.SESSION_HEADER} must be given once", wire.SESSION_HEADER)
    given = {wire.SESSION_HEADER: values[0].decode("latin-1")} if values else {}
    given |= {field: body[field] for field in wire.SESSION_FIELDS if body.get(field) is not None}
    for field, value in given.items():
        if not isinstance(value, str):
            raise invalid(f"{field} must be a string, got {shown(value)}", field)
        if field == wire.SESSION_HEADER and len(value) > MAX_SESSION_CHARACTERS:
            raise invalid(
                f"{field} must have at most {MAX_SESSION_CHARACTERS} characters, got {len(value)}",
                field,
            )
    name = next((value for value in given.values() if value), None)
    return 0 if name is None else hash_of(f"{owner}\n{name}", b"sluice-session") or 1


def tool_of(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """The key of the tools whose results end a validated conversation; 0: none do.
    ``O(messages of the last turn)``."""
    if endpoint == "responses":
        items = body["input"]
        if not isinstance(items, list):
            return 0
        ids = [item.get("call_id") for item in takewhile(_is_output, reversed(items))]
        if not ids:
            return 0
        before = islice(reversed(items), len(ids), None)
        calls = takewhile(lambda item: not _is_output(item), before)
        return tool_key(_name(item) for item in calls if item.get("call_id") in ids)
    messages = reversed(body.get("messages") or ())
    if not _brings_results(next(messages, {})):
        return 0
    last = next((each for each in messages if each.get("role") == "assistant"), {})
    called = _dicts(last.get("tool_calls")) or [
        part for part in _dicts(last.get("content")) if part.get("type") == "tool_use"
    ]
    return tool_key(map(_name, called))


def _is_output(item: Mapping[str, Any]) -> bool:
    return str(item.get("type")).endswith("_call_output")


def _brings_results(message: Mapping[str, Any]) -> bool:
    """OpenAI's role for a result, or a part of a message of Anthropic's."""
    return message.get("role") == "tool" or any(
        part.get("type") == "tool_result" for part in _dicts(message.get("content"))
    )


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _name(call: Mapping[str, Any]) -> str:
    """The tool of a call in any API; built-in tools have no name but that of the call's type."""
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    return str(named.get("name") or call.get("type"))


def hash_of(name: str, kind: bytes) -> int:
    """A 63-bit hash of a name, distinct per ``kind``."""
    digest = hashlib.blake2b(
        name.encode(errors="surrogatepass"), digest_size=8, person=kind
    ).digest()
    return int.from_bytes(digest, "big") >> 1
