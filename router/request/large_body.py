"""A large JSON body, parsed in pieces.

The parser holds Python's global interpreter lock for the whole call, so a thread that parses
millions of short values in one call stops the event loop all the same. Honest clients send this
many values only in lists of numbers, such as token ids, which can be split at their commas. Any
other value with as many parts is read one by one, which takes some thirty times as long but does
not stop the loop.
"""

from __future__ import annotations

import json
import time
from itertools import count
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn

import msgspec

PIECE_BYTES: Final = 128 << 10
"""Maximum part of a list of numbers that is parsed at once, bytes: some 2 ms at worst."""

MANY_VALUES: Final = 500_000
"""Maximum values that are parsed at once, a string counted as five: some 10 ms."""

_TURN_VALUES: Final = 1_000
"""Values that are read one by one between two pauses."""

_TURN_S: Final = 1e-4
"""Pause between two pieces, seconds. By itself Python releases the lock only after 5 ms, and an
answer takes several turns of the event loop, each of which acquires the lock again."""

_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[Any]).decode


def parse_in_pieces(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. Call it in a thread: other threads run between the pieces.

    Raises:
        msgspec.DecodeError: it is not a JSON object, or a number is not finite.
        UnicodeDecodeError: it is not UTF-8.
        RecursionError: it is nested too deeply for the parser.
    """
    return {name: _value(bytes(value)) for name, value in _split(raw).items()}


def _value(text: bytes) -> Any:
    if len(text) <= PIECE_BYTES:
        return _decode(text)
    if not _is_list_of_numbers(text):
        # Lists, objects and keys are bounded elsewhere, and each other value has a comma.
        if text.count(b",") + 2 * text.count(b'"') < MANY_VALUES:
            return _decode(text)
        return _OneByOne().decode(text.decode())
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
    """Whether a valid JSON value is a list whose only commas separate its own elements."""
    return text[:1] == b"[" and b'"' not in text and text.find(b"[", 1) < 0 and b"{" not in text


class _OneByOne(json.JSONDecoder):
    """The parser of Python's standard library without its C parts, except that of strings: the lock
    can be released between any two values. Numbers are decoded by msgspec, as elsewhere."""

    def __init__(self) -> None:
        super().__init__(object_hook=self._object, parse_constant=_refused)
        self.parse_object, self.parse_array = JSONObject, JSONArray
        self.parse_string = self._string
        self.parse_int = self.parse_float = self._number
        self.scan_once = py_make_scanner(self)
        self._seen = count(1)

    def decode(self, text: str) -> Any:  # type: ignore[override]
        """The value in ``text``, which is valid JSON.

        Raises:
            msgspec.DecodeError: a number is not finite, or a surrogate is unpaired.
        """
        try:
            return super().decode(text)
        except UnicodeEncodeError as error:
            raise msgspec.DecodeError("a surrogate is unpaired") from error

    def _number(self, text: str) -> Any:
        self._take_turns()
        return _decode(text.encode())

    def _string(self, text: str, begin: int, strict: bool) -> tuple[str, int]:
        self._take_turns()
        value, end = scanstring(text, begin, strict)
        return _whole(value), end

    def _object(self, fields: dict[str, Any]) -> dict[str, Any]:
        for name in fields:
            _whole(name)
        return fields

    def _take_turns(self) -> None:
        if next(self._seen) % _TURN_VALUES == 0:
            time.sleep(_TURN_S)


def _whole(text: str) -> str:
    if not text.isascii():
        text.encode()
    return text


def _refused(name: str) -> NoReturn:
    raise msgspec.DecodeError(f"{name} is not a JSON number")
