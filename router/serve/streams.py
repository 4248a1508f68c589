"""Calls to replicas over plain TCP connections, which cost a fraction of Serve's own way.

Where a replica listens, and the token that opens it, a router asks the replica itself over Serve's
handle, when it first sends it a request. So nobody else learns it, there is nothing to keep up to
date, and a replica that Serve does not list any more is not found. Until the connection stands, and
wherever it cannot be made, calls go Serve's way.

There is one connection to each replica. What arrives in one turn of the event loop wakes each
reader once, however many chunks it has; see :mod:`replica.streams.wire`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from replica.engine import EngineRequest, ResponseItem
from replica.streams.frames import Frames
from replica.streams.wire import (
    FORMAT,
    MAX_ASKED_BYTES,
    MAX_DELIVERED_BYTES,
    WELCOME,
    WINDOW_BYTES,
    Cancel,
    Consumed,
    Delivery,
    Ending,
    Open,
    StreamEndpoint,
    cost,
)
from router.answer import NobodyTakesError, ReplicaFailedError, ReplicaStream
from router.errors import Reason
from scheduling.roles import Role

_CONNECT_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 1.0
_PAUSE_AFTER_FAILURE_S: Final = 10.0

_decode = msgspec.msgpack.Decoder(list[Delivery]).decode
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)

Find = Callable[[str, Role], Awaitable[StreamEndpoint]]
"""Asks a replica in the pool of a role for its endpoint, by its id; another one may answer."""

Elsewhere = Callable[[], ReplicaStream]
"""Sends a request Serve's way."""


def _failure_of(ending: Ending) -> ReplicaFailedError:
    """What the replica's word on how a response ended says of it."""
    if ending is Ending.ENGINE_DEAD:
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica's engine died.", dead=True)
    if ending is Ending.CANCELLED:
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica cancelled the request.")
    if ending in (Ending.LEFT, Ending.STALLED):
        return NobodyTakesError(stalled=ending is Ending.STALLED)
    if ending is Ending.TOO_LARGE:
        return ReplicaFailedError(
            Reason.TOO_LARGE,
            "The answer exceeds the largest message between router and replica.",
            retry=False,
        )
    return ReplicaFailedError(Reason.INTERNAL, "The replica failed.", retry=False)


def _lost() -> ReplicaFailedError:
    return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica could not be reached.", lost=True)


class ChannelStream:
    """One call over a connection. It is its own iterator."""

    __slots__ = (
        "_channel",
        "_elsewhere",
        "_failure",
        "_items",
        "_moved",
        "_number",
        "_over",
        "_rest",
        "_size",
        "_unsaid",
        "_waiter",
        "heard",
    )

    def __init__(self, channel: Channel, number: int, elsewhere: Elsewhere) -> None:
        self._channel = channel
        self._number = number
        self._elsewhere: Elsewhere | None = elsewhere
        self._moved: ReplicaStream | None = None
        self._rest: AsyncIterator[Sequence[ResponseItem]] | None = None
        self._items: list[ResponseItem] = []
        self._size = 0
        self._unsaid = 0
        self._over = False
        self._failure: ReplicaFailedError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.heard = False

    def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        return self

    async def __anext__(self) -> Sequence[ResponseItem]:
        """What has arrived since the last time; where that is nothing, what arrives next.

        Raises:
            ReplicaFailedError: the replica or the way to it failed.
        """
        while not self._items:
            if self._rest is not None:
                return await anext(self._rest)
            if self._failure is not None:
                raise self._failure
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        self._unsaid += self._size
        self._size = 0
        if self._unsaid > WINDOW_BYTES // 2 and not self._over:
            self._channel.send(_encode(Consumed(self._number, self._unsaid)))
            self._unsaid = 0
        return items

    def cancel(self) -> None:
        """Stop the replica's work. Harmless after the end."""
        if self._moved is not None:
            self._moved.cancel()
        elif not self._over:
            self._over = True
            self._channel.cancel(self._number)

    def take(self, delivery: Delivery) -> bool:
        """Keep what has arrived for the reader; whether it was the last of the response."""
        items = self._items
        self.heard = True
        if delivery.taken is not None:
            items.append(delivery.taken)
        if delivery.head is not None:
            items.append(delivery.head)
        if delivery.chunks:
            self._size += cost(delivery.chunks)
            items += delivery.chunks
        if delivery.sent is not None:
            items.append(delivery.sent)
        if delivery.tail is not None:
            items.append(delivery.tail)
            self._over = True
        elif delivery.ending is not None:
            self._over = True
            if delivery.ending is not Ending.EARLY:
                self._failure = _failure_of(delivery.ending)
        self._wake()
        return self._over

    def lose(self, expected: bool) -> None:
        """The connection ended. Where the replica had said that it would leave, it has not begun
        with what nothing was heard of."""
        if expected and not self.heard and self._elsewhere is not None:
            self._moved = self._elsewhere()
            self._rest = self._moved.__aiter__()
        else:
            self._failure = _lost()
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel(Frames):
    """The connection to one replica.

    Args:
        token: of the replica.
        on_end: called once when it ended, or is not to be used any more.
    """

    def __init__(self, token: str, on_end: Callable[[Channel], None]) -> None:
        super().__init__(MAX_DELIVERED_BYTES)
        self._token = token
        self._on_end = on_end
        self._numbers = itertools.count()
        self._streams: dict[int, ChannelStream] = {}
        self._paused = False
        self.leaving = False
        """The replica has said that it is about to leave."""
        self.greeted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the replica has taken the token, once that is known."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Show the token."""
        super().connection_made(transport)
        self.send(self._token.encode())

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what is open."""
        super().connection_lost(error)
        if not self.greeted.done():
            self.greeted.set_result(False)
        streams, self._streams = self._streams, {}
        self._on_end(self)
        for stream in streams.values():
            stream.lose(self.leaving)

    def pause_writing(self) -> None:
        """The replica takes nothing now."""
        self._paused = True

    def resume_writing(self) -> None:
        """It goes on."""
        self._paused = False

    def frame_received(self, frame: bytes | bytearray) -> None:
        """Hand on what has arrived."""
        if not self.greeted.done():
            self.greeted.set_result(frame == WELCOME)
        elif not frame:
            self.leaving = True
            self._on_end(self)
        else:
            try:
                deliveries = _decode(frame)
            except msgspec.MsgspecError:
                _log.exception("a replica's message is malformed")
                self.abort()
                return
            for delivery in deliveries:
                stream = self._streams.get(delivery.stream)
                if stream is not None and stream.take(delivery):
                    del self._streams[delivery.stream]

    def open(self, request: EngineRequest, elsewhere: Elsewhere) -> ChannelStream | None:
        """Send a request; ``None`` where it cannot travel here.

        Args:
            elsewhere: sends it Serve's way, should the replica leave before it begins with it.
        """
        if self._paused or self.closed:
            return None
        number = next(self._numbers)
        try:
            frame = _encode(Open.of(number, request))
        except (TypeError, ValueError, OverflowError):  # a number beyond 64 bits, say
            return None
        if len(frame) > MAX_ASKED_BYTES:
            return None
        stream = self._streams[number] = ChannelStream(self, number, elsewhere)
        self.send(frame)
        return stream

    def cancel(self, number: int) -> None:
        """Stop a response."""
        if self._streams.pop(number, None) is not None:
            self.send(_encode(Cancel(number)))


class Channels:
    """The connections of one router to the replicas of one model. To be made on the event loop that
    uses it.

    Args:
        find: asks a replica where it listens.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._open: dict[str, Channel] = {}
        # Bounded: by the replicas to which the controller sends within a few seconds.
        self._connecting: dict[str, asyncio.Task[None]] = {}

    def open(
        self, request: EngineRequest, target: str, role: Role, elsewhere: Elsewhere
    ) -> ChannelStream | None:
        """Send a request to ``target`` in the pool of ``role``; ``None`` where there is no
        connection, which is then made for the next one. See :meth:`Channel.open`."""
        channel = self._open.get(target)
        if channel is not None:
            return channel.open(request, elsewhere)
        self._connect_soon(target, role)
        return None

    def connected(self, replica_id: str) -> bool:
        """Whether there is a connection to this replica."""
        return replica_id in self._open

    def _connect_soon(self, replica_id: str, role: Role) -> None:
        if replica_id not in self._connecting:
            connect = asyncio.get_running_loop().create_task(self._connect(replica_id, role))
            self._connecting[replica_id] = connect

    async def _connect(self, replica_id: str, role: Role) -> None:
        """One attempt and a pause, which follows a success too: a connection that ends right after
        it was made must not be made again without end."""
        try:
            await self._attempt(replica_id, role)
            made = replica_id in self._open
            await asyncio.sleep(_PAUSE_S if made else _PAUSE_AFTER_FAILURE_S)
        finally:
            del self._connecting[replica_id]

    async def _attempt(self, replica_id: str, role: Role) -> None:
        loop = asyncio.get_running_loop()
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                endpoint = StreamEndpoint(*await self._find(replica_id, role))
                if endpoint.replica_id != replica_id or endpoint.format != FORMAT:
                    return  # it is gone, or of another version
                made = channel = Channel(endpoint.token, partial(self._ended, replica_id, role))
                await loop.create_connection(lambda: made, endpoint.host, endpoint.port)
                # It may have ended in the turn in which the answer came.
                if not await made.greeted or made.closed:
                    raise ConnectionResetError("the replica did not take the token")
            if not made.leaving:
                self._open[replica_id] = made
        except ReplicaFailedError as failure:
            _log.debug("replica %s does not say where it listens: %s", replica_id, failure)
        except (OSError, TimeoutError) as error:
            _log.warning("no connection to replica %s: %s", replica_id, error or "timeout")
        except Exception:
            _log.exception("the connection to replica %s could not be made", replica_id)
        finally:
            if channel is not None and channel is not self._open.get(replica_id):
                channel.abort()

    def _ended(self, replica_id: str, role: Role, channel: Channel) -> None:
        if self._open.get(replica_id) is channel:
            del self._open[replica_id]
            if not channel.leaving:
                # Serve finds by this question that the replica is dead, if it is.
                self._connect_soon(replica_id, role)
