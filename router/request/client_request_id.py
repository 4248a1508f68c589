"""The client's own id of a request, recorded for lookups only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from sluice.router import wire

MAX_CHARACTERS: Final = 128
"""Maximum recorded characters of an id."""

_HEADER = wire.CLIENT_REQUEST_ID_HEADER.encode()
_UNPRINTABLE = re.compile(r"[^ -~]")


def noted(text: str) -> str:
    """An id as recorded in logs and decisions: its first :data:`MAX_CHARACTERS`, with ``?`` for
    each character that is not printable ASCII."""
    return _UNPRINTABLE.sub("?", text[:MAX_CHARACTERS])


def client_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in these raw headers (lower-case names), as recorded; empty if there is none. Of
    several the first counts, as for Serve."""
    for name, value in headers:
        if name == _HEADER:
            return noted(value[:MAX_CHARACTERS].decode("latin-1"))
    return ""
