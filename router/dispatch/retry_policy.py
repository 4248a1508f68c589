"""Whether a call whose attempt failed gets another one, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from sluice.router.dispatch.answer import Answer
from sluice.router.dispatch.pools import Pools
from sluice.router.dispatch.retry_budget import RetryBudget
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.serve.contract import ReplicaFailedError

RETRY_PAUSE_S: Final = 0.02
"""Pause before the second attempt, doubled before each later one, seconds: time for the report of a
dead replica to arrive, and a backoff for a failure that hits every replica."""


class RetryPolicy:
    """Limits attempts by call and, by the budget, in total. An attempt that found a pool empty does
    not count, and is repeated when another pool may be asked.

    Args:
        budget: of the router process.
        pools: where attempts go.
        metrics: count retries and refused ones.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        budget: RetryBudget,
        pools: Pools,
        metrics: RouterMetrics,
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self._budget = budget
        self._pools = pools
        self._metrics = metrics
        self._pause = pause

    def attempted(self, answer: Answer) -> None:
        """An attempt was made, of which the call's first counts for the budget. A call that was
        refused before it reached a replica does not count."""
        if answer.attempts == 1:
            self._budget.count_request()

    async def before_the_next(self, answer: Answer, failure: ReplicaFailedError) -> None:
        """Return when another attempt may be made.

        Raises:
            ReplicaFailedError: no further attempt may be made.
        """
        if answer.verdict is not None:
            raise answer.verdict from failure
        if failure.reason is Reason.NO_REPLICA:
            return await self._pools.wait(answer, failure)
        granted, answer.granted = answer.granted, False
        if not failure.retry or (answer.spent and not granted):
            raise failure
        if not granted and not self._budget.take():
            self._metrics.retries_refused.inc()
            raise failure
        self._metrics.retries.inc()
        await self._pause(RETRY_PAUSE_S * 2 ** (answer.made - 1))
