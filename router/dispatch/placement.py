"""A call's placement and tier: the controller's decision, and what its class does on a refusal."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from math import inf
from typing import Any, Final

from sluice.controller.client import ControllerClient
from sluice.protocol.requests import NO_TURN, request_key
from sluice.router import wire
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.dispatch.attempt import Waits
from sluice.router.dispatch.retries import may_split
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import AdmissionMetrics, Fallback, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.loop import Loop
from sluice.router.request.prompt import TokenEstimator
from sluice.router.serve.contract import ReplicaFailedError, Replicas
from sluice.router.serve.hint import START_WAIT_S
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.request.job import (
    DECLINED,
    MAX_TOKENS,
    NO_REPLICA,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
    Tier,
)
from sluice.scheduling.tenancy.attained import ProgramTokens
from sluice.scheduling.tenancy.fair_shares import PLACES_PART

# Admission queues: requests wait at the router until some replica can promise their SLO.
#
# There is one queue per service class that queues. Its first few requests ask the controller
# repeatedly, the others wait behind them; so a request is overtaken only by one of these few,
# whose SLO or length is easier to promise, or by one of its client's whose program has had fewer
# tokens lately. The clients in a queue take turns, and none takes all slots.

MAX_WAITING = 256
"""Maximum requests of one class, or of one model without a replica, that wait in one router."""

MIN_GIVEN, MIN_FETCHED = 0.9, 1_024.0
"""Share of the tokens counted on below which a replica gives too few, and fewest counted on."""

ASKERS = 4  # requests of a queue that ask: one without a promise must not hold up the others

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Longest pause between two rounds of asking (half of the predicted wait), seconds."""


def may_wait(decision: RouteDecision) -> bool:
    """Whether no replica can promise the request's SLO now, but one will be able to."""
    return decision.reason == UNATTAINABLE and decision.retry_after_s is not None


@dataclass(slots=True, eq=False)
class Slot:
    """A request's slot in a queue. ``called``: it should ask, or has no time left. ``refused``: its
    last refusal, or the queue's before. ``late``: its deadline passes before ``limit_s`` seconds.
    ``attained``: what its program had when it came."""

    queue: AdmissionQueue
    refused: RouteDecision | None
    attained: float = 0.0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    expired: bool = False
    limit_s: float = inf
    late: bool = False

    async def wait(self) -> None:
        """Return when it should ask. Raises ApiError: 429; it is late, or has waited too long."""
        await self.called.wait()
        if self.expired:
            raise self.queue.timeout(self)
        self.called.clear()

    def refuse(self, decision: RouteDecision) -> None:
        """The controller has refused the request once more: it waits on."""
        self.refused = self.queue.refused = decision
        self.answered.set()

    async def expire(self, pause: Callable[[float], Awaitable[object]], left_s: float) -> None:
        """Run out of time after ``left_s`` seconds."""
        await pause(max(0.0, left_s))
        self.expired = True
        self.called.set()


class AdmissionQueue:
    """One class's waiting requests: each client's by what their programs have attained, then by
    arrival, and clients in turns. ``refused``: the last refusal of any request in it, or sent to
    it."""

    def __init__(
        self,
        name: str,
        entry: ServiceClass,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self._limit_s = entry.queue_limit_s
        self._most = MAX_WAITING
        self._length = metrics.queue_length.labels(name)
        self._wait_s = metrics.queue_wait_s.labels(name)
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
        attained: float = 0.0,
    ) -> Iterator[Slot]:
        """A slot in the queue, within the block, which the request leaves unless it
        :func:`may_wait` on. ``due_s``: its deadline on the clock. ``ttl_s``: the client's longest
        wait, seconds. ``attained``: by its program. Raises ApiError: 429; the queue is full."""
        self._check_room(client)
        joined_s = self._clock()
        left_s = due_s - joined_s
        slot, served = self._join(refused, client.owner, attained), False
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
            message = "The SLO's deadline passed before a replica could promise it."
        else:
            reason = Reason.QUEUE_TIMEOUT
            message = f"No replica could promise this SLO within {slot.limit_s:g} seconds."
        return ApiError(reason, message, retry_after_s=_retry_after_s(slot.refused))

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
        raise ApiError(Reason.QUEUE_FULL, message, retry_after_s=_retry_after_s(self.refused))

    def _join(self, refused: RouteDecision | None, owner: str, attained: float) -> Slot:
        if refused is not None:
            self.refused = refused
        slot = Slot(self, self.refused, attained)
        own = self._slots.setdefault(owner, {})
        behind = [each for each in own if each.attained > attained]
        own[slot] = None
        for each in behind:
            own[each] = own.pop(each)
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
        """Call the first few in one turn of the event loop, so that they ask in order; repeat."""
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


def _retry_after_s(refused: RouteDecision | None) -> float | None:
    """When to retry, seconds; ``None`` if the controller has predicted nothing."""
    return None if refused is None else refused.retry_after_s


# Requests that wait for the first replica of a model that had none.
#
# The first of them makes Serve start a replica; all of them ask the controller again when it runs,
# and now and then before that, as the prediction of the start may have become too late for an SLO.
# Only requests whose SLO leaves the predicted time wait here; the controller refuses the others
# (:mod:`sluice.scheduling.placement.cold_start`).

ASK_AGAIN_S: Final = 1.0
"""Time after which a waiting request asks again, though no replica runs yet, seconds."""

REGISTERS_S: Final = 0.05
"""Pause before the next question if a replica runs and has not registered yet, seconds."""

_log = logging.getLogger(__name__)

Ask = Callable[[], Awaitable[RouteDecision | None]]


@dataclass(slots=True)
class ColdStarts:
    """The waiting requests of one model. One per router process and model."""

    replicas: Replicas
    metrics: AdmissionMetrics
    clock: Callable[[], float]
    pause: Callable[[float], Awaitable[object]]
    waiting: Counter[str] = field(default_factory=Counter)
    start: asyncio.Task[None] | None = None

    async def decided(
        self, client: Client, decision: RouteDecision, ask: Ask, ttl_s: float = inf
    ) -> RouteDecision | None:
        """Start a replica and return the decision then, or ``decision`` if that is a refusal.
        ``ttl_s``: the client's longest wait, seconds. Raises ApiError: 503; too many wait, the
        start takes too long, or no replica starts."""
        if decision.reason != NO_REPLICA:
            self._begin(decision)  # a retry is to find a replica
            return decision
        self._check_room(client, decision)
        joined_s, limit_s = self.clock(), min(START_WAIT_S, ttl_s)
        self._count(client, 1)
        found: RouteDecision | None = decision
        try:
            while (
                found is not None and found.reason == NO_REPLICA and found.starts_in_s is not None
            ):
                left_s = limit_s - (self.clock() - joined_s)
                if left_s <= 0:
                    message = "The model had no replica, and none has started within"
                    raise self._error(f"{message} {limit_s:g} seconds.", found)
                await self._turn(found, left_s)
                found = await ask()
            return found
        finally:
            self._count(client, -1)
            self.metrics.start_wait_s.observe(self.clock() - joined_s)

    def _begin(self, decision: RouteDecision) -> asyncio.Task[None]:
        """The start that is under way, or a new one."""
        if self.start is None or self.start.done():
            self.start = asyncio.create_task(self._started(decision))
            self.start.add_done_callback(retrieved)
        return self.start

    async def _started(self, decision: RouteDecision) -> None:
        begun_s, asleep = self.clock(), self.replicas.asleep
        if asleep:
            _log.info("no replica runs: one starts, predicted time %.1f s", decision.starts_in_s)
        await self.replicas.wake()
        if asleep:
            _log.info("a replica runs, started in %.1f s", self.clock() - begun_s)

    async def _turn(self, decision: RouteDecision, left_s: float) -> None:
        """Return when it should ask, ``left_s`` at the latest. Raises ApiError: no replica
        starts."""
        runs, start = not self.replicas.asleep, self._begin(decision)
        rest = asyncio.ensure_future(self.pause(min(ASK_AGAIN_S, left_s)))
        try:
            await asyncio.wait((start, rest), return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
        if not start.done():
            return
        try:
            start.result()
        except ReplicaFailedError as failure:
            if failure.given_up:
                raise ApiError(failure.reason, str(failure)) from failure
            raise self._error(f"No replica starts: {failure}", decision) from failure
        if runs:
            await self.pause(REGISTERS_S)

    def _check_room(self, client: Client, decision: RouteDecision) -> None:
        free = MAX_WAITING - self.waiting.total()
        if free <= 0 or not client.may_hold(self.waiting[client.owner], free, PLACES_PART):
            raise self._error(
                "The model had no replica, and as many requests as may wait for its first one; it "
                f"is predicted to serve in {decision.starts_in_s:.0f} seconds.",
                decision,
            )

    def _count(self, client: Client, change: int) -> None:
        self.waiting[client.owner] += change
        if not self.waiting[client.owner]:
            del self.waiting[client.owner]
        self.metrics.starting.inc(change)

    def _error(self, message: str, decision: RouteDecision) -> ApiError:
        return ApiError(Reason.MODEL_STARTING, message, retry_after_s=decision.starts_in_s)


def retrieved(task: asyncio.Task[Any]) -> None:
    """Mark a failure as retrieved, so that asyncio does not log it if no one waits."""
    if not task.cancelled():
        task.exception()


_ANY_TIER = frozenset(Tier)
_GUARANTEED_ONLY = frozenset({Tier.GUARANTEED})
_BEST_EFFORT_ONLY = frozenset({Tier.BEST_EFFORT})


LOOP_RETRY_S = 10.0  # when to try again to begin a loop that cannot be promised, seconds
FULL_FOR_S = 5.0  # longest time for which one decision marks a class as out of capacity, seconds


UNDECIDED: Final = RouteDecision(None, "undecided")
"""No decision (controller unreachable, or none needed): Serve's balancing chooses."""


def unpromised(decision: RouteDecision) -> RouteDecision:
    """The decision for other replicas than the chosen ones: a promise does not hold there."""
    if decision.tier is not Tier.GUARANTEED:
        return decision
    return decision._replace(tier=None, predicted_ttft_s=None, planned=None)


class PlacementClient:
    """Asks the controller for placements. One per router process."""

    def __init__(
        self,
        estimator: TokenEstimator,
        controller: ControllerClient,
        metrics: RouterMetrics,
        config: RouterConfig,
        replicas: Replicas,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
        fetches_kv: bool = False,
    ) -> None:
        self.fetches_kv = float(MAX_TOKENS if fetches_kv else 0)
        """Most tokens that a replica can fetch of what another one has cached of a prompt."""
        self._estimator = estimator
        self._controller = controller
        self._metrics = metrics
        self._clock = clock
        classes = config.classes.items()
        self._promised_only = {
            name for name, entry in classes if entry.when_unattainable != "best_effort"
        }
        self._full_until_s: dict[str, float] = {}
        self._cold_starts = ColdStarts(replicas, metrics.admission, clock, pause)
        self._had = ProgramTokens()
        self._queues = {
            name: AdmissionQueue(name, entry, metrics.admission, clock, pause)
            for name, entry in classes
            if entry.when_unattainable == "queue"
        }

    async def find(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int = 0,
        begun: bool = False,
        waits: Waits | None = None,
    ) -> RouteDecision:
        """The decision on ``call`` under this key, none of ``failed``. ``prefill_key``: for a
        separate prefill replica. ``begun``: a part is sent already, so any tier will do. ``waits``:
        notes its waits. Raises ApiError: 429; no promise and no best effort. 503; no replica, and
        it cannot wait."""
        waits = waits or Waits()
        if call.span is None:
            return await self._find(call, key, failed, prefill_key, begun, waits)
        span = call.span.child("decision")
        try:
            found = await self._find(call, key, failed, prefill_key, begun, waits)
            predicted_s = found.predicted_ttft_s
            span.set(
                sluice__replica=found.replica_id,
                sluice__prefill_replica=found.prefill_id,
                sluice__tier=found.tier and found.tier.value,
                sluice__predicted_ttft_ms=None if predicted_s is None else 1000 * predicted_s,
            )
            return found
        except ApiError as error:
            span.set(error__type=error.reason.value)
            raise
        finally:
            span.end()

    async def _find(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int,
        begun: bool,
        waits: Waits,
    ) -> RouteDecision:
        if not call.scheduled:
            return _within(call, failed, UNDECIDED)
        decision = await self._decide(call, key, failed, prefill_key, begun, waits)
        if decision is None:
            self._metrics.fallbacks(Fallback.NO_ANSWER).inc()
            full = self._full_s(call) > 0
            undecided = UNDECIDED._replace(tier=Tier.BEST_EFFORT) if full else UNDECIDED
            return _within(call, failed, undecided)
        if decision.over_share:
            self._metrics.admission.over_share(call.client.name)
        if decision.reason == UNATTAINABLE:
            raise _refusal(call, decision)
        if decision.replica_id is None:
            self._metrics.fallbacks(Fallback.NO_DECISION).inc()
            return _within(call, failed, UNDECIDED)
        if failed:
            decision = self._but_failed(decision, key, prefill_key, failed)
        return _within(call, failed, decision) if call.only else decision

    async def quote(self, call: Call, token: str, hold_s: float, splits: bool) -> Quote | None:
        """See ``Dispatcher.quote``. ``splits``: two replicas may serve it."""
        tiers = _ANY_TIER
        if call.best_effort:
            tiers = _BEST_EFFORT_ONLY
        elif call.slo.stated and call.slo.service_class in self._promised_only:
            tiers = _GUARANTEED_ONLY
        query = RouteQuery(
            request_key(token),
            call.slo,
            self._estimator.estimate(call.prompt),
            tiers=tiers,
            output_tokens=call.output_tokens,
            session=call.affinity,
            prefix=call.prefix.hashes,
            prefill_key=request_key(f"{token}-prefill") if splits else 0,
            tenant=call.client.tenant,
            weight=call.client.caps.weight,
            # A refused request has a retry time; its quote has none.
            client_request_id=token,
            only=tuple(call.only),
            message_ends=call.prefix.message_ends,
            fetches_kv=self._may_fetch(call),
        )
        return await self._controller.quote(query, hold_s)

    def _may_fetch(self, call: Call) -> int:
        """How many tokens a replica may fetch of another one for this call."""
        if not self.fetches_kv or call.turn is None or not call.turn.session:
            return 0
        return int(self.fetches_kv) if may_split(call) else 0

    def fetched(self, tokens: int, wanted: int) -> None:
        """A replica has given KV of these tokens, of which as many as ``wanted`` were counted on.
        It gives no more than it may keep: what is counted on follows that."""
        if tokens < MIN_GIVEN * wanted:
            self.fetches_kv = max(float(tokens), MIN_FETCHED)
        elif self.fetches_kv:
            self.fetches_kv = min(max(self.fetches_kv, 1.25 * wanted), float(MAX_TOKENS))

    def ended(self, call: Call, tokens: int) -> None:
        """A call has ended after this number of computed tokens."""
        if self._queues and call.turn is not None and call.turn.program:
            self._had.add(call.turn.program, tokens, self._clock())

    async def promised(self, call: Call, key: int, prefill_key: int) -> RouteDecision | None:
        """A promise for the call as it is, or a decision without a replica, of which nothing is
        counted. ``None``: the controller does not answer."""
        queue = self._queues.get(call.slo.service_class)
        if queue is not None and len(queue) and not call.degraded:
            return RouteDecision(None, DECLINED)  # others have waited for the same for longer
        return await self._ask(call, key, (), prefill_key, _GUARANTEED_ONLY, elsewhere=True)

    async def elsewhere(
        self, call: Call, key: int, failed: Sequence[str], replica_id: str
    ) -> RouteDecision | None:
        """A promise elsewhere for a call that will miss its TTFT at ``replica_id``, or ``None``."""
        decision = await self._ask(call, key, failed, 0, _GUARANTEED_ONLY, replica_id)
        return decision if decision is not None and decision.tier is Tier.GUARANTEED else None

    async def with_kv(
        self, call: Call, key: int, avoid: Sequence[str], replica_id: str, tiers: frozenset[Tier]
    ) -> RouteDecision | None:
        """A decision on a stream that moves with its KV, none of ``avoid``. ``None``: it stays."""
        found = await self._ask(call, key, avoid, 0, tiers, replica_id, brings_kv=True)
        if found is None or found.replica_id is None:
            return None
        if found.replica_id in avoid:
            self._controller.release(key)
            return None
        return found

    def _full_s(self, call: Call) -> float:
        """For how long its class still counts as out of capacity, seconds."""
        return self._full_until_s.get(call.slo.service_class, -inf) - self._clock()

    def _but_failed(
        self, decision: RouteDecision, key: int, prefill_key: int, failed: Sequence[str]
    ) -> RouteDecision:
        """The decision without the replicas that have failed the call."""
        replica_id, prefill_id = decision.replica_id, decision.prefill_id
        if replica_id not in failed and prefill_id not in failed:
            return decision
        self._metrics.fallbacks(Fallback.REPEATED).inc()
        if prefill_id is not None:
            self._controller.release(prefill_key)
        if replica_id in failed:
            self._controller.release(key)
            replica_id = None
        return unpromised(decision)._replace(replica_id=replica_id, prefill_id=None)

    async def _decide(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int,
        begun: bool,
        waits: Waits,
    ) -> RouteDecision | None:
        """The decision, after the class's queue if any. Raises ApiError: 429; full, or too long."""
        slo, loop = call.slo, call.loop
        best_effort = call.best_effort
        if loop is not None:
            if loop.promised is False and slo.service_class in self._promised_only:
                raise _loop_refusal(slo.service_class, loop)
            best_effort = best_effort or loop.promised is False
            # A promised loop is not refused in its midst.
            begun = begun or loop.goes_on
        if best_effort:
            tiers = _BEST_EFFORT_ONLY
        # Without an SLO there is nothing to promise, whatever the class demands.
        elif not begun and slo.stated and slo.service_class in self._promised_only:
            tiers = _GUARANTEED_ONLY
        else:
            tiers = _ANY_TIER
        ask = partial(self._ask, call, key, failed, prefill_key, tiers)
        queue = self._queues.get(slo.service_class) if tiers == _GUARANTEED_ONLY else None
        if queue is None:
            return await self._answered(call, ask, tiers, waits)
        refused, waiting = None, len(queue) > 0
        # A request that arrives while others wait queues behind them, before it asks, unless
        # something is held for it.
        if not waiting or call.takes:
            held = partial(ask, elsewhere=waiting)
            refused = await self._answered(call, held, tiers, waits)
            if refused is not None and refused.reason == DECLINED:
                refused = None
            elif refused is None or not may_wait(refused):
                return refused
        ttft_s, _, e2e_s, _ = slo.columns
        due_s = call.received_s + min(ttft_s, e2e_s)
        turn, attained = call.turn, 0.0
        if turn is not None and turn.program:
            attained = self._had.of(turn.program, self._clock())
        joined_s = self._clock()
        with queue.slot(due_s, refused, call.client, call.queue_ttl_s, attained) as slot:
            while True:
                await slot.wait()
                waits.queue_s = self._clock() - joined_s
                decision = await self._answered(call, ask, tiers, waits)
                if decision is None or not may_wait(decision):
                    return decision
                slot.refuse(decision)

    async def _answered(
        self, call: Call, ask: Ask, tiers: frozenset[Tier], waits: Waits
    ) -> RouteDecision | None:
        """The controller's decision, now or after a cold start. While the controller does not
        answer and has just reported no capacity, a call that needs a promise is refused: a client
        that asks often would get in by a late answer."""
        decision = await ask()
        if decision is not None and decision.starts_in_s is not None:
            starts, began_s = self._cold_starts, self._clock()
            decision = await starts.decided(call.client, decision, ask, call.queue_ttl_s)
            waits.start_s = self._clock() - began_s
        if decision is not None:
            # Promises between refusals do not end the time without capacity.
            refused = decision.reason == UNATTAINABLE and decision.retry_after_s is not None
            promisable = call.slo.stated and not call.best_effort and not decision.over_share
            if promisable and (refused or decision.tier is Tier.BEST_EFFORT):
                for_s = min(max(decision.room_s or 0.0, 1.0), FULL_FOR_S)
                self._full_until_s[call.slo.service_class] = self._clock() + for_s
            return decision
        left_s = self._full_s(call)
        if left_s > 0 and tiers == _GUARANTEED_ONLY:
            return RouteDecision(None, UNATTAINABLE, retry_after_s=left_s, room_s=left_s)
        return None

    async def _ask(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int,
        tiers: frozenset[Tier],
        moves_from: str = "",
        brings_kv: bool = False,
        elsewhere: bool = False,
    ) -> RouteDecision | None:
        """The decision as of now, its predicted TTFT counted from the call's arrival."""
        asked_s = self._clock()
        waited_s = asked_s - call.received_s
        turn = call.turn or NO_TURN
        query = RouteQuery(
            key,
            call.slo,
            self._estimator.estimate(call.prompt),
            waited_s,
            tiers,
            call.output_tokens,
            call.affinity,
            call.prefix.hashes,
            call.request_id,
            prefill_key,
            tuple(failed),
            call.client.tenant,
            call.client.caps.weight,
            call.client_request_id,
            moves_from,
            brings_kv,
            elsewhere,
            only=tuple(call.only),
            expected_tokens=turn.expected_tokens,
            takes=call.takes,
            message_ends=call.prefix.message_ends,
            fetches_kv=0 if brings_kv else self._may_fetch(call),
        )
        decision = await self._controller.route(query)
        self._metrics.decision_s.observe(self._clock() - asked_s)
        if decision is None or decision.predicted_ttft_s is None:
            return decision
        return decision._replace(predicted_ttft_s=waited_s + decision.predicted_ttft_s)


def _within(call: Call, failed: Sequence[str], decision: RouteDecision) -> RouteDecision:
    """The decision; of a call that is restricted to some replicas, with one of them as target."""
    if not call.only or decision.replica_id is not None:
        return decision
    left = [name for name in call.only if name not in map(replica_of, failed)]
    replica_id = random.choice(left or list(call.only))
    return decision._replace(replica_id=replica_id, role=call.only[replica_id])


def _loop_refusal(service_class: str, loop: Loop) -> ApiError:
    return ApiError(
        Reason.SLO_UNATTAINABLE,
        f"A tool loop of class {service_class} needs up to {loop.needs_s or 0.0:.1f} seconds now, "
        f"and its deadline is {loop.deadline_s:g} seconds; the class does not allow best effort.",
        retry_after_s=LOOP_RETRY_S,
    )


def _refusal(call: Call, decision: RouteDecision) -> ApiError:
    name = call.slo.service_class
    if decision.over_share:
        return ApiError(
            Reason.OVER_SHARE,
            "This API key has used its share of guaranteed capacity while other keys ask for "
            f"theirs, and class {name} does not allow best effort.",
            retry_after_s=decision.retry_after_s,
        )
    if decision.starts_in_s is not None and decision.retry_after_s is not None:
        predicted_ms = 1000 * (decision.predicted_ttft_s or 0.0)
        return ApiError(
            Reason.SLO_UNATTAINABLE,
            "The model had no replica, and one is starting now: it is predicted to serve in "
            f"{decision.starts_in_s:.0f} seconds, which is too late for this SLO, and class {name} "
            "does not allow best effort.",
            headers={wire.PREDICTED_TTFT_HEADER: f"{predicted_ms:.1f}"},
            retry_after_s=decision.retry_after_s,
        )
    when = "now" if decision.retry_after_s is not None else "even when it is idle"
    return ApiError(
        Reason.SLO_UNATTAINABLE,
        f"No replica can meet this SLO {when}, and class {name} does not allow best effort.",
        retry_after_s=decision.retry_after_s,
    )
