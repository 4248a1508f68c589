"""A clock whose seconds pass when told to, and pauses that last by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from heapq import heappop, heappush
from itertools import count
from typing import Any

from sluice.replica.profiling import VirtualLoop


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop in virtual time, of which it has half an hour: to wait for ever is a
    failure."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(1800):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(limited())

    return run


class LoopClock:
    """The time of the loop that runs."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def settle() -> None:
    """Let everything happen that can happen without time going by."""
    for _ in range(50):
        await asyncio.sleep(0)


class VirtualTime:
    """Call it for the time; wait with :meth:`pause`; let it go by with :meth:`advance`."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self._pauses: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()

    def __call__(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._pauses, (self.now_s + seconds, next(self._number), end))
        await end

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` go by, each pause ending at its time."""
        until_s = self.now_s + seconds
        await settle()
        while self._pauses and self._pauses[0][0] <= until_s:
            self.now_s, _, end = heappop(self._pauses)
            if not end.done():
                end.set_result(None)
            await settle()
        self.now_s = until_s
        await settle()
