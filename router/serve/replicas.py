"""The replicas behind a Serve deployment handle: calls, cancellation, and what failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.exceptions import (
    ActorDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from replica.engine import (
    ClientLeftError,
    ClientStalledError,
    EngineDeadError,
    EngineRequest,
    Progress,
    ResponseItem,
)
from replica.streams.wire import StreamEndpoint
from router import wire
from router.answer import NobodyTakesError, ReplicaFailedError, ReplicaStream
from router.errors import Reason
from router.metrics.instruments import Way
from router.serve.hint import DrainedError, Hint, NoReplicaError
from router.serve.streams import Channels
from scheduling.roles import Role

WHOLE: tuple[Role, ...] = ("mixed", "decode", "prefill")
"""Pools in the order in which they are asked to serve a request whole."""

_TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED
"""How gRPC refuses a message above its limit."""

_log = logging.getLogger(__name__)


class ServeStream:
    """One streaming call over the handle."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        """What the replica yields, batch by batch.

        Raises:
            ReplicaFailedError: the replica or the way to it failed.
        """
        try:
            async for items in self._response:
                yield items
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled or (task is not None and task.cancelling()):
                raise
            # Nobody cancelled us: this is how Serve passes on that the replica was.
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
        """Cancel the call, whether it is still being assigned or already runs.

        Serve's own ``cancel`` misses a call whose assignment is complete but was not yet taken
        notice of, which happens when the cancellation comes in the same turn of the event loop. So
        the assigned call is cancelled here, too; Serve has no public way to it.
        """
        self._cancelled = True
        assignment = self._response._replica_result_future
        self._response.cancel()
        if assignment.done() and not assignment.cancelled() and assignment.exception() is None:
            assignment.result().cancel()


class ServeReplicas:
    """Calls replicas over handles whose deployments use
    :class:`~router.serve.request_router.HintRouter`.

    To be made on the event loop that calls it.

    Args:
        pools: a handle for each role that has a deployment, at least one.
        closed: the replicas that an operator has closed to new requests, as of now.
        quarantined: the replicas that have failed or hang, as of now.
        sent: told of each call by which way it goes.
    """

    def __init__(
        self,
        pools: Mapping[Role, DeploymentHandle],
        closed: Callable[[], Collection[str]] = tuple,
        quarantined: Callable[[], Collection[str]] = tuple,
        sent: Callable[[Way], None] = lambda _: None,
    ) -> None:
        self.roles: Sequence[Role] = tuple(role for role in WHOLE if role in pools)
        self._closed = closed
        self._quarantined = quarantined
        self._sent = sent
        self._generate = {
            role: handle.options(method_name="generate", stream=True)
            for role, handle in pools.items()
        }
        self._progress = {
            role: handle.options(method_name="progress") for role, handle in pools.items()
        }
        self._models = {
            role: handle.options(method_name="models") for role, handle in pools.items()
        }
        self._endpoint = {
            role: handle.options(method_name="stream_endpoint") for role, handle in pools.items()
        }
        self._channels = Channels(self._find)

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role
    ) -> ReplicaStream:
        """Send a request; see :class:`~router.dispatch.attempt.Replicas`. Over a connection of its
        own, where there is one to the target."""

        def by_serve() -> ServeStream:
            # Where it names nobody, who takes the request says so.
            hint = self._hint(target, avoid) or ""
            self._sent(Way.HANDLE)
            return ServeStream(self._generate[role].remote(request, **{wire.TARGET_KWARG: hint}))

        if target is not None:
            stream = self._channels.open(request, target, role, by_serve)
            if stream is not None:
                self._sent(Way.CONNECTION)
                return stream
        return by_serve()

    async def _find(self, replica_id: str, role: Role) -> StreamEndpoint:
        """Where a replica listens; the answer names who gives it.

        Raises:
            ReplicaFailedError: it could not be asked.
        """
        hint = self._hint(replica_id, ())
        endpoint: StreamEndpoint = await _answer_of(
            self._endpoint[role].remote(**{wire.TARGET_KWARG: hint})
        )
        return endpoint

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        """Ask a replica whether it goes on; see :class:`~router.dispatch.stall_detector.Askable`.

        Raises:
            ReplicaFailedError: it could not be asked, or failed over the question.
        """
        hint = self._hint(target, avoid)
        call = self._progress[role].remote(tuple(request_ids), **{wire.TARGET_KWARG: hint})
        told: Progress = await _answer_of(call)
        return told

    def _hint(self, target: str | None, avoid: Sequence[str]) -> str | None:
        closed, quarantined = tuple(self._closed()), tuple(self._quarantined())
        return Hint(target, tuple(avoid), closed, quarantined).encode()

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body of any replica; see
        :class:`~router.dispatch.attempt.Replicas`.

        Raises:
            ReplicaFailedError: no pool answered, and it tells of the last one.
        """
        # A drained replica knows the models; one that hangs does not answer.
        return await self._models_by(Hint(quarantined=tuple(self._quarantined())).encode())

    async def check(self) -> None:
        """Return if a replica answers that a request without a target could go to.

        Raises:
            ReplicaFailedError: no pool has one, and it tells of the last one.
        """
        await self._models_by(self._hint(None, ()))

    async def _models_by(self, hint: str | None) -> dict[str, Any]:
        for role in self.roles[:-1]:
            with contextlib.suppress(ReplicaFailedError):
                return await self._models_of(role, hint)
        return await self._models_of(self.roles[-1], hint)

    async def _models_of(self, role: Role, hint: str | None) -> dict[str, Any]:
        call = self._models[role].remote(**{wire.TARGET_KWARG: hint})
        models: dict[str, Any] = await _answer_of(call)
        return models


async def _answer_of(call: Any) -> Any:
    """What a call that does not stream returns.

    Raises:
        ReplicaFailedError: it failed.
    """
    try:
        return await call
    except asyncio.CancelledError:
        call.cancel()
        raise
    except Exception as error:
        raise failure_of(error) from error


def failure_of(error: Exception) -> ReplicaFailedError:
    """What an exception of a call says of the replica."""
    # A RayTaskError is an instance of what the replica raised, too, so that comes first.
    if isinstance(error, EngineDeadError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica's engine died.", dead=True)
    if isinstance(error, ClientLeftError):
        return NobodyTakesError(stalled=isinstance(error, ClientStalledError))
    if isinstance(error, ActorDiedError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True)
    if isinstance(error, DrainedError):
        return ReplicaFailedError(
            Reason.NO_REPLICA,
            "Every replica of the model is drained; an operator must take one back.",
            retry=False,
        )
    if isinstance(error, (NoReplicaError, DeploymentUnavailableError)):
        return ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False)
    if isinstance(error, BackPressureError):
        return ReplicaFailedError(Reason.REPLICAS_FULL, "The replicas are full.", retry=False)
    if isinstance(error, TaskCancelledError):
        return ReplicaFailedError(Reason.REPLICA_FAILED, "The replica cancelled the request.")
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is _TOO_LARGE:
        # Any other replica would have the same limit, and this one has done nothing wrong.
        return ReplicaFailedError(
            Reason.TOO_LARGE,
            "The request or its answer exceeds the largest message between router and replica.",
            retry=False,
        )
    if isinstance(error, (RayActorError, RayServeException, grpc.aio.AioRpcError, OSError)):
        # So it looks, too, when the process at the other end of a connection dies.
        return ReplicaFailedError(
            Reason.REPLICA_FAILED, "The replica could not be reached.", lost=True
        )
    _log.error("a replica failed in an unexpected way", exc_info=error)
    # Ray's own troubles (a lost object, a worker out of memory) may not happen elsewhere; an
    # exception of the replica's code would only be raised again.
    retry = isinstance(error, RayError) and not isinstance(error, RayTaskError)
    return ReplicaFailedError(Reason.INTERNAL, "The replica failed.", retry=retry)
