"""Retry budget of a router: retries are limited to a share of its requests, so that they do not
multiply failures which hit every replica."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from sluice.router.config import RetryBudgetConfig

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
