"""OpenAI's ``service_tier`` in answers: if a request names a tier, its answer says which served it.

Only chats and responses have the field. It is inserted into the bytes, because the router does not
parse answers. Within a JSON string, quotes and line breaks are escaped, so the patterns never match
inside one.
"""

from __future__ import annotations

import json
import re
from typing import Final

from sluice.protocol.requests import Endpoint

_EMPTY: Final = b'"service_tier":null'
_PRESET: Final = b'"service_tier":"auto"'
"""What vLLM writes: in a chat's answer, and in each object of a response."""

_CHUNK: Final = re.compile(rb'^data: \{(?="id")', re.MULTILINE)
"""Where a chunk of a chat begins; vLLM's have no such field."""


def with_tier(data: bytes, endpoint: Endpoint, tier: str | None, streams: bool) -> bytes:
    """Whole events of an answer, or a whole answer, with the tier in it. ``O(bytes)``.

    Args:
        tier: a configured tier; ``None``: the request names none.
    """
    if tier is None or not data:
        return data
    field = b'"service_tier":' + json.dumps(tier).encode()
    if endpoint == "responses":
        return data.replace(_PRESET, field)
    if endpoint != "chat":
        return data
    if streams:
        return _CHUNK.sub(lambda found: found[0] + field + b",", data)
    if _EMPTY in data:
        return data.replace(_EMPTY, field, 1)
    return data.replace(b"{", b"{" + field + b",", 1)
