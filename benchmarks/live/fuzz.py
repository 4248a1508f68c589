"""Sends hostile requests to a running router and reports the responses.

Run with ``python -m sluice.benchmarks.live.fuzz --url http://127.0.0.1:8000 --requests 10000``. It
fails if the server answers any of them with a 5xx (except a 503 with Retry-After), lets a
connection hang, or does not serve a valid request afterwards. The same seed sends the same bytes;
:mod:`sluice.benchmarks.live.fuzz_requests` has the kinds.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import click
import psutil
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.live.fuzz_requests import Raw, Target, requests

PATIENCE_S = 0.3
"""Silence of the server after which the client half-closes its connection, seconds: many of the
requests announce more bytes than they have."""

HANG_S = 100.0
"""Further silence after which a connection counts as hung, seconds. A router waits 30 s for the
rest of a body and the proxy in front of it 60 s, and the proxy does not forward the client's
half-close to the router."""

MAX_ANSWER = 8 << 20
_MAX_SHOWN = 5

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_HTTP2 = re.compile(rb"\x00\x00.\x04", re.DOTALL)
"""Start of a proxy's answer to an HTTP/2 client."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Response(NamedTuple):
    """Status and head of one response."""

    status: int
    head: bytes

    @property
    def failed(self) -> bool:
        """Whether this response is a failure. A 503 with Retry-After is none: an overloaded router
        sends it."""
        turned_away = self.status == 503 and b"\r\nretry-after:" in self.head.lower()
        return self.status == 0 or (self.status >= 500 and not turned_away)


class Answer(NamedTuple):
    """The bytes that came back on a connection.

    Attributes:
        raw: all bytes.
        hung: the server neither sent more nor closed.
        took_s: until the end, without the client's waits for a silent server.
    """

    raw: bytes
    hung: bool
    took_s: float

    @property
    def statuses(self) -> list[int]:
        """Of every response, in order; 0 for bytes that are not HTTP."""
        return [response.status for response in responses(self.raw)]


@dataclass
class Kind:
    """Results of the requests of one kind."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    hung: int = 0
    slowest_s: float = 0.0


class Found(NamedTuple):
    """Results by kind, and the first requests with a wrong response."""

    kinds: dict[str, Kind]
    bad: list[tuple[Raw, Answer]]


async def attack(host: str, port: int, given: Iterable[Raw], at_once: int = 16) -> Found:
    """Send every one of ``given`` on a connection of its own, ``at_once`` at a time."""
    found = Found({}, [])
    waiting = iter(given)

    async def work() -> None:
        for raw in waiting:
            _note(found, raw, await send(host, port, raw))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return found


async def send(host: str, port: int, raw: Raw) -> Answer:
    """The server's answer to ``raw`` until it closes."""
    reader, writer = await asyncio.open_connection(host, port)
    started_s = time.monotonic()
    idle_s = 0.0
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
                    hung = True
                    break
                idle_s += PATIENCE_S
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
        took_s = time.monotonic() - started_s - idle_s
        writer.transport.abort()
    return Answer(bytes(got), hung, took_s)


def responses(raw: bytes) -> list[Response]:
    """Every response in ``raw``; one of status 0 ends the list where the bytes are not HTTP."""
    found: list[Response] = []
    if _HTTP2.match(raw):
        return found
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


def _note(found: Found, raw: Raw, answer: Answer) -> None:
    kind = found.kinds.setdefault(raw.kind, Kind())
    told = responses(answer.raw)
    kind.sent += 1
    kind.statuses.update(response.status for response in told)
    kind.unanswered += not told
    kind.hung += answer.hung
    kind.slowest_s = max(kind.slowest_s, answer.took_s)
    failed = answer.hung or any(response.failed for response in told)
    if failed and len(found.bad) < _MAX_SHOWN:
        found.bad.append((raw, answer))


def good_request(target: Target) -> Raw:
    """A valid request, which must be served."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    text = json.dumps(body).encode()
    lines = (
        *(b"POST /v1/chat/completions HTTP/1.1", b"host: sluice", b"connection: close"),
        *(*target.headers, b"content-length: %d" % len(text), b"", text),
    )
    return Raw("good", (b"\r\n".join(lines),), whole=True)


async def _first_model(host: str, port: int, headers: tuple[bytes, ...]) -> str:
    lines = (b"GET /v1/models HTTP/1.1", b"host: sluice", b"connection: close", *headers, b"", b"")
    answer = await send(host, port, Raw("models", (b"\r\n".join(lines),), whole=True))
    if answer.statuses != [200]:
        raise click.ClickException(f"GET /v1/models was answered with {answer.statuses}, not 200")
    body = answer.raw.partition(b"\r\n\r\n")[2]
    start, end = body.find(b"{"), body.rfind(b"}")
    model: str = json.loads(body[start : end + 1])["data"][0]["id"]
    return model


def _resident_bytes(pids: Iterable[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def _table(found: Found) -> Table:
    table = Table("kind", "sent", "2xx", "3xx", "4xx", "5xx", "no answer", "hung", "slowest, ms")
    for name, kind in found.kinds.items():
        counts = Counter[int]()
        for status, number in kind.statuses.items():
            counts[status // 100] += number
        cells = (kind.sent, *(counts[n] for n in (2, 3, 4, 5)), kind.unanswered, kind.hung)
        table.add_row(name, *map(str, cells), f"{kind.slowest_s * 1000:.0f}")
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, help="Of the router or the proxy in front, plain HTTP.")
@click.option("--key", help="An API key; by default none is sent.")
@click.option("--requests", "count", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--at-once", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option("--pid", "pids", type=int, multiple=True, help="A process whose memory is shown.")
def main(url: str, key: str | None, count: int, seed: int, at_once: int, pids: tuple[int]) -> None:
    """Send hostile requests to a running router.

    \b
    Example:
      python -m sluice.benchmarks.live.fuzz --url http://127.0.0.1:8000 --requests 1000
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise click.BadParameter(f"must be like http://127.0.0.1:8000, got {url}", param_hint="url")
    host, port = parts.hostname, parts.port or 80
    headers = (b"authorization: Bearer " + key.encode(),) if key else ()
    target = Target(asyncio.run(_first_model(host, port, headers)), headers)
    # The first ones fill caches, which are bounded.
    asyncio.run(attack(host, port, requests(target, min(count, 1_000), seed + 1), at_once))
    before = _resident_bytes(pids)
    found = asyncio.run(attack(host, port, requests(target, count, seed), at_once))
    after = _resident_bytes(pids)
    last = asyncio.run(send(host, port, good_request(target)))
    console = Console()
    console.print(_table(found))
    if pids:
        console.print(f"memory: {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after")
    console.print(f"a good request afterwards: {last.statuses}")
    for raw, answer in found.bad:
        console.print(f"{raw.kind}: {b''.join(raw.parts)[:300]!r}\n  -> {answer.raw[:300]!r}")
    sys.exit(bool(found.bad) or last.statuses != [200])


if __name__ == "__main__":
    main()
