"""A request's session."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

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


def hash_of(name: str, kind: bytes) -> int:
    """A 63-bit hash of a name, distinct per ``kind``."""
    digest = hashlib.blake2b(
        name.encode(errors="surrogatepass"), digest_size=8, person=kind
    ).digest()
    return int.from_bytes(digest, "big") >> 1
