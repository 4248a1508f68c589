"""Sends hostile requests to a running server and notes the responses.

A response is wrong if it is a 5xx (except a 503 with Retry-After) or if the connection hangs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tests.attack.hostile import Raw, Target

PATIENCE_S = 0.3
"""Silence of the server after which the client half-closes its connection, seconds: many of the
requests announce more bytes than they have."""

HANG_S = 100.0
"""Further silence after which a connection counts as hung, seconds. A router waits 30 s for the
rest of a body."""

MAX_ANSWER = 8 << 20

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Response(NamedTuple):
    """Status and head of one response; status 0: not HTTP."""

    status: int
    head: bytes

    @property
    def failed(self) -> bool:
        """An overloaded router sends a 503 with Retry-After, which is no failure."""
        turned_away = self.status == 503 and b"\r\nretry-after:" in self.head.lower()
        return self.status == 0 or (self.status >= 500 and not turned_away)


class Answer(NamedTuple):
    """The bytes that came back on a connection; ``hung``: the server neither sent nor closed."""

    raw: bytes
    hung: bool

    @property
    def statuses(self) -> list[int]:
        """Of every response, in order; 0 for bytes that are not HTTP."""
        return [response.status for response in responses(self.raw)]


class Found(NamedTuple):
    """By kind, how many were sent and the statuses of all responses; and what was wrong."""

    sent: Counter[str]
    statuses: defaultdict[str, Counter[int]]
    bad: list[tuple[Raw, Answer]]


async def attack(port: int, given: Iterable[Raw], at_once: int = 16) -> Found:
    """Send every one of ``given`` on a connection of its own, ``at_once`` at a time."""
    found = Found(Counter(), defaultdict(Counter), [])
    waiting = iter(given)

    async def work() -> None:
        for raw in waiting:
            answer = await send(port, raw)
            found.sent[raw.kind] += 1
            found.statuses[raw.kind].update(answer.statuses)
            if answer.hung or any(response.failed for response in responses(answer.raw)):
                found.bad.append((raw, answer))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return found


async def send(port: int, raw: Raw) -> Answer:
    """The server's answer to ``raw`` until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()
    hung = False
    try:
        for part in raw.parts:
            writer.write(part)
            async with asyncio.timeout(HANG_S):
                await writer.drain()
        if raw.cut:
            writer.write_eof()
        said_end = raw.cut or raw.whole
        while len(got) < MAX_ANSWER:
            try:
                async with asyncio.timeout(HANG_S if said_end else PATIENCE_S):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                if said_end:
                    raise
                said_end = True
                writer.write_eof()
                continue
            if not data:
                break
            got += data
    except TimeoutError:
        hung = True
    except OSError:
        pass  # a server may close the connection instead of reading a request
    finally:
        writer.transport.abort()
    return Answer(bytes(got), hung)


def responses(raw: bytes) -> list[Response]:
    """Every response in ``raw``; one of status 0 ends the list where the bytes are not HTTP."""
    found: list[Response] = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        match = _STATUS.match(head)
        if match is None:
            return [*found, Response(0, head)]
        status = int(match[1])
        found.append(Response(status, head))
        length = _LENGTH.search(head)
        if status < 200 or status in (204, 304):
            raw = rest
        elif length is not None:
            # A response to HEAD has a length and no body, and is the last on its connection.
            raw = rest[int(length[1]) :]
        elif b"chunked" in head.lower():
            raw = _after_chunks(rest)
        else:
            return found
    return found


def _after_chunks(raw: bytes) -> bytes:
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:
            return b""
        raw = raw[length + 2 :]
        if not length:
            return raw
    return raw


def good_request(target: Target) -> Raw:
    """A valid request, which must be served."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    text = json.dumps(body).encode()
    lines = (
        *(b"POST /v1/chat/completions HTTP/1.1", b"host: sluice", b"connection: close"),
        *(*target.headers, b"content-length: %d" % len(text), b"", text),
    )
    return Raw("good", (b"\r\n".join(lines),), whole=True)
