"""Reading a request body: bounded in bytes, time, depth and parts, and strictly JSON."""

from __future__ import annotations

import asyncio
import json
import time
from codecs import BOM_UTF8
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn

import msgspec
from prometheus_client import Gauge
from starlette.requests import Request

from sluice.protocol.requests import RequestBody
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.tenancy.limits import ANYONE, Client

# A large JSON body, parsed in pieces.
#
# The parser holds Python's global interpreter lock for the whole call, so a thread that parses
# millions of short values in one call stops the event loop all the same. Honest clients send this
# many values only in lists of numbers, such as token ids, which can be split at their commas. Any
# other value with as many parts is read one by one, which takes some thirty times as long but does
# not stop the loop.

PIECE_BYTES: Final = 128 << 10
"""Maximum part of a list of numbers that is parsed at once, bytes: some 2 ms at worst."""

MANY_VALUES: Final = 500_000
"""Maximum values that are parsed at once, a string counted as five: some 10 ms."""

_TURN_VALUES: Final = 1_000  # values that are read one by one between two pauses

_TURN_S: Final = 1e-4
"""Pause between two pieces, seconds. By itself Python releases the lock only after 5 ms, and an
answer takes several turns of the event loop, each of which acquires the lock again."""

_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[Any]).decode


def parse_in_pieces(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; in a thread, other threads run between the pieces. Raises
    msgspec.DecodeError: it is no object, or a number is not finite. Raises UnicodeDecodeError: it
    is not UTF-8. Raises RecursionError: it is nested too deeply."""
    return {name: _value(bytes(value)) for name, value in _split(raw).items()}


def _value(text: bytes) -> Any:
    if len(text) <= PIECE_BYTES:
        return _decode(text)
    # A list whose only commas separate its own elements?
    numbers = text[:1] == b"[" and b'"' not in text and text.find(b"[", 1) < 0 and b"{" not in text
    if not numbers:
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


class _OneByOne(json.JSONDecoder):
    """The standard library's parser in Python, so that the lock can be released between values."""

    def __init__(self) -> None:
        super().__init__(object_hook=self._object, parse_constant=_refused)
        self.parse_object, self.parse_array = JSONObject, JSONArray
        self.parse_string = self._string
        self.parse_int = self.parse_float = self._number
        self.scan_once = py_make_scanner(self)
        self._seen = count(1)

    def decode(self, text: str) -> Any:  # type: ignore[override]
        """The value in valid JSON. Raises msgspec.DecodeError: not finite, or a half surrogate."""
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


MAX_DEPTH = 64  # maximum nesting depth of a body

MAX_PARTS = 100_000
"""Maximum number of lists, objects and object keys in a body. They cost far more time and memory
than their bytes; plain values, such as token ids, are not counted."""

BODY_TIMEOUT_S = 30.0  # longest time that a client may take to send its body, seconds


@dataclass(slots=True)
class BodyBudget:
    """Limits the bytes of bodies in memory. A client may hold as many as remain free, times its
    weight above 1: half of all if alone, a third beside another such one."""

    max_bytes: int
    gauge: Gauge
    of_client: Counter[str] = field(default_factory=Counter)
    held: int = 0


@dataclass(slots=True)
class HeldBytes:
    """The bytes of one body of ``client``, released at the end of the block."""

    budget: BodyBudget
    client: Client
    size: int = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        budget, owner = self.budget, self.client.owner
        budget.held -= self.size
        budget.gauge.dec(self.size)
        budget.of_client[owner] -= self.size
        if not budget.of_client[owner]:
            del budget.of_client[owner]

    def add(self, size: int) -> None:
        """Count received bytes. Raises ApiError: 503, the budget; 429, the client's part."""
        budget, client = self.budget, self.client
        left = budget.max_bytes - budget.held - size
        if left < 0:
            raise ApiError(
                Reason.ROUTER_FULL,
                f"The router's memory for request bodies, {budget.max_bytes} bytes, is full.",
            )
        # Otherwise one client with large bodies blocks all others.
        own = budget.of_client[client.owner]
        part = max(1.0, 1.0 / client.caps.weight)  # a low weight must not forbid long bodies
        if not client.may_hold(own + size - 1, left, part):
            raise ApiError(
                Reason.CLIENT_FULL,
                f"This API key has request bodies of {own} bytes in the router, and {size} bytes "
                f"more would leave too few of its {budget.max_bytes} bytes for other keys.",
            )
        self.size += size
        budget.held += size
        budget.of_client[client.owner] += size
        budget.gauge.inc(size)


async def read_body(request: Request, max_bytes: int, held: HeldBytes | None = None) -> bytes:
    """The request's JSON body, at most ``max_bytes``, counted in ``held`` as it arrives. Raises
    ApiError: 400, 413, 415; 503 or 429, the budget is exhausted. Raises ClientDisconnect: the
    client left."""
    _check_headers(request, max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if not chunk:  # as the last one is
                    continue
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if held is not None:
                    held.add(len(chunk))
                chunks.append(chunk)
        return b"".join(chunks)
    except TimeoutError:
        raise ApiError(
            Reason.BODY_TOO_SLOW,
            f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} seconds.",
        ) from None


def parse_object(raw: bytes) -> RequestBody:
    """The JSON object in ``raw``. ``O(len(raw))``. Raises ApiError: 400, also beyond
    :data:`MAX_DEPTH` or :data:`MAX_PARTS` and for half surrogate pairs, which no tokenizer accepts.
    """
    raw = raw.removeprefix(BOM_UTF8)
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets + raw.count(b":") > MAX_PARTS:
        _check_parts(raw)
    try:
        if len(raw) <= PIECE_BYTES:
            body = RequestBody.parse(raw)
        else:
            body = RequestBody(parse_in_pieces(raw), raw)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise _bad_json("it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise _bad_json(str(error)) from None
    # Few brackets cannot nest deeply, so most bodies need no walk.
    if brackets > MAX_DEPTH:
        _check_depth(body)
    return body


def check_plain(request: Request) -> None:
    """Refuse a compressed body. Raises ApiError: 415."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(
            Reason.UNSUPPORTED_MEDIA,
            "content-encoding is not supported: send the body uncompressed.",
            "content-encoding",
        )


def announces_more(request: Request, max_bytes: int) -> bool:
    """Whether ``Content-Length`` is over ``max_bytes``."""
    length = request.headers.get("content-length", "")
    # Twenty digits are more than any limit; converting millions of them would cost.
    return length.isdecimal() and (len(length) > 20 or int(length) > max_bytes)


def _check_headers(request: Request, max_bytes: int) -> None:
    # A page of another site may send a body without a type. Where a key is needed, it has none.
    is_open = request.state.arrival.client is ANYONE
    media_type = request.headers.get("content-type", "" if is_open else "application/json")
    if media_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            Reason.UNSUPPORTED_MEDIA,
            f"content-type must be application/json, got {shown(media_type)}.",
            "content-type",
        )
    if "content-encoding" in request.headers:
        check_plain(request)
    if announces_more(request, max_bytes):
        raise _too_large(max_bytes)


def _check_parts(raw: bytes) -> None:
    """Count the brackets and colons again, outside of strings: a long text may have many."""
    strings_and_rest = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    rest = b"".join(strings_and_rest[::2])
    if rest.count(b"[") + rest.count(b"{") + rest.count(b":") > MAX_PARTS:
        raise invalid(
            "The request body has too many lists, objects and keys; allowed: "
            f"{MAX_PARTS} of them together."
        )


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _bad_json(why: str) -> ApiError:
    return ApiError(Reason.INVALID_JSON, f"The request body is not a JSON object: {why}.")


def _too_deep() -> ApiError:
    return invalid(f"The request body is nested too deeply; allowed: {MAX_DEPTH} levels.")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(Reason.TOO_LARGE, f"The request body is too large; allowed: {max_bytes} bytes.")
