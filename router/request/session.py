"""The session of a request, so that a routing policy can keep a session's requests together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.router import wire
from sluice.router.errors import invalid, shown

MAX_SESSION_CHARACTERS = 512
"""Longest name of a session in its header, and of a tool loop. The body's own bound holds for
:data:`~sluice.router.wire.SESSION_FIELDS`: they are hashed only."""

_HEADER = wire.SESSION_HEADER.encode()


def session_of(body: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]], owner: str) -> int:
    """A 63-bit hash of the session's name; 0 if none is given.

    The name is the header's, else that of the first of :data:`~sluice.router.wire.SESSION_FIELDS`
    in the body. Sessions of different owners are distinct, even with the same name.

    Raises:
        ApiError: 400; a name is not a string, or the header is too long or given twice.
    """
    values = [value for name, value in headers if name == _HEADER]
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
    if name is None:
        return 0
    text = f"{owner}\n{name}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"sluice-session").digest()
    return int.from_bytes(digest, "big") >> 1 or 1
