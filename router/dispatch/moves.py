"""Guaranteed requests that wait for their first tokens, and may move to an earlier replica.

The router asks the controller about them with each push of metrics. The controller answers which of
them are going to miss their TTFT at their replica (:mod:`sluice.controller.state.moves`). The
client of such a request has received nothing, so the request can be retried: it moves, at most
once, if another replica guarantees what is left of its SLO. Until then it stays where it is.

The cost per attempt is a dictionary entry.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from sluice.controller.messages import MAX_WAITS, FirstTokenWait
from sluice.router.request.call import Call


class _Waiting(NamedTuple):
    replica_id: str
    call: Call
    move: Callable[[], Awaitable[None]]


class Moves:
    """Waiting requests of one router process and model. Runs on its event loop.

    Args:
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._moving: dict[int, asyncio.Task[None]] = {}

    def watch(
        self, key: int, replica_id: str, call: Call, move: Callable[[], Awaitable[None]]
    ) -> None:
        """Watch a guaranteed call with a TTFT objective, which waits for its first token at a
        replica, until :meth:`forget`. ``O(1)``.

        Args:
            key: of the attempt.
            move: moves it, if possible.
        """
        self._waiting[key] = _Waiting(replica_id, call, move)

    def forget(self, key: int) -> None:
        """The attempt no longer waits. ``O(1)``."""
        self._waiting.pop(key, None)

    def waits(self) -> tuple[FirstTokenWait, ...]:
        """The waiting calls that are not late yet; of more than ``MAX_WAITS``, those due soonest.
        ``O(waiting calls)``."""
        now_s, found = self._clock(), []
        for key, (replica_id, call, _) in self._waiting.items():
            ttft_s, waited_s = call.slo.columns[0], now_s - call.received_s
            if waited_s < ttft_s and key not in self._moving:
                found.append(FirstTokenWait(key, replica_id, ttft_s, waited_s))
        return tuple(
            heapq.nsmallest(MAX_WAITS, found, key=lambda wait: wait.ttft_s - wait.waited_s)
        )

    def missing(self, keys: Sequence[int]) -> None:
        """Move these calls, which are going to miss their TTFT. Keys of calls that no longer wait
        are ignored."""
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None and key not in self._moving:
                self._moving[key] = asyncio.create_task(self._move(key, waiting), name="move")

    async def _move(self, key: int, waiting: _Waiting) -> None:
        try:
            await waiting.move()
        finally:
            del self._moving[key]
