"""A closed loop of concurrent HTTP requests, each sent when the one before it has ended.

It shares its cores with the systems under test, so it does little: it searches for the first token
while a stream runs, and counts the tokens when the stream has ended.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from sluice.benchmarks.live.client import LoadError
from sluice.benchmarks.live.gateway.engine import MODEL

ANSWER_LIMIT_S = 120.0
"""Timeout of an answer, seconds."""

_FIRST_TOKEN = re.compile(rb'"content": ?"[^"]')
"""Content that is not empty: a stream may open with an empty piece before any token."""
_CONTENT = re.compile(rb'"content": ?"([^"\\]*)"')
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_SHOWN = 300
_STATED = {"ignore_eos": True, "stream_options": {"include_usage": True}}
"""For engines whose tokens are not words: generate all tokens, and report usage."""


class Load(NamedTuple):
    """The TTFT of each request, the time from the first request's start to the last one's end, and
    the client's own processor time, all in seconds."""

    ttfts_s: list[float]
    elapsed_s: float
    cpu_s: float


async def load(
    urls: Sequence[str], at_once: int, tokens: int, seconds: float, stopped: Callable[[], bool]
) -> Load:
    """Keep ``at_once`` streams of ``tokens`` tokens running; no request is sent after ``seconds``,
    or once ``stopped`` returns true. Connections take the servers' root ``urls`` in turn.

    Raises:
        LoadError: a request was not answered with all of its tokens.
    """
    connections = [_Connection(urls[number % len(urls)], tokens) for number in range(at_once)]
    for connection in connections:
        await connection.connect()
    ttfts_s: list[float] = []
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()

    async def ask(connection: _Connection) -> None:
        while True:
            ttfts_s.append(await connection.ask())
            if time.perf_counter() - begun_s >= seconds or stopped():
                return

    try:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(ask(connection))
        elapsed_s = time.perf_counter() - begun_s
        cpu_s = time.process_time() - begun_cpu_s
    except* LoadError as errors:
        raise errors.exceptions[0] from None
    finally:
        for connection in connections:
            connection.close()
    return Load(ttfts_s, elapsed_s, cpu_s)


class _Connection(asyncio.Protocol):
    """One connection that is kept open, with one request at a time."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        parts, body = urlsplit(url), chat_body(tokens)
        self._address = str(parts.hostname), parts.port or 80
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._transport: asyncio.WriteTransport | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._sent_s = 0.0
        self._ttft_s: float | None = None
        self._answered: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        """Connect to the server."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, *self._address)
        except OSError as error:
            raise LoadError(f"{self._url}: {error}") from None

    async def ask(self) -> float:
        """Send the request and read its answer; seconds to its first token.

        Raises:
            LoadError: the answer lacks tokens (by its usage, else by its words), is an error, or
                did not end.
        """
        if self._transport is None:  # the server closes after each answer
            await self.connect()
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._ttft_s = None
        self._answered = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)
        try:
            # Not wait_for, which drops a cancellation that comes with the answer.
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await self._answered
        except TimeoutError:
            raise LoadError(f"{self._url}: no end after {ANSWER_LIMIT_S:g} s") from None
        body = bytes(self._body)
        stated = _USAGE.findall(body)
        got = int(stated[-1]) if stated else len(b"".join(_CONTENT.findall(body)).split())
        if self._ttft_s is None or got != self._tokens or b"[DONE]" not in body:
            raise LoadError(
                f"{self._url}: status {self._parser.get_status_code()}, {got} of "
                f"{self._tokens} tokens: {body[-_SHOWN:].decode(errors='replace')}"
            )
        return self._ttft_s

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the connection."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse a part of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the running request, if there is one."""
        self._transport = None
        self._fail(f"connection lost: {exc or 'closed by the server'}")

    def _fail(self, why: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(LoadError(f"{self._url}: {why}"))

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, and look for the first token."""
        self._body += body
        if self._ttft_s is None and _FIRST_TOKEN.search(self._body):
            self._ttft_s = time.perf_counter() - self._sent_s

    def on_message_complete(self) -> None:
        """The answer has ended."""
        if not self._parser.should_keep_alive():
            self.close()
            self._transport = None
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


def chat_body(tokens: int) -> bytes:
    """A streamed chat completion of ``tokens`` tokens."""
    message = {"role": "user", "content": "What does a sluice do? " * 8}
    asked = {"model": MODEL, "messages": [message], "max_tokens": tokens, "stream": True}
    return json.dumps(asked | _STATED).encode()
