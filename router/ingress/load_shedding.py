"""Load shedding: keeps a router responsive under far more load than it can serve.

A refusal costs a router about as much as a short answer, and clients that retry at once turn one
refused request into hundreds a second. Two mechanisms bound that:

- :class:`Pace`: refusals are sent at a limited rate. A client that waits for one does not retry
  meanwhile, so the clients' retries have at most this rate, too.
- :class:`Shedder`: while the event loop falls behind all the same, new requests are refused before
  their bodies are read, first those of the clients that send the most.

Neither delays running streams or answers. The first needs no measurement, so it always treats the
same load alike. The second takes the minimum delay of a period as the standing delay, as CoDel
(Nichols and Jacobson, ACM Queue 10(5), 2012) does for packets, so that a single long step of the
loop causes no refusals.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from prometheus_client import Gauge, Histogram

MAX_HOLD_S: Final = 5.0
"""Longest time that a refusal waits for its turn, seconds."""

TICK_S: Final = 0.05
"""Interval between measurements of the event loop's delay, seconds."""

MAX_DELAY_S: Final = 0.05
"""A standing delay beyond this is overload, seconds. It delays every token of every stream."""

PERIOD_S: Final = 0.5
"""A delay must last this long to count as standing, seconds; the rate is updated as often."""

ALWAYS_PER_S: Final = 100.0
"""Requests a second of all clients together that are always accepted. If the event loop is late at
a lower rate, the cause is a machine short of CPU time and not the requests."""

Pause = Callable[[float], Awaitable[object]]
"""Sleeps for the given number of seconds."""

_FALL: Final = 0.7
_RISE: Final = 1.1


class Pace:
    """Spaces out refusals. One per router process. ``O(1)``.

    Args:
        per_s: refusals a second. After a pause, this many may be sent at once.
        most: maximum number of waiting refusals; further ones are sent without a wait.
        gauge: shows the number of waiting refusals.
        clock: monotonic seconds.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        per_s: float,
        most: int,
        gauge: Gauge,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._gap_s = 1 / per_s
        self._most = most
        self._gauge = gauge
        self._clock = clock
        self._pause = pause
        self._next_s = -inf
        self.held = 0
        """Number of waiting refusals."""

    async def turn(self) -> None:
        """Return when the refusal may be sent, after :data:`MAX_HOLD_S` at the latest."""
        now_s = self._clock()
        turn_s = max(self._next_s, now_s - 1.0)
        # The bound keeps a long overload from delaying refusals long after its end.
        self._next_s = min(turn_s + self._gap_s, now_s + MAX_HOLD_S)
        if turn_s <= now_s or self.held >= self._most:
            return
        self.held += 1
        self._gauge.inc()
        try:
            await self._pause(turn_s - now_s)
        finally:
            self.held -= 1
            self._gauge.dec()


class Shedder:
    """Decides which new requests a router accepts while its event loop falls behind. One per
    process.

    All clients have the same limit on their request rate. While there is a standing delay, the
    limit falls, starting at the rate of the client that sends the most; without one, it rises. So
    the clients that send few requests are refused last. ``O(1)`` for a request; memory for the
    clients of the last :data:`PERIOD_S`.

    Args:
        delays: observes the delay of the event loop.
        clock: monotonic seconds.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        delays: Histogram,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._delays = delays
        self._clock = clock
        self._pause = pause
        self._rate = inf
        self._began_s = clock()
        self._came: Counter[str] = Counter()
        self._least_delay_s = inf
        self._ticks = 0

    @property
    def rate(self) -> float:
        """Requests a second that each client may send; infinite where there is no overload."""
        return self._rate

    def takes(self, owner: str) -> bool:
        """Whether a new request of this client is accepted. Counts it."""
        self._came[owner] += 1
        if self._rate == inf:
            return True
        span_s = max(PERIOD_S, self._clock() - self._began_s)
        return self._came[owner] <= max(1.0, self._rate * span_s)

    async def watch(self) -> None:
        """Measure the delay of the event loop, indefinitely."""
        while True:
            due_s = self._clock() + TICK_S
            await self._pause(TICK_S)
            self.tick(self._clock() - due_s)

    def tick(self, delay_s: float) -> None:
        """Record that the event loop runs ``delay_s`` late."""
        self._delays.observe(delay_s)
        self._least_delay_s = min(self._least_delay_s, delay_s)
        self._ticks += 1
        now_s = self._clock()
        span_s = now_s - self._began_s
        # A single late tick may be one long step of the loop.
        if span_s < PERIOD_S or self._ticks < 2:
            return
        self._set_rate(max(self._came.values(), default=0) / span_s)
        self._began_s, self._least_delay_s, self._ticks = now_s, inf, 0
        self._came.clear()

    def _set_rate(self, most: float) -> None:
        """Update the rate after a period in which no client has sent more than ``most`` requests a
        second."""
        if self._least_delay_s > MAX_DELAY_S:
            least = ALWAYS_PER_S / max(1, len(self._came))
            self._rate = max(least, _FALL * min(self._rate, most))
        elif self._rate < inf:
            self._rate = _RISE * self._rate + 1
            if self._rate > 2 * most:
                self._rate = inf
