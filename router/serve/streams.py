"""Calls to replicas over plain TCP connections, which cost a fraction of calls over Serve's handle.

When a router first sends a request to a replica, it asks the replica over Serve's handle for its
address and access token. So no other process learns these, there is no list to keep up to date, and
a replica that Serve no longer lists is not found. Until the connection is established, and if that
fails, calls use Serve's handle.

There is one connection to each replica. What arrives in one turn of the event loop wakes each
reader once, however many chunks it has; see :mod:`sluice.protocol.streams`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from sluice.protocol.connection import Caller
from sluice.protocol.requests import EngineRequest, ResponseItem
from sluice.protocol.streams import (
    FORMAT,
    MAX_ASKED_BYTES,
    MAX_DELIVERED_BYTES,
    WINDOW_BYTES,
    Cancel,
    Consumed,
    Delivery,
    Ending,
    Open,
    StreamEndpoint,
    cost,
)
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReaderLostError, ReplicaFailedError, ReplicaStream
from sluice.scheduling.roles import Role

_CONNECT_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 1.0
_PAUSE_AFTER_FAILURE_S: Final = 10.0

_decode = msgspec.msgpack.Decoder(list[Delivery]).decode
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)

Find = Callable[[str, Role], Awaitable[StreamEndpoint]]
"""Asks a replica in the pool of a role for its endpoint, by its id; another one may answer."""

Elsewhere = Callable[[], ReplicaStream]
"""Sends a request over Serve's handle."""


def _failure_of(ending: Ending) -> ReplicaFailedError:
    """Map the replica's report of a response's end to its failure."""
    if ending is Ending.ENGINE_DEAD:
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica's engine died.", dead=True)
    if ending is Ending.CANCELLED:
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica cancelled the request.")
    if ending in (Ending.LEFT, Ending.STALLED):
        return ReaderLostError(stalled=ending is Ending.STALLED)
    if ending is Ending.TOO_LARGE:
        return ReplicaFailedError(
            Reason.TOO_LARGE,
            "The answer exceeds the maximum message size between router and replica.",
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

    def __init__(self, channel: Channel, number: int, elsewhere: Elsewhere | None) -> None:
        self._channel = channel
        self._number = number
        self._elsewhere = elsewhere
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
        """The items that have arrived since the last call; if none, waits for the next ones.

        Raises:
            ReplicaFailedError: the replica or the connection to it failed.
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
        """Store a delivery for the reader. Returns whether it was the response's last one."""
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
        """The connection ended. If the replica had announced that it would leave, it has not
        started requests from which nothing has arrived; these are sent again."""
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


class Channel(Caller):
    """The connection to one replica.

    Args:
        token: of the replica.
        on_end: called when it ended, or must not be used any more.
    """

    def __init__(self, token: str, on_end: Callable[[Channel], None]) -> None:
        super().__init__(token, MAX_DELIVERED_BYTES)
        self._on_end = on_end
        self._numbers = itertools.count()
        self._streams: dict[int, ChannelStream] = {}
        self._paused = False
        self.leaving = False
        """The replica has announced that it is about to leave."""

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the open streams."""
        super().connection_lost(error)
        streams, self._streams = self._streams, {}
        self._on_end(self)
        for stream in streams.values():
            stream.lose(self.leaving)

    def pause_writing(self) -> None:
        """The replica does not read now: the send buffer is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """The replica reads again."""
        self._paused = False

    def frame_received(self, frame: bytes | bytearray) -> None:
        """Forward arrived deliveries to their streams."""
        if not self.greeted.done():
            self.welcomed(frame)
        elif not frame:
            self.leaving = True
            self._on_end(self)
        else:
            try:
                deliveries = _decode(frame)
            except msgspec.MsgspecError:
                _log.exception("malformed message of a replica; closing the connection")
                self.abort()
                return
            for delivery in deliveries:
                stream = self._streams.get(delivery.stream)
                if stream is not None and stream.take(delivery):
                    del self._streams[delivery.stream]

    def open(self, request: EngineRequest, elsewhere: Elsewhere | None) -> ChannelStream | None:
        """Send a request; ``None`` if this connection cannot carry it.

        Args:
            elsewhere: sends it over Serve's handle if the replica leaves before it has started it;
                ``None``: it fails then.
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
    """The connections of one router to the replicas of one model. Must be constructed on the event
    loop that uses it.

    Args:
        find: asks a replica for its endpoint.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._open: dict[str, Channel] = {}
        # Of replicas that have announced that they leave, until they have left.
        self._leaving: dict[str, Channel] = {}
        # Bounded by the number of replicas that the controller chooses within a few seconds.
        self._connecting: dict[str, asyncio.Task[None]] = {}

    def open(
        self, request: EngineRequest, target: str, role: Role, elsewhere: Elsewhere
    ) -> ChannelStream | None:
        """Send a request to ``target`` in the pool of ``role``; ``None`` if there is no connection,
        which is then established for later requests. See :meth:`Channel.open`."""
        channel = self._open.get(target)
        if channel is not None:
            return channel.open(request, elsewhere)
        self._connect_soon(target, role)
        return None

    def open_at(self, request: EngineRequest, target: str) -> ChannelStream | None:
        """Send a request to ``target`` or to no replica, also if it is about to leave; ``None`` if
        there is no connection."""
        channel = self._open.get(target) or self._leaving.get(target)
        return None if channel is None else channel.open(request, None)

    def connected(self, replica_id: str) -> bool:
        """Whether there is a connection to this replica."""
        return replica_id in self._open

    def is_leaving(self, replica_id: str) -> bool:
        """Whether there is a connection to this replica, which has announced that it leaves."""
        return replica_id in self._leaving

    def _connect_soon(self, replica_id: str, role: Role) -> None:
        if replica_id not in self._connecting:
            connect = asyncio.get_running_loop().create_task(self._connect(replica_id, role))
            self._connecting[replica_id] = connect

    async def _connect(self, replica_id: str, role: Role) -> None:
        """Make one attempt, then pause, even after a success: a connection that ends right after it
        was established must not be re-established in a tight loop."""
        try:
            await self._attempt(replica_id, role)
            made = replica_id in self._open
            await asyncio.sleep(_PAUSE_S if made else _PAUSE_AFTER_FAILURE_S)
        finally:
            del self._connecting[replica_id]

    async def _attempt(self, replica_id: str, role: Role) -> None:
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                endpoint = StreamEndpoint(*await self._find(replica_id, role))
                if endpoint.replica_id != replica_id or endpoint.format != FORMAT:
                    return  # the replica is gone, or of another version
                made = channel = Channel(endpoint.token, partial(self._ended, replica_id, role))
                await made.reach(endpoint.host, endpoint.port)
            if not made.leaving:
                self._open[replica_id] = made
        except ReplicaFailedError as failure:
            _log.debug("cannot get the endpoint of replica %s: %s", replica_id, failure)
        except (OSError, TimeoutError) as error:
            _log.warning("no connection to replica %s: %s", replica_id, error or "timeout")
        except Exception:
            _log.exception("could not connect to replica %s", replica_id)
        finally:
            if channel is not None and channel is not self._open.get(replica_id):
                channel.abort()

    def _ended(self, replica_id: str, role: Role, channel: Channel) -> None:
        if self._leaving.get(replica_id) is channel:
            del self._leaving[replica_id]
        if self._open.get(replica_id) is channel:
            del self._open[replica_id]
            if channel.leaving and not channel.closed:
                self._leaving[replica_id] = channel
            if not channel.leaving:
                # If the replica is dead, Serve finds that out by this call.
                self._connect_soon(replica_id, role)
