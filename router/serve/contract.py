"""What the dispatcher needs of the replicas: calls, their streams, and how they fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from sluice.protocol.requests import EngineRequest, Progress, ResponseItem
from sluice.router.errors import ApiError, Reason
from sluice.scheduling.roles import Role


class ReplicaFailedError(Exception):
    """A replica did not serve an attempt. ``reason``: of the client's error if it was the last
    attempt. ``retry``: another replica may succeed. ``hung``: the controller knows. ``lost``: so
    are the replica's requests. ``given_up``: Serve starts no more replicas."""

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
    """A stream's reader is gone, which is not the replica's fault. ``stalled``: the client is
    connected, but has read nothing for too long."""

    def __init__(self, stalled: bool = False) -> None:
        super().__init__(
            Reason.REPLICA_FAILED, "The connection from the replica to the client broke."
        )
        self.stalled = stalled


class StalledReaderError(OSError):
    """The client has read nothing for too long."""


Forward = Callable[[Sequence[ResponseItem]], bool]


class ReplicaStream(Protocol):
    """The incoming answer to one request. ``forward``: may be called with chunks that arrive while
    the next items are awaited, in place of the reader; after it returns false, no more."""

    forward: Forward | None

    def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        """Yield a head, chunks, a tail; before the head, perhaps a confirmation. Raises
        ReplicaFailedError: the replica or the connection to it failed."""

    def cancel(self) -> None:
        """Stop the replica's work. Never blocks; harmless after the end."""


class Replicas(Protocol):
    """Access to the replicas of one model by their roles. A role has one pool or several."""

    @property
    def roles(self) -> Sequence[Role]:
        """The pools, at least one, as asked for a whole request: mixed, decode, prefill."""

    @property
    def single(self) -> bool:
        """Whether there is one pool only: then requests wait for its first replica."""

    @property
    def asleep(self) -> bool:
        """Whether no replica is known to run until a request or :meth:`wake` starts one."""

    @property
    def starts_in_s(self) -> float | None:
        """Predicted seconds until the first replica runs; ``None``: one runs, as far as is
        known."""

    async def wake(self) -> None:
        """Return when a replica runs; start one if needed. Raises ReplicaFailedError."""

    async def at(self, endpoints: Collection[str]) -> Mapping[str, Role]:
        """Replicas that send streams from these ``HOST:PORT`` or ``HOST`` (any port), with
        roles."""

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role
    ) -> ReplicaStream:
        """Send to ``target``; if it is ``None`` or unknown, to any of the pool, not ``avoid`` if
        possible. If the pool is empty, the stream fails with ``NO_REPLICA``: ask another pool."""

    def transfer_kv(self, request: EngineRequest, target: str) -> ReplicaStream | None:
        """Send to ``target``, the only one with the KV, even if it leaves. ``None``: cannot be
        sent."""

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        """Ask whether an engine runs, at ``target`` or, without it, any of the pool but ``avoid``.
        Raises ReplicaFailedError: it could not be asked, or the probe failed there."""

    def is_leaving(self, replica_id: str) -> bool:
        """Whether a replica has said that it is about to stop, and the connection to it is open."""

    async def models(self) -> dict[str, Any]:
        """Any replica's list-models body, drained ones' too. Raises ReplicaFailedError."""

    async def all_models(self) -> list[dict[str, Any]]:
        """Bodies of the replicas that answer within a second. Raises ReplicaFailedError: none."""

    async def check(self) -> None:
        """Return if a replica that takes requests answers. Raises ReplicaFailedError: none does."""
