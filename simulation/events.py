"""The virtual clock: what happens next, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Handler = Callable[[], object]


class Events:
    """Calls at virtual times. Equal times run in the order in which they were asked for, so that a
    run is a function of its inputs. ``O(log n)`` per event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Handler]] = []
        self._order = count()

    def at(self, when_s: float, handler: Handler) -> None:
        """Call ``handler`` at ``when_s``, or now if that has passed."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), handler))

    def after(self, seconds: float, handler: Handler) -> None:
        """Call ``handler`` in ``seconds`` from now."""
        self.at(self.now_s + seconds, handler)

    def run_next(self) -> bool:
        """Move the clock to the next event and run it; ``False`` if there is none."""
        if not self._heap:
            return False
        self.now_s, _, handler = heapq.heappop(self._heap)
        handler()
        return True
