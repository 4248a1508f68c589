"""Whether a call whose attempt failed gets another one, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from sluice.router.config import RetryBudgetConfig
from sluice.router.dispatch.answer import Answer
from sluice.router.dispatch.pools import Pools
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.serve.contract import ReplicaFailedError

# Retry budget of a router: retries are limited to a share of its requests, so that they do not
# multiply failures which hit every replica.

_SLOTS: Final = 20
"""Parts of the sliding window: counts expire one part at a time."""


class RetryBudget:
    """One per router process. ``O(1)``, in time and in memory.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, config: RetryBudgetConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        # Slot number, requests, retries; ascending.
        self._slots: deque[list[int]] = deque()
        self._requests = 0
        self._retries = 0

    def count_request(self) -> None:
        """A request makes its first attempt."""
        self._slot()[1] += 1
        self._requests += 1

    def take(self) -> bool:
        """Whether one more attempt may be made now. If so, it is counted."""
        slot = self._slot()
        if self._retries >= self._config.floor + self._config.ratio * self._requests:
            return False
        slot[2] += 1
        self._retries += 1
        return True

    def _slot(self) -> list[int]:
        """The current slot. Slots that have left the window are dropped."""
        number = int(self._clock() / self._config.window_s * _SLOTS)
        while self._slots and self._slots[0][0] <= number - _SLOTS:
            _, requests, retries = self._slots.popleft()
            self._requests -= requests
            self._retries -= retries
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, 0, 0])
        return self._slots[-1]


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
