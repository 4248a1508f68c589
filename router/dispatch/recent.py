"""A short-lived cache of one answer that many callers ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Computes an answer at most once in ``ttl_s`` and one at a time, however many callers ask.

    A cancelled caller does not cancel the computation: otherwise callers that come and leave would
    start it again each time.

    Args:
        make: computes the answer. Its exceptions are raised to every caller that waits for it.
        ttl_s: how long an answer is reused, seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self, make: Callable[[], Awaitable[Value]], ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._make = make
        self._ttl_s = ttl_s
        self._clock = clock
        self._task: asyncio.Task[Value] | None = None
        self._made_s = -inf

    async def get(self) -> Value:
        """An answer that is at most ``ttl_s`` old."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._made_s >= self._ttl_s):
            task = self._task = asyncio.create_task(self._run())
            task.add_done_callback(_noted)
        return await asyncio.shield(task)

    def drop(self) -> None:
        """Something changed: later calls get a new answer."""
        self._task = None

    async def _run(self) -> Value:
        try:
            return await self._make()
        finally:
            self._made_s = self._clock()


def _noted(task: asyncio.Task[Value]) -> None:
    """Mark a failure as retrieved: the waiting callers get it, and without any it is not logged."""
    if not task.cancelled():
        task.exception()
