"""When the engine's process collects its garbage: between batches, where it delays no deadline.

Python's collector stops the process for as long as it takes, at an arbitrary moment: FairBatching
§4 saw pauses of hundreds of milliseconds. As there, objects from start-up are never collected
again, and an explicit collection waits until no prefill is queued, the decodes have ample slack and
the last collection is long past. The paper gives no bound; ours is one collection a minute in any
case, so that garbage cannot pile up under a load that never pauses.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from math import inf

from sluice.scheduling.request.kernels import deadlines_s, is_prefill
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

logger = logging.getLogger(__name__)

LEAST_INTERVAL_S = 5.0
"""Min time between two collections."""

MOST_INTERVAL_S = 60.0
"""Max time between two collections while batches are planned."""

SLACK_FACTOR = 4.0
"""Slack is ample if it is this many times the duration of the last collection."""


class CollectionRule:
    """Decides when to collect; reads no clock and collects nothing.

    Args:
        now_s: start time, monotonic seconds; counts as a collection.
        least_s: min time between two collections.
        most_s: max time between two collections.
        pause_s: assumed duration of a collection until the first one was measured.

    Raises:
        ValueError: not ``0 <= least_s <= most_s``.
    """

    def __init__(
        self,
        now_s: float,
        least_s: float = LEAST_INTERVAL_S,
        most_s: float = MOST_INTERVAL_S,
        pause_s: float = 0.02,
    ) -> None:
        if not 0 <= least_s <= most_s:
            raise ValueError(f"need 0 <= least_s <= most_s, got {least_s} and {most_s}")
        self._last_s = now_s
        self._least_s = least_s
        self._most_s = most_s
        self._pause_s = pause_s

    def due(self, now_s: float, queue: QueueView, step_s: float) -> bool:
        """Whether to collect now, before a batch of ``queue`` that takes ``step_s`` seconds.

        ``O(1)`` within ``least_s`` of the last collection, ``O(requests)`` after.
        """
        since_s = now_s - self._last_s
        if since_s < self._least_s:
            return False
        return since_s >= self._most_s or self._calm(now_s, queue, step_s)

    def _calm(self, now_s: float, queue: QueueView, step_s: float) -> bool:
        table = queue.table
        if is_prefill(table).any():
            return False
        least_due_s = deadlines_s(table, Anchor.FIRST_TOKEN.code).min(initial=inf)
        return bool(least_due_s - now_s - step_s >= SLACK_FACTOR * self._pause_s)

    def collected(self, started_s: float, ended_s: float) -> None:
        """A collection took place."""
        self._last_s = ended_s
        self._pause_s = ended_s - started_s


class GarbageCollector:
    """Replaces Python's automatic garbage collection in this process, until :meth:`stop`.

    Args:
        clock: seconds, monotonic, the clock of the queue's times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rule: CollectionRule | None = None

    def before_batch(self, queue: QueueView, step_s: float) -> None:
        """Collect if it is time to; called before each batch of ``queue``, which takes ``step_s``.

        The first call ends the process's start-up: objects that exist then are never examined
        again.
        """
        started_s = self._clock()
        if self._rule is None:
            gc.disable()
            gc.collect()
            gc.freeze()
            self._rule = CollectionRule(self._clock())
        elif self._rule.due(started_s, queue, step_s):
            found = gc.collect()
            ended_s = self._clock()
            self._rule.collected(started_s, ended_s)
            logger.debug("collected %d objects in %.1f ms", found, 1e3 * (ended_s - started_s))

    def stop(self) -> None:
        """Turn Python's automatic collection on again. Idempotent."""
        if self._rule is not None:
            self._rule = None
            gc.unfreeze()
            gc.enable()
