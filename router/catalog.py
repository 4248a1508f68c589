"""The list of models, asked of a replica and kept for a moment. It tells whether any replica
serves, too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from router.answer import ReplicaFailedError
from router.errors import ApiError, Reason
from router.legs import Replicas

TTL_S = 1.0
"""How long an answer, or its failure, is kept, seconds."""

TIMEOUT_S = 2.0
"""Longest wait for a replica, seconds."""


class Catalog:
    """Asks at most one replica at a time, however many clients ask."""

    def __init__(self, replicas: Replicas, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lock = asyncio.Lock()
        self._asked_s: float | None = None
        self._result: dict[str, Any] | ApiError | None = None
        self._longest: int | None = None

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body.

        Raises:
            ApiError: 503, no replica answered.
        """
        async with self._lock:
            if self._asked_s is None or self._clock() - self._asked_s >= TTL_S:
                self._result = await self._ask()
                self._asked_s = self._clock()
        if isinstance(self._result, dict):
            return self._result
        raise ApiError(Reason.NO_REPLICA, str(self._result))

    async def exceeded(self, tokens: int) -> int | None:
        """The most tokens that an engine takes, where a prompt of ``tokens`` exceeds them; ``None``
        where it does not, or that is not known. A prompt that seems too long is judged by a new
        answer of a replica: an update may have brought engines that take more."""
        if self._longest is None or tokens > self._longest:
            with contextlib.suppress(ApiError):
                lengths = [entry.get("max_model_len") for entry in (await self.models())["data"]]
                self._longest = max(filter(None, lengths), default=None)
        return self._longest if self._longest is not None and tokens > self._longest else None

    async def _ask(self) -> dict[str, Any] | ApiError:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._replicas.models()
        except TimeoutError:
            return ApiError(Reason.NO_REPLICA, f"No replica answered within {TIMEOUT_S:g} seconds.")
        except ReplicaFailedError as failure:
            return ApiError(Reason.NO_REPLICA, f"No replica serves: {failure}")
