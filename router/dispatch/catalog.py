"""Short-lived cache of two replica answers: the list of models, and whether any replica takes
requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sluice.replica.engine import Endpoint
from sluice.router.dispatch.recent import Recent, Value
from sluice.router.errors import ApiError, Reason
from sluice.router.serve.contract import ReplicaFailedError, Replicas, error_of

TTL_S = 1.0
"""How long an answer, or its failure, is kept, seconds."""

TIMEOUT_S = 2.0
"""Longest wait for a replica, seconds."""


class Catalog:
    """Asks at most one replica at a time for either answer, however many clients ask. A model that
    may have no replica, and has none, is not asked: that would start one.

    Args:
        names: models that are listed of a model that has had no replica yet.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        replicas: Replicas,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        entries = [{"id": name, "object": "model", "owned_by": "sluice"} for name in names]
        self._listed: dict[str, Any] = {"object": "list", "data": entries}
        self._models = Recent(lambda: self._asked(replicas.models()), TTL_S, clock)
        self._ready = Recent(lambda: self._asked(replicas.check()), TTL_S, clock)
        self._longest: int | None = None
        self._endpoints: Sequence[str] = ()

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body; the last one while the model has no replica and may have
        none.

        Raises:
            ApiError: 503, no replica answered.
        """
        if not self._replicas.asleep:
            self._listed = await self._models.get()
        return self._listed

    async def lists(self, name: str) -> bool:
        """Whether a replica lists the model or adapter ``name``.

        Raises:
            ApiError: 503, no replica answered.
        """
        return any(entry["id"] == name for entry in (await self.models())["data"])

    async def check(self) -> None:
        """Return if a replica takes requests, or if a request would start one.

        Raises:
            ApiError: 503, none does: each is drained or unreachable.
        """
        if not self._replicas.asleep:
            await self._ready.get()

    async def exceeded(self, tokens: int) -> int | None:
        """The maximum model length of the engines if a prompt of ``tokens`` exceeds it; ``None`` if
        it does not, or the length is unknown. A prompt that seems too long is checked against a
        new answer of a replica: an update may have brought engines with a larger maximum."""
        if self._longest is None or tokens > self._longest:
            with contextlib.suppress(ApiError):
                lengths = [entry.get("max_model_len") for entry in (await self.models())["data"]]
                self._longest = max(filter(None, lengths), default=None)
        return self._longest if self._longest is not None and tokens > self._longest else None

    async def offers_without(self, endpoint: Endpoint) -> Sequence[str] | None:
        """The endpoints that the engines offer, without ``endpoint``; ``None`` if they offer it, or
        none is known. As :meth:`exceeded`, what seems to lack is asked again."""
        if endpoint not in self._endpoints:
            with contextlib.suppress(ApiError):
                self._endpoints = (await self.models()).get("endpoints", ())
        return self._endpoints if self._endpoints and endpoint not in self._endpoints else None

    async def _asked(self, question: Awaitable[Value]) -> Value:
        """A replica's answer.

        Raises:
            ApiError: 503, none answered.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await question
        except TimeoutError:
            message = f"No replica answered within {TIMEOUT_S:g} seconds."
        except ReplicaFailedError as error:
            message = f"No replica is available: {error}"
        raise error_of(ReplicaFailedError(Reason.NO_REPLICA, message), self._replicas)
