"""Promised requests that wait for their first tokens, and may move to an earlier replica.

The controller is asked about them with each push of metrics, and says which of them are going to
miss their first tokens where they are (:mod:`controller.moves`). Nothing of such a request has been
sent to its client, so it can be made again elsewhere: it moves, once, if another replica promises
what is left of its objective. Until that promise is there it stays where it is.

It costs an attempt a dictionary entry.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from controller.messages import MAX_WAITS, FirstTokenWait
from router.request.call import Call


class _Waiting(NamedTuple):
    replica_id: str
    call: Call
    move: Callable[[], Awaitable[None]]


class Moves:
    """Of one router process and model, on its event loop.

    Args:
        clock: monotonic seconds; the one of :attr:`~router.request.call.Call.received_s`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._moving: dict[int, asyncio.Task[None]] = {}

    def watch(
        self, key: int, replica_id: str, call: Call, move: Callable[[], Awaitable[None]]
    ) -> None:
        """A promised call, whose TTFT is stated, waits for its first token at a replica until
        :meth:`forget`. ``O(1)``.

        Args:
            key: of the attempt.
            move: moves it, if possible.
        """
        self._waiting[key] = _Waiting(replica_id, call, move)

    def forget(self, key: int) -> None:
        """It waits no more. ``O(1)``."""
        self._waiting.pop(key, None)

    def waits(self) -> tuple[FirstTokenWait, ...]:
        """Those that are not late yet; of more than ``MAX_WAITS``, those due soonest.
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
        """These are going to miss their first tokens: move them. Those that wait no more are
        ignored."""
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None and key not in self._moving:
                self._moving[key] = asyncio.create_task(self._move(key, waiting), name="move")

    async def _move(self, key: int, waiting: _Waiting) -> None:
        try:
            await waiting.move()
        finally:
            del self._moving[key]
