"""Streams that leave this replica for their client without passing through a router's process.

A router with ``direct_patience_s`` in its request gets the stream's address (``fetch`` of the head)
and, in place of the bytes, reports of sent chunks. Or a gateway sends its client's request here
once, with the ticket in a header, and gets the stream as the response."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from math import inf
from typing import Final, cast

from sluice.protocol.connection import notice_dead_host
from sluice.protocol.requests import (
    EVENT_STREAM,
    ClientLeftError,
    ClientStalledError,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
)
from sluice.protocol.streams import TICKET_HEADER

FETCH_S: Final = 10.0  # Timeout for the reader of a stream to connect, seconds

MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum head of a request, bytes. Envoy's default limit is 60 KiB."""

MAX_STRANGERS: Final = 1024
"""Max connections that have not shown a ticket yet; one more closes the oldest."""

STRANGER_S: Final = 5.0
_TICKET_NAME: Final = TICKET_HEADER.encode()

_BEGIN: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\nconnection: close\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END: Final = b"0\r\n\r\n"
_NO_STREAM: Final = (
    b'{"type":"error","error":{"message":"There is no such stream: requests come here by way of '
    b'Sluice\'s endpoint picker, once.","type":"invalid_request_error","param":null,'
    b'"code":"not_found"}}'
)
_REFUSAL: Final = (
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_NO_STREAM), _NO_STREAM)
)


def ticket_in(received: bytes | bytearray) -> str | None:
    """The ticket of the request that a reader has sent; ``None``: its head is incomplete; empty: no
    ticket, or two. Raises ValueError: the head is too long."""
    head, ended, _ = received.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
    if not ended:
        return None
    headers = [header.partition(b":") for header in head.split(b"\r\n")[1:]]
    tickets = [value.strip() for name, _, value in headers if name.lower() == _TICKET_NAME]
    return tickets[0].decode("latin-1") if len(tickets) == 1 else ""


async def sent_directly(
    items: AsyncIterator[ResponseItem],
    port: DirectPort,
    patience_s: float,
    on_left: Callable[[BaseException], None],
) -> AsyncIterator[ResponseItem]:
    """Send a stream to the client, and yield reports of the sent chunks in their place; a response
    that is no stream is unchanged. ``patience_s``: how long the client may read nothing. Raises
    ClientLeftError: the stream has no reader any more."""
    began_s = asyncio.get_running_loop().time()
    async with aclosing(items):  # type: ignore[type-var]
        head = await anext(items)
        if not isinstance(head, ResponseHead) or head.media_type != EVENT_STREAM:
            yield head
            async for item in items:
                yield item
            return
        await port.start()  # with the first stream: most replicas are never asked for one
        stream = port.open(patience_s)
        stream.on_left = lambda: on_left(ClientLeftError())
        sent: list[tuple[int, float, int]] = []
        reported_s = -inf
        try:
            async for item in items:
                now_s = asyncio.get_running_loop().time()
                if isinstance(item, ResponseChunk):
                    # What makes no bytes leaves with the next ones, but has left the engine.
                    offset_s = now_s - began_s if item.data else item.offset_s or now_s - began_s
                    sent.append((item.tokens, offset_s, item.reasoned))
                ended = isinstance(item, ResponseTail)
                if sent and (ended or now_s >= reported_s + 0.5):
                    if reported_s == -inf:
                        yield head._replace(fetch=stream.offer())
                    reported_s = now_s
                    yield _report(sent)
                    sent.clear()
                # Only after the reader has got the address: sending a long chunk waits for the
                # reader.
                if isinstance(item, ResponseChunk):
                    await stream.send(item)
                if ended:
                    if reported_s == -inf:
                        yield head  # there is nothing to fetch
                    else:
                        await stream.end()
                    yield item
        finally:
            stream.close()


def _report(sent: Sequence[tuple[int, float, int]]) -> ResponseSent:
    tokens, offsets_s, reasoned = zip(*sent, strict=True)
    ended = next((place for place, own in enumerate(reasoned) if own), None)
    count = 0 if ended is None else sum(tokens[:ended]) + reasoned[ended]
    return ResponseSent(tokens, offsets_s, count)


class DirectStream:
    """One stream: the replica's data to send, and the connection that reads it."""

    def __init__(self, port: DirectPort, name: str, patience_s: float) -> None:
        self._port = port
        self._name = name
        self._patience_s = patience_s
        self.secret = secrets.token_urlsafe(24)
        self._data: list[bytes] = []
        self._waiting_bytes = 0
        self._flushing = False
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._gone = asyncio.Event()
        self._ended = False
        self.left = False
        """Whether the reader left before the end, or never connected."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when that happens before :meth:`close`."""

    def offer(self) -> str:
        """``HOST:PORT TICKET``. From now on the stream can be fetched, within :data:`FETCH_S`."""
        self._port.offer(self._name, self)
        return f"{self._port.address} {self._name}.{self.secret}"

    async def send(self, chunk: ResponseChunk) -> None:
        """Send a chunk; waits while the reader is slow, or much is buffered without a reader.
        Raises ClientLeftError: no reader any more. Raises ClientStalledError: it reads nothing for
        too long."""
        self._data.append(chunk.data)
        self._waiting_bytes += len(chunk.data)
        if not self._flushing and self._transport is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        if self._waiting_bytes > 64 << 10:
            self._room.clear()
        if not self._room.is_set():
            await self._wait(self._room)
        if self.left:
            raise ClientLeftError

    async def end(self) -> None:
        """Wait until the reader has read the whole stream. Raises as ``send``."""
        if self._transport is not None and self._transport.is_closing():
            raise ClientLeftError
        self._ended = True
        self._flush()
        await self._wait(self._gone)
        if self.left:
            raise ClientLeftError

    def close(self) -> None:
        """Cut the stream if its reader has not read all of it. Idempotent."""
        self._port.forget(self._name)
        self.on_left = lambda: None
        if self._transport is not None and not self._gone.is_set():
            self._transport.abort()

    def begin(self, transport: asyncio.Transport) -> None:
        """The reader has connected."""
        self._transport = transport
        self._flush(_BEGIN)

    def pause(self, paused: bool) -> None:
        """Whether the reader can take no data now."""
        self._paused = paused
        if paused:
            self._room.clear()
        else:
            self._room.set()

    def reader_gone(self, error: Exception | None) -> None:
        """The connection has ended, or the reader never connected."""
        if not self._ended or error is not None:
            self.left = True
        self._gone.set()
        self._room.set()
        if self.left:
            self.on_left()

    async def _wait(self, event: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await event.wait()
        except TimeoutError:
            raise ClientStalledError from None

    def _flush(self, before: bytes = b"") -> None:
        """Send all buffered data in one write after ``before``, if there is a reader."""
        self._flushing = False
        if self._transport is None or self._transport.is_closing():
            return
        joined = b"".join(self._data)
        self._data.clear()
        self._waiting_bytes = 0
        chunk = b"%x\r\n%s\r\n" % (len(joined), joined) if joined else b""  # an empty one ends it
        self._transport.write(before + chunk + (_END if self._ended else b""))
        if not self._paused:  # the write may have paused the reader
            self._room.set()
        if self._ended:
            self._transport.close()


class _Reader(asyncio.Protocol):
    """A connection; it is unauthenticated until it shows a ticket."""

    def __init__(self, port: DirectPort) -> None:
        self._port = port
        self._received = bytearray()
        self._stream: DirectStream | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No type check: uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        notice_dead_host(transport.get_extra_info("socket"))
        self._port.stranger_came(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if self._stream is not None:
            return  # further input is ignored
        self._received += data[: MAX_HEAD_BYTES + 8]
        try:
            ticket = ticket_in(self._received)
        except ValueError:
            self.transport.abort()
            return
        if ticket is None:
            return
        self._stream = self._port.claim(ticket)
        if self._stream is None:
            self.transport.write(_REFUSAL)
            self.transport.close()
            return
        self._received.clear()
        self._port.stranger_went(self)
        self._stream.begin(self.transport)

    def pause_writing(self) -> None:
        if self._stream is not None:
            self._stream.pause(True)

    def resume_writing(self) -> None:
        if self._stream is not None:
            self._stream.pause(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._port.stranger_went(self)
        if self._stream is not None:
            self._stream.reader_gone(error)


class DirectPort:
    """Where clients' proxies fetch this replica's streams. Use it from one event loop."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.address = ""
        """``HOST:PORT``, once started."""
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._unclaimed: dict[str, DirectStream] = {}
        self._streams: dict[str, DirectStream] = {}
        self._strangers: dict[_Reader, asyncio.TimerHandle] = {}

    async def start(self) -> None:
        """Listen on a port of the host that the system chooses. Idempotent."""
        async with self._starting:
            if self._server is not None:
                return
            loop, host = asyncio.get_running_loop(), self._host
            self._server = await loop.create_server(lambda: _Reader(self), host, 0)
            port = self._server.sockets[0].getsockname()[1]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, and cut the open streams. Idempotent."""
        for stream in list(self._streams.values()):
            stream.close()
        if self._server is not None:
            self._server.close()

    def open(self, patience_s: float) -> DirectStream:
        """A new stream; its reader may read nothing for ``patience_s``."""
        name = secrets.token_urlsafe(9)
        stream = DirectStream(self, name, patience_s)
        self._streams[name] = stream
        return stream

    def offer(self, name: str, stream: DirectStream) -> None:
        """From now on this stream can be fetched, within :data:`FETCH_S`."""
        self._unclaimed[name] = stream
        asyncio.get_running_loop().call_later(FETCH_S, self._expire, name)

    def claim(self, ticket: str) -> DirectStream | None:
        """The stream that a ticket opens. A ticket is valid once."""
        name, _, secret = ticket.partition(".")
        stream = self._unclaimed.get(name)
        if stream is None or not hmac.compare_digest(stream.secret.encode(), secret.encode()):
            return None
        return self._unclaimed.pop(name)

    def forget(self, name: str) -> None:
        """A stream is over."""
        self._unclaimed.pop(name, None)
        self._streams.pop(name, None)

    def stranger_came(self, reader: _Reader) -> None:
        """A connection without a ticket; it has :data:`STRANGER_S` to show one."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        loop = asyncio.get_running_loop()
        self._strangers[reader] = loop.call_later(STRANGER_S, self._turn_away, reader)

    def stranger_went(self, reader: _Reader) -> None:
        """The connection has shown a ticket, or is gone."""
        timer = self._strangers.pop(reader, None)
        if timer is not None:
            timer.cancel()

    def _turn_away(self, reader: _Reader) -> None:
        self.stranger_went(reader)
        if reader.transport is not None:
            reader.transport.abort()

    def _expire(self, name: str) -> None:
        stream = self._unclaimed.pop(name, None)
        if stream is not None:
            stream.reader_gone(None)
