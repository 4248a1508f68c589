"""What keeps a router up when far more comes than it can serve.

A refusal costs a router about as much as a short answer, and clients that come again at once turn
one refused request into hundreds a second. Two things bound that:

- :class:`Pace`: refusals leave at a rate. Who waits for one does not ask again meanwhile, so
  however many clients retry at once, they retry no faster than that;
- :class:`Shedder`: while the event loop falls behind all the same, new requests are turned away
  before their bodies are read, those of the clients that send most of them first.

Streams under way, and what is answered, are delayed by neither. The first needs no measurement, so
that the same load is always treated alike; the second takes the least delay of some time as a
standing one, as CoDel (Nichols and Jacobson, ACM Queue 10(5), 2012) does for packets, so that one
long step of the loop turns nobody away.
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
"""How often the delay of the event loop is measured, seconds."""

MAX_DELAY_S: Final = 0.05
"""A standing delay beyond this is overload, seconds. Every token of every stream is late by it."""

PERIOD_S: Final = 0.5
"""For so long a delay must have stood, seconds; the rate is set anew as often."""

ALWAYS_PER_S: Final = 100.0
"""So many requests a second of all clients together are always taken: fewer are not what keeps an
event loop busy, but a machine that is short of time."""

Pause = Callable[[float], Awaitable[object]]
"""Waits for that many seconds."""

_FALL: Final = 0.7
_RISE: Final = 1.1


class Pace:
    """Spaces out refusals. One per router process. ``O(1)``.

    Args:
        per_s: how many leave in a second. As many leave at once after a pause.
        most: how many wait at once; any more do not wait.
        gauge: shows how many wait.
        clock: monotonic seconds.
        pause: waits for that many seconds.
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
        """How many wait."""

    async def turn(self) -> None:
        """Return when the refusal may leave, after :data:`MAX_HOLD_S` at the latest."""
        now_s = self._clock()
        turn_s = max(self._next_s, now_s - 1.0)
        # Without a bound a long storm would be a long debt of those who come after it.
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
    """Decides which new requests a router takes while its event loop falls behind. One per process.

    All clients may send the same rate of requests. It falls while there is a standing delay, from
    that of the client which sends most, and rises when there is none; so who sends little is turned
    away last. ``O(1)`` for a request; memory for the clients of the last :data:`PERIOD_S`.

    Args:
        delays: observes the delay of the event loop.
        clock: monotonic seconds.
        pause: waits for that many seconds.
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
        """Whether a new request of this client is taken. Counts it."""
        self._came[owner] += 1
        if self._rate == inf:
            return True
        span_s = max(PERIOD_S, self._clock() - self._began_s)
        return self._came[owner] <= max(1.0, self._rate * span_s)

    async def watch(self) -> None:
        """Measure the delay of the event loop, for ever."""
        while True:
            due_s = self._clock() + TICK_S
            await self._pause(TICK_S)
            self.tick(self._clock() - due_s)

    def tick(self, delay_s: float) -> None:
        """What was to run just now runs ``delay_s`` late."""
        self._delays.observe(delay_s)
        self._least_delay_s = min(self._least_delay_s, delay_s)
        self._ticks += 1
        now_s = self._clock()
        span_s = now_s - self._began_s
        # A single late one may be one long step of the loop.
        if span_s < PERIOD_S or self._ticks < 2:
            return
        self._set_rate(max(self._came.values(), default=0) / span_s)
        self._began_s, self._least_delay_s, self._ticks = now_s, inf, 0
        self._came.clear()

    def _set_rate(self, most: float) -> None:
        """Set the rate anew, after a period in which no client has sent more than ``most`` a
        second."""
        if self._least_delay_s > MAX_DELAY_S:
            least = ALWAYS_PER_S / max(1, len(self._came))
            self._rate = max(least, _FALL * min(self._rate, most))
        elif self._rate < inf:
            self._rate = _RISE * self._rate + 1
            if self._rate > 2 * most:
                self._rate = inf
