"""Reading a request body: bounded in bytes, time, depth and parts, and strictly JSON."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from typing import Any

import msgspec
from prometheus_client import Gauge
from starlette.requests import Request

from sluice.replica.request_body import RequestBody
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.large_body import PIECE_BYTES, parse_in_pieces
from sluice.router.tenancy.limits import ANYONE, Client

MAX_DEPTH = 64
"""Maximum nesting depth of a body."""

MAX_PARTS = 100_000
"""Maximum number of lists, objects and object keys in a body. They cost far more time and memory
than their bytes; plain values, such as token ids, are not counted."""

BODY_TIMEOUT_S = 30.0
"""Longest time that a client may take to send its body, seconds."""


class BodyBudget:
    """Limits the bytes of request bodies in a router's memory. A client may hold as many as remain
    free, times its weight if that is above 1: half of all if it is alone, a third if another one
    holds as many, and so on.

    Args:
        gauge: shows the bytes held.
    """

    def __init__(self, max_bytes: int, gauge: Gauge) -> None:
        self._max_bytes = max_bytes
        self._gauge = gauge
        self._of_client: Counter[str] = Counter()
        self.held = 0

    def take(self, client: Client, size: int) -> None:
        """Count ``size`` more received bytes.

        Raises:
            ApiError: 503, the budget is exhausted; 429, the client's part of it is.
        """
        if self.held + size > self._max_bytes:
            raise ApiError(
                Reason.ROUTER_FULL,
                f"The router's memory for request bodies, {self._max_bytes} bytes, is full.",
            )
        # Otherwise one client with large bodies blocks all others.
        left = self._max_bytes - self.held - size
        own = self._of_client[client.owner]
        part = max(1.0, 1.0 / client.caps.weight)  # a low weight must not forbid long bodies
        if not client.may_hold(own + size - 1, left, part):
            raise ApiError(
                Reason.CLIENT_FULL,
                f"This API key has request bodies of {own} bytes in the router, and {size} bytes "
                f"more would leave too few of its {self._max_bytes} bytes for other keys.",
            )
        self._change(client, size)

    def give_back(self, client: Client, size: int) -> None:
        """Release ``size`` bytes."""
        self._change(client, -size)
        if not self._of_client[client.owner]:
            del self._of_client[client.owner]

    def _change(self, client: Client, size: int) -> None:
        self.held += size
        self._of_client[client.owner] += size
        self._gauge.inc(size)


class HeldBytes:
    """The bytes of one body of ``client``, released at the end of the block."""

    def __init__(self, budget: BodyBudget, client: Client) -> None:
        self._budget = budget
        self._client = client
        self._size = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self._client, self._size)

    def add(self, size: int) -> None:
        """Count ``size`` more received bytes.

        Raises:
            ApiError: 503 or 429, the budget is exhausted.
        """
        self._budget.take(self._client, size)
        self._size += size


async def read_body(request: Request, max_bytes: int, held: HeldBytes | None = None) -> bytes:
    """The request's body, counted in ``held`` as it arrives.

    Refused: more than ``max_bytes`` (counted while reading, so also without ``Content-Length``), a
    media type other than JSON, a content encoding, and a slow client.

    Raises:
        ApiError: 400, 413, 415, or 503 or 429 if the budget in ``held`` is exhausted.
        starlette.requests.ClientDisconnect: the client left.
    """
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, max_bytes, held)
    except TimeoutError:
        raise ApiError(
            Reason.BODY_TOO_SLOW,
            f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} seconds.",
        ) from None


def parse_object(raw: bytes) -> RequestBody:
    """The JSON object in ``raw``. ``O(len(raw))``.

    A byte order mark before it is skipped. Refused: more than :data:`MAX_DEPTH` levels or
    :data:`MAX_PARTS` parts, text that is not UTF-8, ``NaN`` and infinities, and half surrogate
    pairs, which no tokenizer accepts.

    Raises:
        ApiError: 400.
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
    """Refuse a compressed body.

    Raises:
        ApiError: 415.
    """
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
    check_plain(request)
    if announces_more(request, max_bytes):
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int, held: HeldBytes | None) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if held is not None:
            held.add(len(chunk))
        if chunk:  # the last one is empty; joining it would copy a body that came in one chunk
            chunks.append(chunk)
    return b"".join(chunks)


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
