"""What the dispatcher needs of the replicas: calls, their streams, and how they fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

from sluice.protocol.requests import EngineRequest, Progress, ResponseItem
from sluice.router.errors import ApiError, Reason
from sluice.scheduling.roles import Role


class ReplicaFailedError(Exception):
    """A replica did not serve an attempt.

    Args:
        reason: of the client's error if this was the last attempt.
        message: what happened, without internal details.
        retry: another replica may succeed.
        hung: the replica is unresponsive, and the controller has been notified.
        lost: the replica's requests are lost, as when it is dead or hung.
        given_up: Serve starts no more replicas, after several that failed."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        dead: bool = False,
        retry: bool = True,
        hung: bool = False,
        lost: bool = False,
        given_up: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.dead = dead
        self.retry = retry
        self.hung = hung
        self.lost = lost or dead or hung
        self.given_up = given_up


def error_of(failure: ReplicaFailedError, replicas: Replicas) -> ApiError:
    """The error for the client where no attempt follows the one that failed so."""
    starts = failure.reason is Reason.NO_REPLICA and not failure.given_up
    starts_in_s = replicas.starts_in_s if starts else None
    if starts_in_s is None:
        return ApiError(failure.reason, str(failure))
    message = (
        f"No replica of the model runs. One is predicted to serve in {starts_in_s:.0f} seconds."
    )
    return ApiError(Reason.MODEL_STARTING, message, retry_after_s=starts_in_s)


class ReaderLostError(ReplicaFailedError):
    """A stream's reader is gone, which is not the replica's fault: the client left, or the
    connection between Envoy and the replica broke. ``stalled``: the client is connected, but has
    read nothing for too long."""

    def __init__(self, stalled: bool = False) -> None:
        super().__init__(
            Reason.REPLICA_FAILED, "The connection from the replica to the client broke."
        )
        self.stalled = stalled


class StalledReaderError(OSError):
    """The client has read nothing for too long."""


class ReplicaStream(Protocol):
    """The incoming answer to one request."""

    def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        """Yield items as they arrive: a head, chunks, a tail. Before the head, the replica that has
        the request may confirm it. Raises ReplicaFailedError: the replica or the connection to it
        failed."""

    def cancel(self) -> None:
        """Stop the replica's work. Never blocks; harmless after the end."""


class Replicas(Protocol):
    """Access to the replicas of one model by their roles. A role has one pool or several."""

    @property
    def roles(self) -> Sequence[Role]:
        """The existing pools, in the order in which they are asked to serve a whole request
        (prefill and decode): mixed, decode, prefill. At least one."""

    @property
    def single(self) -> bool:
        """Whether there is one pool only, which lets requests wait for its first replica; else
        another pool may have some."""

    @property
    def asleep(self) -> bool:
        """Whether the model may have no replica and has none, as far as is known: only a request or
        :meth:`wake` makes one start."""

    @property
    def starts_in_s(self) -> float | None:
        """The predicted time until the model's first replica runs, seconds; ``None``: one runs, as
        far as is known."""

    async def wake(self) -> None:
        """Return when a replica runs; make one start if there is none and there may be none. Raises
        ReplicaFailedError: none has started in time, or none can start."""

    async def at(self, endpoints: Collection[str]) -> Mapping[str, Role]:
        """Serve's replicas that send streams past the routers at one of these addresses
        (``HOST:PORT``, or ``HOST`` for any port), with the role of their pool."""

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role
    ) -> ReplicaStream:
        """Send a request to ``target`` in the pool of ``role``, one of :attr:`roles`. If ``target``
        is ``None`` or unknown, send it to any replica of that pool, if possible to none of
        ``avoid``.

        The stream fails with ``NO_REPLICA`` if the pool is empty; another pool is asked next.
        """

    def transfer_kv(self, request: EngineRequest, target: str) -> ReplicaStream | None:
        """Send a request that only ``target`` can serve, as it has the KV, also if ``target`` is
        drained or about to stop. ``None``: it cannot be sent."""

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        """Ask ``target`` whether its engine runs. If ``target`` is ``None`` or has left the pool,
        ask any replica of the pool, if possible none of ``avoid``. Raises ReplicaFailedError: it
        could not be asked, or the probe failed there."""

    def is_leaving(self, replica_id: str) -> bool:
        """Whether a replica has said that it is about to stop, and the connection to it is open."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body of any replica, drained ones included. Raises
        ReplicaFailedError: none answered."""

    async def all_models(self) -> list[dict[str, Any]]:
        """The list-models bodies of the replicas that answer within a second, at least one. Raises
        ReplicaFailedError: none answered."""

    async def check(self) -> None:
        """Return if a replica that takes requests answers. Raises ReplicaFailedError: none does."""
