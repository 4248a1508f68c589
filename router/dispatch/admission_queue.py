"""Lines of requests that wait at the router until some replica can promise their objective.

One line per service class that queues. Its first few ask the controller again and again, the others
wait behind them; so a request is overtaken only by one of the few beside it, whose objective or
length is easier to promise. The clients in a line take turns, and none takes all places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, islice, zip_longest

from controller.messages import RouteDecision
from router.config import ServiceClass
from router.errors import ApiError, Reason
from router.metrics.admission import AdmissionMetrics
from router.tenancy.limits import ANYONE, Client
from scheduling.fair_shares import PLACES_PART
from scheduling.job import UNATTAINABLE

ASKERS = 4
"""How many of a line ask: enough that one request which nobody can promise does not hold up the
others, few enough that a long line is no load on the controller."""

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Between two rounds of asking, seconds: half of the time after which there should be capacity,
within these bounds."""

Ask = Callable[[], Awaitable[RouteDecision | None]]


def may_wait(decision: RouteDecision) -> bool:
    """Whether no replica can promise the request's objective, but one will."""
    return decision.reason == UNATTAINABLE and decision.retry_after_s is not None


class _Place:
    """A request's place in a line. ``called`` is set when the request should ask or has no time
    left, ``answered`` when it has asked or is gone. ``refused`` is the last that it was told, or
    that anyone was before it came."""

    def __init__(self, refused: RouteDecision | None) -> None:
        self.called = asyncio.Event()
        self.answered = asyncio.Event()
        self.expired = False
        self.refused = refused

    async def expire(self, pause: Callable[[float], Awaitable[object]], left_s: float) -> None:
        """Run out of time after ``left_s`` seconds."""
        await pause(max(0.0, left_s))
        self.expired = True
        self.called.set()


class AdmissionQueue:
    """The requests of one class that wait: each client's in the order in which they came, and
    clients in turns.

    Args:
        name: of the class. entry: its configuration.
        metrics: what is counted.
        clock: monotonic seconds.
        pause: waits for that many seconds.
    """

    def __init__(
        self,
        name: str,
        entry: ServiceClass,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self._limit_s = entry.queue_limit_s
        self._most = entry.queue_length
        self._length = metrics.line_length.labels(name)
        self._wait_s = metrics.line_wait_s.labels(name)
        self._clock = clock
        self._pause = pause
        self._length_now = 0
        # By client; who was served last is last.
        self._places: dict[str, dict[_Place, None]] = {}
        self._front_changed = asyncio.Event()
        self._caller: asyncio.Task[None] | None = None
        self._refused: RouteDecision | None = None

    def __len__(self) -> int:
        """Requests in it."""
        return self._length_now

    async def wait(
        self,
        ask: Ask,
        due_s: float,
        refused: RouteDecision | None = None,
        client: Client = ANYONE,
    ) -> RouteDecision | None:
        """Wait at the end of the line for the first answer of ``ask`` that is another than that
        waiting may help.

        Cancelling it leaves the line at once.

        Args:
            ask: asks the controller.
            due_s: when the request is late, on the clock; may be infinite.
            refused: the answer that sent the request here, if it has asked.
            client: whose it is.

        Raises:
            ApiError: 429; the line is full, the request is late, or has waited for too long.
        """
        self._check_room(client)
        joined_s = self._clock()
        place, served = self._join(refused, client.owner), False
        expiry = asyncio.create_task(
            place.expire(self._pause, min(self._limit_s, due_s - joined_s))
        )
        try:
            while True:
                await place.called.wait()
                if place.expired:
                    raise self._too_late(place, late=due_s - joined_s <= self._limit_s)
                place.called.clear()
                decision = await ask()
                if decision is None or not may_wait(decision):
                    served = True
                    return decision
                place.refused = self._refused = decision
                place.answered.set()
        finally:
            expiry.cancel()
            self._leave(place, client.owner, served)
            self._wait_s.observe(self._clock() - joined_s)

    def _too_late(self, place: _Place, late: bool) -> ApiError:
        if late:
            reason = Reason.DEADLINE_PASSED
            message = "The objective's deadline passed before a replica could promise it."
        else:
            reason = Reason.QUEUE_TIMEOUT
            message = f"No replica could promise the objective within {self._limit_s:g} seconds."
        return ApiError(reason, message, retry_after_s=_told_s(place.refused))

    def _check_room(self, client: Client) -> None:
        message = f"{self._most} requests of this class wait already, which is the limit."
        free = self._most - self._length_now
        if free > 0:
            own = len(self._places.get(client.owner, ()))
            if client.may_hold(own, free, PLACES_PART):
                return
            message = (
                f"{own} requests of this class wait already with this API key, and more would "
                "leave too little room for others."
            )
        raise ApiError(Reason.QUEUE_FULL, message, retry_after_s=_told_s(self._refused))

    def _join(self, refused: RouteDecision | None, owner: str) -> _Place:
        if refused is not None:
            self._refused = refused
        place = _Place(self._refused)
        self._places.setdefault(owner, {})[place] = None
        self._length_now += 1
        self._length.inc()
        if refused is None and place in self._front():
            self._front_changed.set()
        if self._caller is None or self._caller.done():
            self._caller = asyncio.create_task(self._call())
        return place

    def _leave(self, place: _Place, owner: str, served: bool) -> None:
        """It is over. Whose request leaves before it could ask keeps its turn: else who gives its
        requests little time would never come to the front."""
        in_front = place in self._front()
        if in_front:
            self._front_changed.set()
        own = self._places[owner]
        del own[place]
        if served or in_front or not own:
            del self._places[owner]
            if own:
                self._places[owner] = own
        self._length_now -= 1
        self._length.dec()
        place.answered.set()

    def _front(self) -> list[_Place]:
        """The first few: one of each client, then another one of each."""
        columns = [islice(own, ASKERS) for own in islice(self._places.values(), ASKERS)]
        rounds = chain.from_iterable(zip_longest(*columns))
        return list(islice((place for place in rounds if place is not None), ASKERS))

    async def _call(self) -> None:
        """Call the first few to ask, in order and in one turn of the event loop, so that they ask
        in that order. Again at once when the front has changed, else after a pause. Ends with the
        line."""
        while self._places:
            if not self._front_changed.is_set():
                await self._rest()
            self._front_changed.clear()
            first = self._front()
            for place in first:
                place.answered.clear()
                place.called.set()
            for place in first:
                await place.answered.wait()

    async def _rest(self) -> None:
        """Pause between two rounds, or until the front of the line changes."""
        refused = [place.refused for place in self._front()]
        known = [0.0 if each is None else each.room_s or 0.0 for each in refused]
        pause_s = min(max(min(known) / 2, MIN_PAUSE_S), MAX_PAUSE_S)
        ends = [
            asyncio.ensure_future(self._pause(pause_s)),
            asyncio.ensure_future(self._front_changed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()


def _told_s(refused: RouteDecision | None) -> float | None:
    """After how long who leaves the line should come again, if anybody was told."""
    return None if refused is None else refused.retry_after_s
