"""What the simulated router tells the controller of guaranteed requests and of those that ended, as
:mod:`sluice.router.dispatch.endings` does."""

from __future__ import annotations

from sluice.simulation.cells import CellMirrors
from sluice.simulation.events import Events
from sluice.simulation.judged import late, observed
from sluice.simulation.mirror import VirtualMirror
from sluice.simulation.requests import Requests


class Endings:
    """Pushes every ``interval_s`` while there is something to push; nothing where the mirror learns
    no margins.

    Args:
        requests: of the run.
        mirror: learns from them.
        events: the clock.
        interval_s: time between two pushes, seconds.
    """

    def __init__(
        self,
        requests: Requests,
        mirror: VirtualMirror | CellMirrors,
        events: Events,
        interval_s: float,
    ) -> None:
        self._requests = requests
        self._mirror = mirror
        self._events = events
        self._interval_s = interval_s
        # Guaranteed requests in progress, and requests that ended since the last push.
        self._promised: set[int] = set()
        self._untold: list[int] = []
        self._pushes = False

    def promised(self, key: int) -> None:
        """A request is guaranteed its objective."""
        if self._mirror.calibration is not None:
            self._promised.add(key)
            self._push_soon()

    def ended(self, key: int) -> None:
        """A request ended."""
        if self._mirror.calibration is not None:
            self._promised.discard(key)
            self._untold.append(key)
            self._push_soon()

    def _push_soon(self) -> None:
        if not self._pushes:
            self._pushes = True
            next_s = (self._events.now_s // self._interval_s + 1) * self._interval_s
            # 0.5 // 0.1 is 4, so the product may be now.
            later_s = 0.0 if next_s > self._events.now_s else self._interval_s
            self._events.at(next_s + later_s, self._push)

    def _push(self) -> None:
        """Report late guaranteed requests, and request endings since the last push."""
        requests, now_s = self._requests, self._events.now_s
        self._pushes = False
        for key in sorted(self._promised):
            self._mirror.behind(key, *late(requests, key), now_s)
        for key in self._untold:
            arrival = requests.arrivals[key]
            found = observed(requests, key)
            name, tokens = arrival.slo.service_class, arrival.output_tokens
            self._mirror.learn(key, found, name, tokens, now_s)
        self._untold.clear()
        if self._promised:
            self._push_soon()
