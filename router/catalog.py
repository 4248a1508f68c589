"""The list of models, asked of a replica and kept for a moment. It tells whether any replica
serves, too."""

from __future__ import annotations

import asyncio
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

    async def _ask(self) -> dict[str, Any] | ApiError:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._replicas.models()
        except TimeoutError:
            return ApiError(Reason.NO_REPLICA, f"No replica answered within {TIMEOUT_S:g} seconds.")
        except ReplicaFailedError as failure:
            return ApiError(Reason.NO_REPLICA, f"No replica serves: {failure}")
