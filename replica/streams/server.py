"""Receives requests from routers over plain TCP, and sends them the responses.

All ready data for one router leaves in one write per turn of the event loop. Requests need the
token, which the replica gives away through Serve only. Messages: :mod:`sluice.protocol.streams`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from sluice.protocol.connection import Guest, Listener
from sluice.protocol.requests import (
    ClientLeftError,
    ClientStalledError,
    EngineDeadError,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
    ResponseTaken,
)
from sluice.protocol.streams import (
    BATCH_BYTES,
    FORMAT,
    GOODBYE,
    MAX_ASKED_BYTES,
    MAX_CHUNK_BYTES,
    WINDOW_BYTES,
    Asked,
    Cancel,
    Delivery,
    Ending,
    Open,
    StreamEndpoint,
    cost,
)
from sluice.scheduling.fleet.ranks import rank_name

# The buffer between one response and its consumer.

MAX_BUFFERED_ITEMS = 256  # Max buffered items of one response; beyond it, the engine's stream waits

MAX_BATCH_BYTES = 1 << 20
"""A batch of items ends with the item that reaches this size; each batch is one message."""


class Response:
    """A response in progress, with a bounded buffer: ``put`` waits for free space.

    ``wake`` is called when there are items to take or at the end, never in the constructor.
    ``items``: all of a complete response. ``over``: no more items will be put."""

    __slots__ = ("_items", "_room", "_wake", "close", "error", "over")

    def __init__(self, wake: Callable[[], None], items: Iterable[ResponseItem] = ()) -> None:
        self._items = deque(items)
        self._wake = wake
        self._room: asyncio.Event | None = None
        self.over = bool(self._items)
        self.error: BaseException | None = None
        self.close: Callable[[], None] = lambda: None
        """The consumer calls this exactly once, in any case: it stops the work that is still in
        progress."""

    @property
    def ready(self) -> bool:
        """Whether there are items to take."""
        return bool(self._items)

    async def put(self, item: ResponseItem) -> None:
        """Add an item as soon as there is space."""
        while len(self._items) >= MAX_BUFFERED_ITEMS:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._wake()

    def offer(self, item: ResponseItem) -> bool:
        """Add an item now, if there is space."""
        if len(self._items) >= MAX_BUFFERED_ITEMS:
            return False
        self._items.append(item)
        self._wake()
        return True

    def end(self, error: BaseException | None) -> None:
        """No more items will be put. Only the first call counts."""
        if not self.over:
            self.over = True
            self.error = error
            self._wake()

    def take(self, limit: int = MAX_BATCH_BYTES) -> list[ResponseItem]:
        """The items that are ready, if any; adds no further item once there are ``limit`` bytes."""
        items, batch, size = self._items, [], 0
        while items and size < limit:
            item = items.popleft()
            if isinstance(item, ResponseChunk):
                size += len(item.data)
            batch.append(item)
        if self._room is not None:
            self._room.set()
        return batch


MAX_CONNECTIONS = 1024  # Max connections that have shown the token: each router has one


_decode = msgspec.msgpack.Decoder(Asked).decode
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)

Serve = Callable[[EngineRequest, Callable[[], None]], Response]
"""Begins to serve a request; see :meth:`sluice.replica.server.Replica.open`."""


class _Outgoing:
    """One response on its way to one router."""

    __slots__ = ("_ahead", "_connection", "_ended", "_taken", "number", "queued", "response")

    def __init__(self, connection: _Connection, number: int, taken: ResponseTaken | None) -> None:
        self._connection = connection
        self.number = number
        self._taken = taken
        self._ahead = 0
        self._ended = False
        self.queued = False
        self.response: Response

    def wake(self) -> None:
        """There may be data to send."""
        self._connection.wake(self)

    def consumed(self, size: int) -> None:
        """The router has read ``size`` bytes."""
        self._ahead -= size
        self.wake()

    def collect(self, deliveries: list[Delivery]) -> int:
        """Add the items that may be sent now. Returns their cost, bytes."""
        response = self.response
        delivery = Delivery(self.number, self._taken, None, [], None)
        self._taken = None
        for item in response.take(WINDOW_BYTES - self._ahead):
            if isinstance(item, ResponseChunk):
                delivery.chunks.append(item)
                if len(item.data) > MAX_CHUNK_BYTES:
                    return self.fail(Ending.TOO_LARGE, deliveries)
            elif isinstance(item, ResponseHead):
                delivery.head = item
            elif isinstance(item, ResponseSent):
                delivery.sent = joined(delivery.sent, item)
            elif isinstance(item, ResponseTail):
                delivery.tail = item
                self._ended = True
        size = cost(delivery.chunks)
        self._ahead += size
        if response.ready:
            if self._ahead < WINDOW_BYTES:
                self.wake()
        elif response.over:
            if not self._ended:
                delivery.ending = _ending_of(response.error)
            self._connection.finish(self.number)
        if (
            delivery.chunks
            or delivery.sent
            or delivery.head
            or delivery.tail
            or delivery.taken
            or delivery.ending
        ):
            deliveries.append(delivery)
        return size

    def fail(self, ending: Ending, deliveries: list[Delivery]) -> int:
        """Stop the response, and send the reason."""
        self._connection.finish(self.number)
        deliveries.append(Delivery(self.number, None, None, [], None, ending))
        return 0


def joined(first: ResponseSent | None, second: ResponseSent) -> ResponseSent:
    """Two reports as one."""
    if first is None:
        return second
    return ResponseSent(
        first.tokens + second.tokens,
        first.offsets_s + second.offsets_s,
        first.reasoned or (sum(first.tokens) + second.reasoned if second.reasoned else 0),
    )


_ENDINGS: dict[type[BaseException] | type[None], Ending] = {
    type(None): Ending.EARLY,
    EngineDeadError: Ending.ENGINE_DEAD,
    ClientStalledError: Ending.STALLED,
    ClientLeftError: Ending.LEFT,
    asyncio.CancelledError: Ending.CANCELLED,
}


def _ending_of(error: BaseException | None) -> Ending:
    known = next((own for kind, own in _ENDINGS.items() if isinstance(error, kind)), None)
    if known is None:
        _log.error("a response failed", exc_info=error)
    return known or Ending.FAILED


class _Connection(Guest):
    """The connection of one router."""

    def __init__(self, server: StreamServer) -> None:
        super().__init__(server, MAX_ASKED_BYTES)
        self._server = server
        self._streams: dict[int, _Outgoing] = {}
        self._ready: deque[_Outgoing] = deque()
        self._flushing = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(1 << 20)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for number in list(self._streams):
            self.finish(number)

    def pause_writing(self) -> None:
        """The router reads nothing now: do not read its requests meanwhile, either."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The router reads again."""
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._flush_soon()

    def frame_received(self, frame: bytes | bytearray) -> None:
        if not self.trusted:
            self.greet(frame)
            return
        try:
            self._handle(_decode(frame))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _log.warning("a router's message is malformed: %s", type(error).__name__)
            self.abort()

    def greet(self, frame: bytes | bytearray) -> None:
        super().greet(frame)
        if self.trusted and self._server.leaving:
            self.send(GOODBYE)

    def _handle(self, asked: Asked) -> None:
        outgoing = self._streams.get(asked.stream)
        if isinstance(asked, Open):
            if outgoing is not None:
                self.abort()
                return
            self._open(asked.stream, asked.asked())
        elif isinstance(asked, Cancel):
            self.finish(asked.stream)
        elif outgoing is not None:
            outgoing.consumed(asked.size)

    def _open(self, number: int, request: EngineRequest) -> None:
        name = rank_name(self._server.replica_id, request.rank)
        taken = ResponseTaken(name) if request.confirm else None
        outgoing = _Outgoing(self, number, taken)
        outgoing.response = self._server.serve(request, outgoing.wake)
        self._streams[number] = outgoing
        outgoing.wake()

    def finish(self, number: int) -> None:
        """Send nothing more of this response. Idempotent."""
        outgoing = self._streams.pop(number, None)
        if outgoing is not None:
            outgoing.response.close()
            del outgoing.response  # it refers to what it wakes

    def wake(self, outgoing: _Outgoing) -> None:
        """A response may have data ready. ``O(1)``."""
        if not outgoing.queued:
            outgoing.queued = True
            self._ready.append(outgoing)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while self._ready and not self._paused and not self.closed:
            deliveries: list[Delivery] = []
            size = 0
            while self._ready and size < BATCH_BYTES:
                outgoing = self._ready.popleft()
                outgoing.queued = False
                if self._streams.get(outgoing.number) is outgoing:
                    size += outgoing.collect(deliveries)
            if deliveries:
                self.send(self._encoded(deliveries))

    def _encoded(self, deliveries: list[Delivery]) -> bytes:
        """The frame of these deliveries; a response that cannot be encoded fails alone."""
        try:
            return _encode(deliveries)
        except Exception:
            _log.exception("a response cannot be sent")
        sound: list[Delivery] = []
        for delivery in deliveries:
            try:
                _encode(delivery)
                sound.append(delivery)
            except Exception:
                self.finish(delivery.stream)
                sound.append(Delivery(delivery.stream, None, None, [], None, Ending.FAILED))
        return _encode(sound)


class StreamServer(Listener):
    """The replica's side; on one event loop. ``leaving``: the replica is about to leave."""

    def __init__(self, replica_id: str, serve: Serve) -> None:
        super().__init__(MAX_CONNECTIONS)
        self.replica_id = replica_id
        self.serve = serve
        self.leaving = False
        self._empty = asyncio.Event()
        self._empty.set()

    def guest(self) -> Guest:
        """A connection of a router."""
        return _Connection(self)

    async def endpoint(self, host: str) -> StreamEndpoint:
        """Where it listens, from the first call on. Raises OSError: ``host`` is not this node's, or
        it was stopped."""
        port = await self.port(host)
        return StreamEndpoint(self.replica_id, host, port, self.token, FORMAT)

    def enter(self, connection: Guest) -> None:
        """A connection was made."""
        super().enter(connection)
        self._empty.clear()

    def leave(self, connection: Guest) -> None:
        """A connection ended."""
        super().leave(connection)
        if not self._strangers and not self._trusted:
            self._empty.set()

    def goodbye(self) -> None:
        """Tell routers to use other replicas; late requests are served, until ``stop``."""
        self.leaving = True
        for connection in self._trusted:
            connection.send(GOODBYE)

    async def stop(self) -> None:
        """Close all connections after all sent data has left. Idempotent."""
        self.close()
        for connection in (*self._strangers, *self._trusted):
            connection.close()
        try:
            async with asyncio.timeout(1.0):
                await self._empty.wait()
        except TimeoutError:
            for connection in (*self._strangers, *self._trusted):
                connection.abort()
