"""Limits the batch lines in flight in one router: in total, and per client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from sluice.router.tenancy.limits import Client


class _Waiting(NamedTuple):
    client: Callable[[], Client]
    granted: asyncio.Future[str]


class LinePlaces:
    """Slots for lines, granted in the order in which they are requested.

    A client's lines use no more slots than it may have requests in flight. Lines of other clients
    that queue behind it do not wait for it.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._of: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    async def take(self, client: Callable[[], Client]) -> Callable[[], None]:
        """Wait for a slot for ``client``, whose limits may change meanwhile. Returns a function
        that releases the slot, to be called once."""
        waiting = _Waiting(client, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._hand_out()
        try:
            owner = await waiting.granted
        except asyncio.CancelledError:
            if waiting.granted.cancelled():
                self._hand_out()  # which forgets it
            else:  # it was granted, but the caller will not learn that
                self._give_back(waiting.granted.result())
            raise
        return lambda: self._give_back(owner)

    def _hand_out(self) -> None:
        kept = []
        for waiting in self._waiting:
            if waiting.granted.cancelled():
                continue
            client = waiting.client()
            most = client.caps.max_in_flight
            if not self._free or (most is not None and self._of[client.owner] >= most):
                kept.append(waiting)
                continue
            self._free -= 1
            self._of[client.owner] += 1
            waiting.granted.set_result(client.owner)
        self._waiting = kept

    def _give_back(self, owner: str) -> None:
        self._free += 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]  # clients come and go
        self._hand_out()
