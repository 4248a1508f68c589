"""Requests that wait for the first replica of a model that had none.

The first of them makes Serve start a replica; all of them ask the controller again when it runs,
and now and then before that, as the prediction of the start may have become too late for an SLO.
Only requests whose SLO leaves the predicted time wait here; the controller refuses the others
(:mod:`sluice.scheduling.placement.cold_start`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from sluice.controller.messages import RouteDecision
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.admission import AdmissionMetrics
from sluice.router.serve.contract import ReplicaFailedError, Replicas
from sluice.router.tenancy.limits import Client
from sluice.scheduling.request.job import NO_REPLICA
from sluice.scheduling.tenancy.fair_shares import PLACES_PART

ASK_AGAIN_S: Final = 1.0
"""Time after which a waiting request asks again, though no replica runs yet, seconds."""

REGISTERS_S: Final = 0.05
"""Pause before the next question if a replica runs and has not registered yet, seconds."""

_log = logging.getLogger(__name__)

Ask = Callable[[], Awaitable[RouteDecision | None]]


class ColdStarts:
    """The waiting requests of one model. One per router process and model.

    Args:
        clock: monotonic seconds.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: RouterConfig,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self._replicas = replicas
        self._most = config.start_queue_length
        self._limit_s = config.start_wait_s
        self._metrics = metrics
        self._clock = clock
        self._pause = pause
        self._waiting: Counter[str] = Counter()
        self._start: asyncio.Task[None] | None = None

    async def decided(
        self, client: Client, decision: RouteDecision, ask: Ask, ttl_s: float = inf
    ) -> RouteDecision | None:
        """Start a replica. Returns the decision once there is one, or ``decision`` if that is a
        refusal.

        Args:
            decision: with ``starts_in_s``.
            ask: asks the controller again.
            ttl_s: longest wait that the client accepts, seconds.

        Raises:
            ApiError: 503; too many requests wait, the start takes too long, or no replica starts.
        """
        if decision.reason != NO_REPLICA:
            self._begin(decision)  # a retry is to find a replica
            return decision
        self._check_room(client, decision)
        joined_s, limit_s = self._clock(), min(self._limit_s, ttl_s)
        self._count(client, 1)
        found: RouteDecision | None = decision
        try:
            while (
                found is not None and found.reason == NO_REPLICA and found.starts_in_s is not None
            ):
                left_s = limit_s - (self._clock() - joined_s)
                if left_s <= 0:
                    message = "The model had no replica, and none has started within"
                    raise self._error(f"{message} {limit_s:g} seconds.", found)
                await self._turn(found, left_s)
                found = await ask()
            return found
        finally:
            self._count(client, -1)
            self._metrics.start_wait_s.observe(self._clock() - joined_s)

    def _begin(self, decision: RouteDecision) -> asyncio.Task[None]:
        """The start that is under way, or a new one."""
        if self._start is None or self._start.done():
            self._start = asyncio.create_task(self._started(decision))
            self._start.add_done_callback(_retrieved)
        return self._start

    async def _started(self, decision: RouteDecision) -> None:
        begun_s, asleep = self._clock(), self._replicas.asleep
        if asleep:
            _log.info("no replica runs: one starts, predicted time %.1f s", decision.starts_in_s)
        await self._replicas.wake()
        if asleep:
            _log.info("a replica runs, started in %.1f s", self._clock() - begun_s)

    async def _turn(self, decision: RouteDecision, left_s: float) -> None:
        """Return when the request should ask again, after ``left_s`` at the latest.

        Raises:
            ApiError: no replica starts.
        """
        runs, start = not self._replicas.asleep, self._begin(decision)
        rest = asyncio.ensure_future(self._pause(min(ASK_AGAIN_S, left_s)))
        try:
            await asyncio.wait((start, rest), return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
        if not start.done():
            return
        try:
            start.result()
        except ReplicaFailedError as failure:
            raise self._error(f"No replica starts: {failure}", decision) from failure
        if runs:
            await self._pause(REGISTERS_S)

    def _check_room(self, client: Client, decision: RouteDecision) -> None:
        free = self._most - self._waiting.total()
        if free <= 0 or not client.may_hold(self._waiting[client.owner], free, PLACES_PART):
            raise self._error(
                "The model had no replica, and as many requests as may wait for its first one; it "
                f"is predicted to serve in {decision.starts_in_s:.0f} seconds.",
                decision,
            )

    def _count(self, client: Client, change: int) -> None:
        self._waiting[client.owner] += change
        if not self._waiting[client.owner]:
            del self._waiting[client.owner]
        self._metrics.starting.inc(change)

    def _error(self, message: str, decision: RouteDecision) -> ApiError:
        return ApiError(Reason.MODEL_STARTING, message, retry_after_s=decision.starts_in_s)


def _retrieved(task: asyncio.Task[None]) -> None:
    """Mark a failure as retrieved: the waiting requests get it, and without any it is not
    logged."""
    if not task.cancelled():
        task.exception()
