"""Admission queues: requests wait at the router until some replica can guarantee their SLO.

There is one queue per service class that queues. Its first few requests ask the controller
repeatedly, the others wait behind them; so a request is overtaken only by one of these few, whose
SLO or length is easier to guarantee. The clients in a queue take turns, and none takes all slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from math import inf

from sluice.controller.messages import RouteDecision
from sluice.router.config import ServiceClass
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.admission import AdmissionMetrics
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.scheduling.request.job import UNATTAINABLE
from sluice.scheduling.tenancy.fair_shares import PLACES_PART

ASKERS = 4
"""Requests of a queue that ask: enough that one request which no replica can guarantee does not
hold up the others, few enough that a long queue is no load on the controller."""

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Between two rounds of asking, seconds: half of the time after which there should be capacity,
within these bounds."""


def may_wait(decision: RouteDecision) -> bool:
    """Whether no replica can guarantee the request's SLO now, but one will be able to."""
    return decision.reason == UNATTAINABLE and decision.retry_after_s is not None


class Slot:
    """A request's slot in a queue.

    Attributes:
        called: set when the request should ask, or has no time left.
        answered: set when it has asked, or has left.
        refused: its last refusal, or the last one of any request in the queue before it joined.
        limit_s: longest wait, by the class and the client, seconds.
        late: its deadline passes before it has waited for that long.
    """

    def __init__(self, queue: AdmissionQueue, refused: RouteDecision | None) -> None:
        self._queue = queue
        self._expired = False
        self.called = asyncio.Event()
        self.answered = asyncio.Event()
        self.refused = refused
        self.limit_s = inf
        self.late = False

    async def turn(self) -> None:
        """Return when the request should ask the controller.

        Raises:
            ApiError: 429; its deadline has passed, or it has waited for too long.
        """
        await self.called.wait()
        if self._expired:
            raise self._queue.timeout(self)
        self.called.clear()

    def refuse(self, decision: RouteDecision) -> None:
        """The controller has refused the request once more: it waits on."""
        self.refused = self._queue.refused = decision
        self.answered.set()

    async def expire(self, pause: Callable[[float], Awaitable[object]], left_s: float) -> None:
        """Run out of time after ``left_s`` seconds."""
        await pause(max(0.0, left_s))
        self._expired = True
        self.called.set()


class AdmissionQueue:
    """The waiting requests of one class: each client's in order of arrival, and clients in turns.

    Attributes:
        refused: the last refusal of any request in it, or sent to it.

    Args:
        name: of the class. entry: its configuration.
        metrics: its length and its waiting times.
        clock: monotonic seconds.
        pause: sleeps for the given number of seconds.
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
        # By client; the client that was served last is last.
        self._slots: dict[str, dict[Slot, None]] = {}
        self._front_changed = asyncio.Event()
        self._caller: asyncio.Task[None] | None = None
        self.refused: RouteDecision | None = None

    def __len__(self) -> int:
        """Requests in it."""
        return self._length_now

    @contextmanager
    def slot(
        self,
        due_s: float,
        refused: RouteDecision | None = None,
        client: Client = ANYONE,
        ttl_s: float = inf,
    ) -> Iterator[Slot]:
        """A slot at the end of the queue, within the block. The request waits for its turn, asks
        the controller, and leaves the block unless it :func:`may_wait` on.

        Args:
            due_s: the request's deadline, on the clock; may be infinite.
            refused: the decision that sent the request here, if it has asked.
            client: of the request.
            ttl_s: longest wait that the client accepts, seconds, if the class allows a longer one.

        Raises:
            ApiError: 429; the queue is full.
        """
        self._check_room(client)
        joined_s = self._clock()
        left_s = due_s - joined_s
        slot, served = self._join(refused, client.owner), False
        slot.limit_s = min(self._limit_s, ttl_s)
        slot.late = left_s <= slot.limit_s
        expiry = asyncio.create_task(slot.expire(self._pause, min(slot.limit_s, left_s)))
        try:
            yield slot
            served = True
        finally:
            expiry.cancel()
            self._leave(slot, client.owner, served)
            self._wait_s.observe(self._clock() - joined_s)

    def timeout(self, slot: Slot) -> ApiError:
        """The error of a request whose time has run out."""
        if slot.late:
            reason = Reason.DEADLINE_PASSED
            message = "The SLO's deadline passed before a replica could guarantee it."
        else:
            reason = Reason.QUEUE_TIMEOUT
            message = f"No replica could guarantee this SLO within {slot.limit_s:g} seconds."
        return ApiError(reason, message, retry_after_s=_told_s(slot.refused))

    def _check_room(self, client: Client) -> None:
        message = f"The queue of this class is full: it holds at most {self._most} requests."
        free = self._most - self._length_now
        if free > 0:
            own = len(self._slots.get(client.owner, ()))
            if client.may_hold(own, free, PLACES_PART):
                return
            message = (
                f"This API key has {own} requests in the queue of this class already; more would "
                "leave too few slots for other keys."
            )
        raise ApiError(Reason.QUEUE_FULL, message, retry_after_s=_told_s(self.refused))

    def _join(self, refused: RouteDecision | None, owner: str) -> Slot:
        if refused is not None:
            self.refused = refused
        slot = Slot(self, self.refused)
        self._slots.setdefault(owner, {})[slot] = None
        self._length_now += 1
        self._length.inc()
        if refused is None and slot in self._front():
            self._front_changed.set()
        if self._caller is None or self._caller.done():
            self._caller = asyncio.create_task(self._call())
        return slot

    def _leave(self, slot: Slot, owner: str, served: bool) -> None:
        """The wait is over. A client whose request leaves before it could ask keeps its turn:
        otherwise a client with tight deadlines would never come to the front."""
        in_front = slot in self._front()
        if in_front:
            self._front_changed.set()
        own = self._slots[owner]
        del own[slot]
        if served or in_front or not own:
            del self._slots[owner]
            if own:
                self._slots[owner] = own
        self._length_now -= 1
        self._length.dec()
        slot.answered.set()

    def _front(self) -> list[Slot]:
        """The first :data:`ASKERS` requests: one of each client, then another one of each."""
        columns = [islice(own, ASKERS) for own in islice(self._slots.values(), ASKERS)]
        rounds = chain.from_iterable(zip_longest(*columns))
        return list(islice((slot for slot in rounds if slot is not None), ASKERS))

    async def _call(self) -> None:
        """Call the first few requests to ask, in order and in one turn of the event loop, so that
        they ask in that order. Repeat at once when the front has changed, else after a pause. Ends
        when the queue is empty."""
        while self._slots:
            if not self._front_changed.is_set():
                await self._rest()
            self._front_changed.clear()
            first = self._front()
            for slot in first:
                slot.answered.clear()
                slot.called.set()
            for slot in first:
                await slot.answered.wait()

    async def _rest(self) -> None:
        """Pause between two rounds, or until the front of the queue changes."""
        refused = [slot.refused for slot in self._front()]
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
    """When a client whose request leaves the queue should retry; ``None`` where the controller has
    predicted nothing."""
    return None if refused is None else refused.retry_after_s
