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
        self._of: dict[tuple[str, int], _Own] = {}

    async def take(self, client: Client) -> Callable[[], None]:
        """Wait for a place. Returns what gives it back, to be called once."""
        most = client.caps.max_in_flight
        if most is None:
            await self._all.acquire()
            return self._all.release
        name = (client.owner, most)  # a client's caps may change
        own = self._of.setdefault(name, _Own(most))
        own.users += 1

        def leave() -> None:
            own.users -= 1
            if not own.users:
                del self._of[name]  # clients come and go

        try:
            await own.places.acquire()
            try:
                await self._all.acquire()
            except BaseException:
                own.places.release()
                raise
        except BaseException:
            leave()
            raise

        def give_back() -> None:
            self._all.release()
            own.places.release()
            leave()

        return give_back


class _Own:
    """The places of one client. ``users`` counts those who have one or wait for one."""

    def __init__(self, count: int) -> None:
        self.places = asyncio.Semaphore(count)
        self.users = 0
