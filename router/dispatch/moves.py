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
from collections.abc import Callable, Sequence

from sluice.controller.messages import MAX_WAITS, FirstTokenWait
from sluice.replica.engine import request_key
from sluice.router.dispatch.answer import Answer
from sluice.router.dispatch.attempt import Attempt, MovedError
from sluice.router.dispatch.placement import DecisionService, PlacementClient


class Moves:
    """Waiting requests of one router process and model. Runs on its event loop.

    Args:
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
    """

    def __init__(
        self, controller: DecisionService, placements: PlacementClient, clock: Callable[[], float]
    ) -> None:
        self._controller = controller
        self._placements = placements
        self._clock = clock
        self._waiting: dict[int, tuple[Attempt, Answer]] = {}
        self._moving: dict[int, asyncio.Task[None]] = {}
        controller.on_push(self.waits, self.missing)

    def watch(self, attempt: Attempt, answer: Answer) -> None:
        """Watch an attempt until :meth:`forget`, if it may be abandoned for one at a replica that
        is earlier: a guaranteed one with a TTFT objective. At most once per call; not for a phase
        of a P/D pair, and not for a call suspected of losing replicas. ``O(1)``."""
        request = attempt.request
        whole = not request.prefill_only and request.kv_handle is None and request.resume is None
        stated = answer.call.slo.ttft_s is not None
        if request.promised and stated and whole and not (answer.moved or answer.case.suspected):
            self._waiting[attempt.key] = attempt, answer

    def forget(self, attempt: Attempt) -> None:
        """The attempt no longer waits. ``O(1)``."""
        self._waiting.pop(attempt.key, None)

    def waits(self) -> tuple[FirstTokenWait, ...]:
        """The waiting calls that are not late yet; of more than ``MAX_WAITS``, those due soonest.
        ``O(waiting calls)``."""
        now_s, found = self._clock(), []
        for key, (attempt, answer) in self._waiting.items():
            ttft_s, waited_s = answer.call.slo.columns[0], now_s - answer.call.received_s
            if waited_s < ttft_s and key not in self._moving:
                chosen = attempt.decision.replica_id or ""
                found.append(FirstTokenWait(key, chosen, ttft_s, waited_s))
        return tuple(
            heapq.nsmallest(MAX_WAITS, found, key=lambda wait: wait.ttft_s - wait.waited_s)
        )

    def missing(self, keys: Sequence[int]) -> None:
        """Move these calls, which are going to miss their TTFT. Keys of calls that no longer wait
        are ignored."""
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None and key not in self._moving:
                self._moving[key] = asyncio.create_task(self._move(*waiting), name="move")

    async def _move(self, attempt: Attempt, answer: Answer) -> None:
        """Abandon an attempt, if another replica can guarantee what is left of the SLO and the
        attempt has produced nothing meanwhile."""
        key, chosen = request_key(answer.moved_id), attempt.decision.replica_id or ""
        try:
            found = await self._placements.elsewhere(answer.call, key, answer.failed, chosen)
            if found is None:
                return
            if attempt.opened or not attempt.give_up(MovedError()):
                self._controller.release(key)
                return
            answer.moved, answer.moves_to = True, found
            answer.in_vain += 1
        finally:
            del self._moving[attempt.key]
