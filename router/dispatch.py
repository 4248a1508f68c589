"""From a validated call to an open response, and on to its end: attempts, while they fail.

What has been sent to the client decides what is left to do: nothing, and the call is made again on
another replica; some of a stream, and another replica goes on with it where that is possible. An
event stream counts as open when it holds its first bytes, any other response when it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from router.answer import Answer, Attempt, ReplicaFailedError
from router.call import Call
from router.config import RouterConfig
from router.destinations import Controller, Destinations
from router.errors import ApiError, Reason
from router.handover import may_resume
from router.legs import Course, Legs, Replicas
from router.metrics import RouterMetrics
from router.prompt_size import TokenEstimator
from router.retry_budget import RetryBudget
from router.transcript import Transcript

RETRY_PAUSE_S = 0.02
"""Pause before the second attempt, doubled before each later one: time for the news of a dead
replica to arrive, and a brake on a failure that hits every replica."""


class Dispatcher:
    """Opens responses. One per router process.

    Args:
        clock: monotonic seconds; the one of :attr:`Call.received_s`.
        pause: waits for that many seconds.
    """

    def __init__(
        self,
        controller: Controller,
        replicas: Replicas,
        metrics: RouterMetrics,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self._destinations = Destinations(controller, metrics, config, clock, pause)
        self._legs = Legs(controller, replicas, self._destinations, metrics, clock)
        self._budget = RetryBudget(config.retry_budget, clock)
        self._metrics = metrics
        self._max_attempts = config.max_attempts
        self._pause = pause

    @property
    def estimator(self) -> TokenEstimator:
        """Learns from answers how long prompts are."""
        return self._destinations.estimator

    async def open(self, call: Call) -> Answer:
        """Send ``call`` to a replica, and to another while attempts fail.

        Cancelling it stops the attempt under way.

        Raises:
            ApiError: every attempt failed, and it tells of the last one; or the objective cannot be
                promised and the call may not be served without.
        """
        course = Course(call, Transcript() if may_resume(call) else None)
        try:
            attempt = await self._attempts(course)
        except ReplicaFailedError as failure:
            raise ApiError(failure.reason, str(failure)) from failure
        if call.scheduled:
            self._metrics.admission.admitted(call.slo.service_class, attempt.tier)
        return Answer(attempt, partial(self._resume, course))

    async def _attempts(self, course: Course) -> Attempt:
        """The first attempt that does not fail.

        Raises:
            ReplicaFailedError: none is left; it is the last one's.
            ApiError: see :meth:`open`.
        """
        while True:
            try:
                attempt = await self._legs.attempt(course)
            except ReplicaFailedError as failure:
                self._count_first(course)
                await self._before_the_next(course, failure)
            else:
                self._count_first(course)
                return attempt

    def _count_first(self, course: Course) -> None:
        """A call that was refused before it reached a replica gives no right to retries."""
        if course.attempts == 1:
            self._budget.count_request()

    async def _before_the_next(self, course: Course, failure: ReplicaFailedError) -> None:
        """Return when another attempt may be made.

        Raises:
            ReplicaFailedError: there must be none.
        """
        # To find a pool empty has cost nobody anything.
        if course.attempts - len(course.empty) >= self._max_attempts:
            raise failure
        if failure.reason is Reason.NO_REPLICA and self._legs.whole(course):
            return
        if not failure.retry:
            raise failure
        if not self._budget.take():
            self._metrics.retries_refused.inc()
            raise failure
        self._metrics.retries.inc()
        await self._pause(RETRY_PAUSE_S * 2 ** (course.attempts - 1))

    async def _resume(
        self, course: Course, broken: Attempt, failure: ReplicaFailedError
    ) -> Attempt:
        """An attempt that goes on with a stream that broke off.

        Raises:
            ReplicaFailedError: none does.
        """
        broken.end_span(failure.reason.value)
        broken.close()
        self._legs.note_failure(course, broken.head.replica_id, failure)
        if course.transcript is None or not course.transcript.resumable:
            raise failure
        await self._before_the_next(course, failure)
        try:
            attempt = await self._attempts(course)
        except ApiError:  # nobody takes it as it is
            raise failure from None
        self._metrics.resumes.inc()
        return attempt
