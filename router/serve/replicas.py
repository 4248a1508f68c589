"""The replicas behind a Serve deployment handle: calls, cancellation, and mapping of failures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
import msgspec
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from sluice.protocol.connection import Caller
from sluice.protocol.requests import (
    ClientLeftError,
    ClientStalledError,
    EngineDeadError,
    EngineRequest,
    Progress,
    ResponseItem,
)
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
from sluice.router import wire
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import Transport
from sluice.router.serve.contract import Forward, ReaderLostError, ReplicaFailedError, ReplicaStream
from sluice.router.serve.hint import DrainedError, Hint, NoReplicaError
from sluice.router.serve.running import RUNNING
from sluice.scheduling.autoscaling.base import STARTUP_S
from sluice.scheduling.fleet.ranks import rank_of, replica_of
from sluice.scheduling.roles import WHOLE, Role

# Calls to replicas over plain TCP connections, which cost a fraction of calls over Serve's handle.
#
# When a router first sends a request to a replica, it asks the replica over Serve's handle for its
# address and access token. So no other process learns these, there is no list to keep up to date,
# and a replica that Serve no longer lists is not found. Until the connection is established, and
# if that fails, calls use Serve's handle.
#
# There is one connection to each replica. What arrives in one turn of the event loop wakes each
# reader once, however many chunks it has; see :mod:`sluice.protocol.streams`.

_CONNECT_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 1.0
_PAUSE_AFTER_FAILURE_S: Final = 10.0
_PAUSE_UNLISTED_S: Final = 0.1
"""The controller knows a replica that starts up to a second before Serve lists it, and the requests
of that time must not keep the connection away from the first seconds of its life."""

_decode = msgspec.msgpack.Decoder(list[Delivery]).decode
_encode = msgspec.msgpack.Encoder().encode

Find = Callable[[str, Role], Awaitable[StreamEndpoint]]
"""Asks a replica in the pool of a role for its endpoint, by its id; another one may answer."""

Elsewhere = Callable[[], ReplicaStream]  # sends a request over Serve's handle


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


@dataclass(slots=True, eq=False)
class ChannelStream:
    """One call over a connection. It is its own iterator. ``unsaid``: cost of what was read and is
    not reported yet. ``moved``: where it was sent again, with ``rest`` of the items."""

    channel: Channel
    number: int
    elsewhere: Elsewhere | None
    moved: ReplicaStream | None = None
    rest: AsyncIterator[Sequence[ResponseItem]] | None = None
    items: list[ResponseItem] = field(default_factory=list)
    size: int = 0
    unsaid: int = 0
    over: bool = False
    failure: Exception | None = None
    waiter: asyncio.Future[None] | None = None
    forward: Forward | None = None
    responded: bool = False

    def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        return self

    async def __anext__(self) -> Sequence[ResponseItem]:
        """The items since the last call, or the next ones. Raises ReplicaFailedError, or what
        ``forward`` has raised."""
        while not self.items:
            if self.rest is not None:
                return await anext(self.rest)
            if self.failure is not None:
                raise self.failure
            if self.over:
                raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        items, self.items = self.items, []
        size, self.size = self.size, 0
        self._read(size)
        return items

    def _read(self, size: int) -> None:
        self.unsaid += size
        if self.unsaid > WINDOW_BYTES // 2 and not self.over:
            self.channel.send(_encode(Consumed(self.number, self.unsaid)))
            self.unsaid = 0

    def cancel(self) -> None:
        """Stop the replica's work. Harmless after the end."""
        if self.moved is not None:
            self.moved.cancel()
        elif not self.over:
            self.over = True
            self.channel.cancel(self.number)

    def take(self, delivery: Delivery) -> bool:
        """Store a delivery for the reader, or to be forwarded at the end of this turn of the event
        loop. Returns whether it was the last one."""
        items, waiter = self.items, self.waiter
        self.responded = True
        forwarded = self.forward is not None and waiter is not None and not waiter.done()
        if delivery.taken is not None:
            items.append(delivery.taken)
            forwarded = False
        if delivery.head is not None:
            items.append(delivery.head)
            forwarded = False
        if delivery.chunks:
            self.size += cost(delivery.chunks)
            if forwarded and not items:
                self.channel.forward_soon(self)
            items += delivery.chunks
        if delivery.sent is not None:
            items.append(delivery.sent)
            forwarded = False
        if delivery.tail is not None:
            items.append(delivery.tail)
            self.over = True
        elif delivery.ending is not None:
            self.over = True
            if delivery.ending is not Ending.EARLY:
                self.failure = _failure_of(delivery.ending)
        if not forwarded or self.over:
            self._wake()
        return self.over

    def forward_items(self) -> None:
        """Forward what has arrived in this turn, unless the reader gets it."""
        if self.forward is None or self.waiter is None or self.waiter.done() or not self.items:
            return
        items, self.items = self.items, []
        size, self.size = self.size, 0
        try:
            if not self.forward(items):
                self.forward = None
        except Exception as error:  # of this stream; the connection has others
            self.failure = error
            self._wake()
        self._read(size)

    def lose(self, expected: bool) -> None:
        """The connection ended. A replica that had announced that it would leave has not started
        requests from which nothing has arrived; these are sent again."""
        if expected and not self.responded and self.elsewhere is not None:
            self.moved = self.elsewhere()
            self.rest = self.moved.__aiter__()
        else:
            message = "The replica could not be reached."
            self.failure = ReplicaFailedError(Reason.REPLICA_FAILED, message, lost=True)
        self.over = True
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Channel(Caller):
    """The connection to one replica. ``on_end``: it ended, or must not be used any more."""

    def __init__(self, token: str, on_end: Callable[[Channel], None]) -> None:
        super().__init__(token, MAX_DELIVERED_BYTES)
        self._on_end = on_end
        self._numbers = itertools.count()
        self._streams: dict[int, ChannelStream] = {}
        self._paused = False
        self._unsent: list[bytes] = []
        self._arrived: list[ChannelStream] = []
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

    def send(self, *frames: bytes) -> None:
        """Send frames in one write with all others of this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += frames

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        super().send(*unsent)

    def forward_soon(self, stream: ChannelStream) -> None:
        """Have a stream forward what it has at the end of this turn: a replica that is quick sends
        several messages in one read, and each write costs as much as all else for a token."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._forward)
        self._arrived.append(stream)

    def _forward(self) -> None:
        arrived, self._arrived = self._arrived, []
        for stream in arrived:
            stream.forward_items()

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
        """Send a request; ``None`` if this connection cannot carry it. ``elsewhere``: sends it over
        Serve's handle if the replica leaves before it has started it; ``None``: it fails then."""
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
    """A router's connections to one model's replicas; construct it on the event loop that uses
    it."""

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
        """Send to ``target``; ``None``: no connection yet, it is made for later requests."""
        channel = self._open.get(target)
        if channel is not None:
            return channel.open(request, elsewhere)
        self._connect_soon(target, role)
        return None

    def open_at(self, request: EngineRequest, target: str) -> ChannelStream | None:
        """Send to ``target`` only, even if it is leaving; ``None`` if there is no connection."""
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
        """One attempt, then a pause even after a success: no tight loop of short connections."""
        try:
            await asyncio.sleep(await self._attempt(replica_id, role))
        finally:
            del self._connecting[replica_id]

    async def _attempt(self, replica_id: str, role: Role) -> float:
        """Try to connect; returns how long no other attempt may follow, seconds."""
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                endpoint = StreamEndpoint(*await self._find(replica_id, role))
                if endpoint.replica_id != replica_id:
                    return _PAUSE_UNLISTED_S
                if endpoint.format != FORMAT:
                    return _PAUSE_AFTER_FAILURE_S
                made = channel = Channel(endpoint.token, partial(self._ended, replica_id, role))
                await made.reach(endpoint.host, endpoint.port)
            if not made.leaving:
                self._open[replica_id] = made
                return _PAUSE_S
        except ReplicaFailedError as failure:
            _log.debug("cannot get the endpoint of replica %s: %s", replica_id, failure)
            if failure.reason is Reason.NO_REPLICA:
                return _PAUSE_UNLISTED_S
        except (OSError, TimeoutError) as error:
            _log.warning("no connection to replica %s: %s", replica_id, error or "timeout")
        except Exception:
            _log.exception("could not connect to replica %s", replica_id)
        finally:
            if channel is not None and channel is not self._open.get(replica_id):
                channel.abort()
        return _PAUSE_AFTER_FAILURE_S

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


_TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED  # how gRPC refuses a message above its limit
_ADDRESS_S = 2.0  # timeout of a replica for its address, seconds
_LISTING_S = 1.0  # timeout of replicas for their models where all are asked, seconds

_log = logging.getLogger(__name__)


class ServeStream:
    """One streaming call over the handle."""

    forward: Forward | None = None  # not used: its items come to the reader

    def __init__(self, response: Any) -> None:
        self._response = response
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        """Yield items batch by batch. Raises ReplicaFailedError: replica or connection."""
        try:
            async for items in self._response:
                yield items
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled or (task is not None and task.cancelling()):
                raise
            # This task was not cancelled: Serve reports in this way that the replica's was.
            raise ReplicaFailedError(
                Reason.REPLICA_FAILED, "The replica cancelled the request."
            ) from None
        except TaskCancelledError as error:
            if self._cancelled:
                raise asyncio.CancelledError from None
            raise failure_of(error) from error
        except Exception as error:
            raise failure_of(error) from error

    def cancel(self) -> None:
        """Cancel the call, also one that was assigned in this turn of the event loop: Serve's own
        ``cancel`` misses that call, and offers no public access to it."""
        self._cancelled = True
        assignment = self._response._replica_result_future
        self._response.cancel()
        if assignment.done() and not assignment.cancelled() and assignment.exception() is None:
            assignment.result().cancel()


class _Pool:
    """One deployment, with a handle for each method."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.deployment = handle.deployment_id
        self.generate = handle.options(method_name="generate", stream=True)
        self.progress = handle.options(method_name="progress")
        self.models = handle.options(method_name="models")
        self.endpoint = handle.options(method_name="stream_endpoint")
        self.direct_address = handle.options(method_name="direct_address")


class ServeReplicas:
    """Calls replicas over handles; make it on the event loop that calls it. ``sent``: gets each
    call's way. ``scales_to_zero``: the one pool may have no replica, and a call starts one.
    ``startup_s``: time in which a replica starts, until one start was measured, seconds."""

    def __init__(
        self,
        pools: Mapping[Role, Sequence[DeploymentHandle]],
        closed: Callable[[], Collection[str]] = tuple,
        quarantined: Callable[[], Collection[str]] = tuple,
        sent: Callable[[Transport], None] = lambda _: None,
        scales_to_zero: bool = False,
        startup_s: float = STARTUP_S,
    ) -> None:
        self.roles: Sequence[Role] = tuple(role for role in WHOLE if role in pools)
        self._pools = {role: tuple(map(_Pool, handles)) for role, handles in pools.items()}
        self._deployments = [each.deployment for own in self._pools.values() for each in own]
        self.single = len(self._deployments) == 1
        self._scales_to_zero = scales_to_zero
        self._startup_s = startup_s
        self._closed = closed
        self._quarantined = quarantined
        self._sent = sent
        self._channels = Channels(self._find)
        self._addresses: dict[str, asyncio.Task[str]] = {}

    @property
    def asleep(self) -> bool:
        """See :class:`~sluice.router.serve.contract.Replicas`."""
        return self._scales_to_zero and self.starts_in_s is not None

    @property
    def starts_in_s(self) -> float | None:
        """See :class:`~sluice.router.serve.contract.Replicas`."""
        found = RUNNING.starts_in_s(self._deployments, self._startup_s)
        # Of a model that may have none, nothing starts until a request comes.
        return self._startup_s if self._scales_to_zero and found is not None else found

    async def wake(self) -> None:
        """Wait in Serve's queue: its autoscaler starts a replica. Raises ReplicaFailedError."""
        await self._models_by(None)

    def _pool(self, role: Role, target: str | None, avoid: Collection[str] = ()) -> _Pool:
        """The pool with ``target``, else one by chance, weighted by replicas open to requests."""
        pools = self._pools[role]
        if len(pools) == 1:
            return pools[0]
        running = [RUNNING.of(pool.deployment) for pool in pools]
        for pool, ids in zip(pools, running, strict=True):
            if target in ids:
                return pool
        closed = {*self._closed()}
        for excluded in ({*avoid, *closed, *self._quarantined()}, closed):
            numbers = [len(ids - excluded) for ids in running]
            if any(numbers):
                return random.choices(pools, numbers)[0]
        return pools[0]

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role
    ) -> ReplicaStream:
        """Send a request, over the router's own connection if there is one."""

        if target is not None:
            request = request.at(rank_of(target))

        def by_serve() -> ServeStream:
            # Without a target (an empty hint), the replica that gets the request confirms it.
            hint = self._hint(target, avoid) or ""
            self._sent(Transport.HANDLE)
            generate = self._pool(role, target, avoid).generate
            return ServeStream(generate.remote(request, **{wire.TARGET_KWARG: hint}))

        if target is not None:
            stream = self._channels.open(request, replica_of(target), role, by_serve)
            if stream is not None:
                self._sent(Transport.CONNECTION)
                return stream
        return by_serve()

    def transfer_kv(self, request: EngineRequest, target: str) -> ReplicaStream | None:
        """Have ``target`` give KV away; see :class:`~sluice.router.serve.contract.Replicas`."""
        return self._channels.open_at(request, target)

    async def _find(self, replica_id: str, role: Role) -> StreamEndpoint:
        """A replica's address; the answer names its sender. Raises ReplicaFailedError."""
        hint = self._hint(replica_id, ())
        endpoint: StreamEndpoint = await _answer_of(
            self._pool(role, replica_id).endpoint.remote(**{wire.TARGET_KWARG: hint})
        )
        return endpoint

    async def at(self, endpoints: Collection[str]) -> Mapping[str, Role]:
        """Replicas by address, asked once; a silent one delays a call only if no other is found."""
        running: dict[str, tuple[_Pool, Role]] = {}
        for role in reversed(self.roles):
            for pool in self._pools[role]:
                running |= dict.fromkeys(RUNNING.of(pool.deployment), (pool, role))
        asked = {name: self._addresses.get(name) for name in running}
        self._addresses = {
            name: asyncio.create_task(self._address(name, running[name][0]))
            if task is None or (task.done() and not task.result())
            else task
            for name, task in asked.items()
        }

        def found() -> dict[str, Role]:
            addresses = {name: each.result() for name, each in known.items() if each.done()}
            return {
                name: running[name][1]
                for name, address in addresses.items()
                if {address, address.rpartition(":")[0]} & set(endpoints)
            }

        known = dict(self._addresses)
        if known and not found():
            await asyncio.wait(known.values(), timeout=_ADDRESS_S)
        return found()

    async def _address(self, name: str, pool: _Pool) -> str:
        """Where a replica sends streams past the routers; empty: it did not answer."""
        with contextlib.suppress(ReplicaFailedError, TimeoutError):
            async with asyncio.timeout(_ADDRESS_S):
                call = pool.direct_address.remote(**{wire.TARGET_KWARG: self._hint(name, ())})
                replica_id, address = await _answer_of(call)
                return address if replica_id == name else ""
        return ""

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        """Ask whether an engine runs. Raises ReplicaFailedError: not asked, or the probe failed."""
        hint = self._hint(target, avoid)
        progress = self._pool(role, target, avoid).progress
        call = progress.remote(tuple(request_ids), **{wire.TARGET_KWARG: hint})
        report: Progress = await _answer_of(call)
        return report

    def is_leaving(self, replica_id: str) -> bool:
        """Whether a replica drains; see :class:`~sluice.router.serve.contract.Replicas`."""
        return self._channels.is_leaving(replica_of(replica_id))

    def _hint(self, target: str | None, avoid: Sequence[str]) -> str | None:
        # Without a target the replica chooses the rank: it may be none of these.
        others = (_replicas_of(each) for each in (avoid, self._closed(), self._quarantined()))
        return Hint(target, *others).encode()

    async def models(self) -> dict[str, Any]:
        """Any replica's list-models body. Raises ReplicaFailedError: the last pool's failure."""
        # A drained replica knows the models; one that hangs does not answer.
        return await self._models_by(Hint(quarantined=_replicas_of(self._quarantined())).encode())

    async def all_models(self) -> list[dict[str, Any]]:
        """What each replica lists. Raises ReplicaFailedError: none answered."""
        asked = [
            asyncio.create_task(_answer_of(pool.models.remote(**{wire.TARGET_KWARG: name})))
            for pool in {
                each.deployment: each for own in self._pools.values() for each in own
            }.values()
            for name in RUNNING.of(pool.deployment)
        ]
        if not asked:
            return [await self.models()]
        done, late = await asyncio.wait(asked, timeout=_LISTING_S)
        for task in late:
            task.cancel()
        found = [task.result() for task in done if task.exception() is None]
        if not found:
            raise ReplicaFailedError(Reason.NO_REPLICA, "No replica answered.")
        return found

    async def check(self) -> None:
        """Raises ReplicaFailedError: no pool has a replica that takes requests without a target."""
        await self._models_by(self._hint(None, ()))

    async def _models_by(self, hint: str | None) -> dict[str, Any]:
        for role in self.roles[:-1]:
            with contextlib.suppress(ReplicaFailedError):
                return await self._models_of(role, hint)
        return await self._models_of(self.roles[-1], hint)

    async def _models_of(self, role: Role, hint: str | None) -> dict[str, Any]:
        call = self._pool(role, None).models.remote(**{wire.TARGET_KWARG: hint})
        models: dict[str, Any] = await _answer_of(call)
        return models


def _replicas_of(names: Collection[str]) -> tuple[str, ...]:
    """Serve's replicas that these are, or are ranks of."""
    return tuple(dict.fromkeys(map(replica_of, names)))


async def _answer_of(call: Any) -> Any:
    """The result of a call that does not stream. Raises ReplicaFailedError: it failed."""
    try:
        return await call
    except asyncio.CancelledError:
        call.cancel()
        raise
    except Exception as error:
        raise failure_of(error) from error


def failure_of(error: Exception) -> ReplicaFailedError:
    """Map an exception of a call to the replica's failure."""
    # A RayTaskError is also an instance of the exception that the replica raised, so check that
    # first.
    if isinstance(error, EngineDeadError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica's engine died.", dead=True)
    if isinstance(error, ClientLeftError):
        return ReaderLostError(stalled=isinstance(error, ClientStalledError))
    if isinstance(error, ActorDiedError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True)
    if isinstance(error, DrainedError):
        return ReplicaFailedError(
            Reason.NO_REPLICA,
            "Every replica of the model is drained; an operator must reopen one.",
            retry=False,
        )
    if isinstance(error, DeploymentUnavailableError):
        return ReplicaFailedError(
            Reason.NO_REPLICA,
            "No replica of the model runs, and none starts: too many have failed to start, and an "
            "operator must deploy the model again.",
            retry=False,
            given_up=True,
        )
    if isinstance(error, NoReplicaError):
        return ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False)
    if isinstance(error, BackPressureError):
        return ReplicaFailedError(Reason.REPLICAS_FULL, "The replicas are full.", retry=False)
    if isinstance(error, TaskCancelledError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica cancelled the request.")
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is _TOO_LARGE:
        # Any other replica has the same limit, and this one is not at fault.
        return ReplicaFailedError(
            Reason.TOO_LARGE,
            "The request or its answer exceeds the maximum message size between router and "
            "replica.",
            retry=False,
        )
    if isinstance(error, (RayActorError, RayServeException, grpc.aio.AioRpcError, OSError)):
        # The death of the process at the other end of a connection looks the same.
        return ReplicaFailedError(
            Reason.REPLICA_FAILED, "The replica could not be reached.", lost=True
        )
    _log.error("unexpected failure of a replica", exc_info=error)
    # Ray's own failures (a lost object, a worker out of memory) may not happen on another replica;
    # an exception of the replica's code would only be raised again.
    retry = isinstance(error, RayError) and not isinstance(error, RayTaskError)
    return ReplicaFailedError(Reason.INTERNAL, "The replica failed.", retry=retry)
