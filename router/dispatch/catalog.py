"""Short-lived cache of two replica answers: the list of models, and whether any replica takes
requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sluice.protocol.requests import Endpoint
from sluice.router.dispatch.recent import Recent, Value
from sluice.router.errors import ApiError, Reason, shown
from sluice.router.serve.contract import ReplicaFailedError, Replicas, error_of

_log = logging.getLogger(__name__)

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
        dynamic: replicas load adapters while they serve. Then all replicas are asked, and one whose
            files differ between them is not listed: it would be another model at each.
    """

    def __init__(
        self,
        replicas: Replicas,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        dynamic: bool = False,
    ) -> None:
        self._replicas = replicas
        entries = [{"id": name, "object": "model", "owned_by": "sluice"} for name in names]
        self._listed: dict[str, Any] = {"object": "list", "data": entries}
        listed = self._agreed if dynamic else replicas.models
        self._models = Recent(lambda: self._asked(listed()), TTL_S, clock)
        self._differ: frozenset[str] = frozenset()
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
            ApiError: 503, no replica answered, or the adapter's files differ between replicas.
        """
        found = any(entry["id"] == name for entry in (await self.models())["data"])
        if name in self._differ:
            raise ApiError(
                Reason.NO_REPLICA,
                f"The adapter {shown(name)} has other files at some replicas than at others; it is "
                "served once all have the same.",
                "model",
            )
        return found

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

    async def _agreed(self) -> dict[str, Any]:
        """The models of all replicas without the adapters whose files differ."""
        bodies = await self._replicas.all_models()
        digests: dict[str, set[str]] = {}
        for body in bodies:
            for name, digest in body.pop("digests", {}).items():
                digests.setdefault(name, set()).add(digest)
        differ = frozenset(name for name, found in digests.items() if len(found) > 1)
        for name in differ - self._differ:
            _log.warning(
                "the files of the adapter %s differ between replicas; not serving it", name
            )
        for name in self._differ - differ:
            _log.info("the files of the adapter %s are the same at all replicas again", name)
        self._differ = differ
        entries = {entry["id"]: entry for body in reversed(bodies) for entry in body["data"]}
        data = [entry for name, entry in entries.items() if name not in differ]
        return {**bodies[0], "data": data}

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
