"""A large JSON body, parsed in pieces.

The parser keeps Python's global lock for as long as a call takes, so a thread that parses millions
of short values in one call stops the event loop all the same. The only fields that a client may
fill with so many are lists of numbers, such as token ids, and those can be cut at their commas.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

PIECE_BYTES: Final = 128 << 10
"""Longest part of a list of numbers that is parsed at once, bytes: some 2 ms at worst."""

_TURN_S: Final = 1e-4
"""Pause between two pieces, seconds. By itself Python passes the lock on after 5 ms only, and an
answer takes several turns of the event loop, each with the lock taken anew."""

_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[Any]).decode


def parse_in_pieces(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. For a thread: other threads get their turn between the pieces.

    A field with millions of values that is no plain list of numbers is still one piece.

    Raises:
        msgspec.DecodeError: it is no JSON object, or a number is not finite.
        UnicodeDecodeError: it is not UTF-8.
        RecursionError: it is nested too deeply for the parser.
    """
    return {name: _value(bytes(value)) for name, value in _split(raw).items()}


def _value(text: bytes) -> Any:
    if len(text) <= PIECE_BYTES or not _is_list_of_numbers(text):
        return _decode(text)
    values: list[Any] = []
    begin, end = 1, len(text) - 1
    while begin < end:
        cut = text.find(b",", begin + PIECE_BYTES, end)
        if cut < 0:
            cut = end
        values += _decode_list(b"[%b]" % text[begin:cut])
        begin = cut + 1
        time.sleep(_TURN_S)
    return values


def _is_list_of_numbers(text: bytes) -> bool:
    """Whether a value that was found sound as a whole has no comma but between its own elements."""
    return text[:1] == b"[" and b'"' not in text and text.find(b"[", 1) < 0 and b"{" not in text
