"""Placement and admission tier of a call: the controller's decision, and how the call's class
handles a refusal."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final, Protocol

from sluice.controller.messages import (
    FirstTokenWait,
    LateNotice,
    RequestEnding,
    RouteDecision,
    RouteQuery,
    Tier,
    Trouble,
)
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.dispatch.admission_queue import AdmissionQueue, may_wait
from sluice.router.dispatch.cold_start import ColdStarts
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Fallback, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.prompt_size import TokenEstimator
from sluice.router.serve.contract import Replicas
from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.request.job import UNATTAINABLE

_ANY_TIER = frozenset(Tier)
_GUARANTEED_ONLY = frozenset({Tier.GUARANTEED})
_BEST_EFFORT_ONLY = frozenset({Tier.BEST_EFFORT})


FULL_FOR_S = 5.0
"""Longest time for which one decision marks a class as out of capacity, seconds."""


class DecisionService(Protocol):
    """The part of the controller's client that the router uses."""

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision, or ``None`` if the controller does not answer in time."""

    def release(self, key: int) -> None:
        """Release the reservation: the request does not run where it was placed. Returns at
        once."""

    def replica_gone(self, replica_ids: Sequence[str]) -> None:
        """These replicas no longer serve requests. Returns at once."""

    def troubled(self, replica_id: str, trouble: Trouble) -> None:
        """This replica has failed a request, or is unresponsive. Returns at once."""

    def ended(self, ending: RequestEnding) -> None:
        """A request that was placed has ended. Returns at once."""

    def late(self, notice: LateNotice) -> None:
        """A guaranteed response that still runs is late. Returns at once."""

    def on_leaving(self, leaving: Callable[[Sequence[str]], None]) -> None:
        """From now on, about once a second, pass the replicas that are drained or about to stop to
        ``leaving``."""

    def on_push(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        """From now on, ask about once a second about the requests that ``waits`` returns, and pass
        the keys of the ones that are going to miss their TTFT to ``missing``."""


UNDECIDED: Final = RouteDecision(None, "undecided")
"""No decision, because the controller is unreachable or the call needs none: Serve's own balancing
chooses the replica, and nothing is guaranteed."""


def unguaranteed(decision: RouteDecision) -> RouteDecision:
    """The decision for other replicas than the chosen ones: a guarantee does not hold there."""
    if decision.tier is not Tier.GUARANTEED:
        return decision
    return decision._replace(tier=None, predicted_ttft_s=None, planned=None)


class PlacementClient:
    """Asks the controller for placements. One per router process.

    Args:
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        controller: DecisionService,
        metrics: RouterMetrics,
        config: RouterConfig,
        replicas: Replicas,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self.estimator = TokenEstimator()
        self._controller = controller
        self._metrics = metrics
        self._clock = clock
        classes = config.classes.items()
        self._promised_only = {
            name for name, entry in classes if entry.when_unattainable != "best_effort"
        }
        self._full_until_s: dict[str, float] = {}
        self._cold_starts = ColdStarts(replicas, config, metrics.admission, clock, pause)
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
    ) -> RouteDecision:
        """The decision on ``call`` under this key. It names none of ``failed``. A traced call gets
        a span, which includes the time in the admission queue.

        Args:
            prefill_key: the key of its prefill, where a separate replica may compute that.
            begun: some of the answer is sent already: it is served in any tier.

        Raises:
            ApiError: 429; no replica can guarantee its SLO, and its class does not allow best
                effort. 503; the model has no replica, and the call cannot wait for one.
        """
        if call.span is None:
            return await self._find(call, key, failed, prefill_key, begun)
        span = call.span.child("decision")
        try:
            found = await self._find(call, key, failed, prefill_key, begun)
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
        self, call: Call, key: int, failed: Sequence[str], prefill_key: int, begun: bool
    ) -> RouteDecision:
        if not call.scheduled:
            return _within(call, failed, UNDECIDED)
        decision = await self._decide(call, key, failed, prefill_key, begun)
        if decision is None:
            self._metrics.fallback(Fallback.NO_ANSWER)
            full = self._full_s(call) > 0
            undecided = UNDECIDED._replace(tier=Tier.BEST_EFFORT) if full else UNDECIDED
            return _within(call, failed, undecided)
        if decision.over_share:
            self._metrics.admission.over_share(call.client.name)
        if decision.reason == UNATTAINABLE:
            raise _refusal(call, decision)
        if decision.replica_id is None:
            self._metrics.fallback(Fallback.NO_DECISION)
            return _within(call, failed, UNDECIDED)
        return _within(call, failed, self._but_failed(decision, key, prefill_key, failed))

    async def elsewhere(
        self, call: Call, key: int, failed: Sequence[str], replica_id: str
    ) -> RouteDecision | None:
        """Another decision, under this key, on a guaranteed call that is going to miss its TTFT at
        ``replica_id``: one that guarantees what is left of its SLO. ``None``: the call stays."""
        decision = await self._ask(call, key, failed, 0, _GUARANTEED_ONLY, replica_id)
        return decision if decision is not None and decision.tier is Tier.GUARANTEED else None

    async def with_kv(
        self, call: Call, key: int, avoid: Sequence[str], replica_id: str, tiers: frozenset[Tier]
    ) -> RouteDecision | None:
        """A decision, under this key, on the rest of a stream that runs at ``replica_id`` and moves
        with its KV, to none of ``avoid``. ``None``: it stays."""
        found = await self._ask(call, key, avoid, 0, tiers, replica_id, brings_kv=True)
        if found is None or found.replica_id is None:
            return None
        if found.replica_id in avoid:
            self._controller.release(key)
            return None
        return found

    def _note(self, call: Call, decision: RouteDecision) -> None:
        """Remember that the class has no guaranteed capacity left.

        A guarantee does not end that: under overload there are guarantees between refusals, and
        each would admit all requests that the controller does not answer in time then.
        """
        refused = decision.reason == UNATTAINABLE and decision.retry_after_s is not None
        asked = call.slo.stated and not call.best_effort and not decision.over_share
        if asked and (refused or decision.tier is Tier.BEST_EFFORT):
            for_s = min(max(decision.room_s or 0.0, 1.0), FULL_FOR_S)
            self._full_until_s[call.slo.service_class] = self._clock() + for_s

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
        self._metrics.fallback(Fallback.REPEATED)
        if prefill_id is not None:
            self._controller.release(prefill_key)
        if replica_id in failed:
            self._controller.release(key)
            replica_id = None
        return unguaranteed(decision)._replace(replica_id=replica_id, prefill_id=None)

    async def _decide(
        self, call: Call, key: int, failed: Sequence[str], prefill_key: int, begun: bool
    ) -> RouteDecision | None:
        """The controller's decision; after a wait in the admission queue if the class queues.

        Raises:
            ApiError: 429; the queue is full, or the call waited for too long.
        """
        tiers = self._tiers(call, begun)
        queue = self._queues.get(call.slo.service_class) if tiers == _GUARANTEED_ONLY else None
        refused = None
        # A request that arrives while others wait queues behind them, before it asks.
        if queue is None or len(queue) == 0:
            refused = await self._answered(call, key, failed, prefill_key, tiers)
            if queue is None or refused is None or not may_wait(refused):
                return refused
        ttft_s, _, e2e_s, _ = call.slo.columns
        due_s = call.received_s + min(ttft_s, e2e_s)
        with queue.slot(due_s, refused, call.client, call.queue_ttl_s) as slot:
            while True:
                await slot.turn()
                decision = await self._answered(call, key, failed, prefill_key, tiers)
                if decision is None or not may_wait(decision):
                    return decision
                slot.refuse(decision)

    async def _answered(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int,
        tiers: frozenset[Tier],
    ) -> RouteDecision | None:
        """The controller's decision now, or once the model has a replica. If the controller does
        not answer, and has just reported that there is no capacity, a call that needs a guarantee
        is refused: a client that asks often would get in by a late answer.

        Raises:
            ApiError: 503; the model has no replica, and the call cannot wait for one.
        """
        decision = await self._ask(call, key, failed, prefill_key, tiers)
        if decision is not None and decision.starts_in_s is not None:
            decision = await self._cold_starts.decided(
                call.client,
                decision,
                lambda: self._ask(call, key, failed, prefill_key, tiers),
                call.queue_ttl_s,
            )
        if decision is not None:
            self._note(call, decision)
            return decision
        left_s = self._full_s(call)
        if left_s > 0 and tiers == _GUARANTEED_ONLY:
            return RouteDecision(None, UNATTAINABLE, retry_after_s=left_s, room_s=left_s)
        return None

    def _tiers(self, call: Call, begun: bool) -> frozenset[Tier]:
        if call.best_effort:
            return _BEST_EFFORT_ONLY
        if begun:
            return _ANY_TIER
        # Without an SLO there is nothing to guarantee, whatever the class demands.
        promised_only = call.slo.stated and call.slo.service_class in self._promised_only
        return _GUARANTEED_ONLY if promised_only else _ANY_TIER

    async def _ask(
        self,
        call: Call,
        key: int,
        failed: Sequence[str],
        prefill_key: int,
        tiers: frozenset[Tier],
        moves_from: str = "",
        brings_kv: bool = False,
    ) -> RouteDecision | None:
        """The decision as of now, its predicted TTFT counted from the call's arrival."""
        asked_s = self._clock()
        waited_s = asked_s - call.received_s
        query = RouteQuery(
            key,
            call.slo,
            self.estimator.estimate(call.prompt),
            waited_s,
            tiers,
            call.output_tokens,
            call.session,
            call.prefix.hashes,
            call.request_id,
            prefill_key,
            tuple(failed),
            call.client.tenant,
            call.client.caps.weight,
            call.client_request_id,
            moves_from,
            brings_kv,
            only=tuple(call.only),
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
