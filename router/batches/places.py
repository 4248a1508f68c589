"""How many lines may be under way in one router: in all, and of one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.trust import Client


class LinePlaces:
    """Places for lines, given out in the order in which they are asked for.

    A client's lines take no more of them than it may have requests in flight.
    """

    def __init__(self, count: int) -> None:
        self._all = asyncio.Semaphore(count)
        self._of: dict[str, asyncio.Semaphore] = {}  # clients are configuration, so they are few

    async def take(self, client: Client) -> Callable[[], None]:
        """Wait for a place. Returns what gives it back, to be called once."""
        most = client.caps.max_in_flight
        if most is None:
            await self._all.acquire()
            return self._all.release
        own = self._of.setdefault(client.owner, asyncio.Semaphore(most))
        await own.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            own.release()
            raise

        def give_back() -> None:
            self._all.release()
            own.release()

        return give_back
