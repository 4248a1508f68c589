"""Placement and admission tier of a call: the controller's decision, and how the call's class
handles a refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

from sluice.controller.messages import (
    FirstTokenWait,
    LateNotice,
    RequestEnding,
    RouteDecision,
    RouteQuery,
    Tier,
    Trouble,
)
from sluice.router.config import RouterConfig
from sluice.router.dispatch.admission_queue import AdmissionQueue, may_wait
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Fallback, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.prompt_size import TokenEstimator
from sluice.scheduling.job import UNATTAINABLE
from sluice.scheduling.objective import Times
from sluice.scheduling.roles import Role

_ANY_TIER = frozenset(Tier)
_GUARANTEED_ONLY = frozenset({Tier.GUARANTEED})
_BEST_EFFORT_ONLY = frozenset({Tier.BEST_EFFORT})


FULL_FOR_S = 5.0
"""Longest time for which one decision marks a class as out of capacity, seconds."""


class Controller(Protocol):
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

    def on_push(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        """From now on, ask about once a second about the requests that ``waits`` returns, and pass
        the keys of the ones that are going to miss their TTFT to ``missing``."""


class Placement(NamedTuple):
    """Where a call goes.

    Attributes:
        replica_id: the controller's choice; ``None``: Serve chooses.
        tier: the controller's decision. ``None``: it decided nothing, because it is unreachable or
            admission is off; then the call is served like a guaranteed one, without a guarantee.
        predicted_ttft_s: from the call's arrival to its first token, if the SLO is guaranteed.
        role: of that replica.
        prefill_id: the prefill replica; ``None``: the replica that answers computes the prompt.
        handover_s: predicted time from the end of the prefill to the first token.
        planned: TTFT, TPOT and end-to-end time that the replica schedules for, if the SLO is
            guaranteed; see :class:`~sluice.scheduling.job.RouteDecision`.
    """

    replica_id: str | None = None
    tier: Tier | None = None
    predicted_ttft_s: float | None = None
    role: Role = "mixed"
    prefill_id: str | None = None
    handover_s: float = 0.0
    planned: Times | None = None

    @classmethod
    def of(cls, decision: RouteDecision) -> Placement:
        """The placement that the controller decided."""
        return cls(
            decision.replica_id,
            decision.tier,
            decision.predicted_ttft_s,
            decision.role,
            decision.prefill_id,
            decision.handover_s,
            decision.planned,
        )


class PlacementClient:
    """Asks the controller for placements. One per router process.

    Args:
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        controller: Controller,
        metrics: RouterMetrics,
        config: RouterConfig,
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
        self._lines = {
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
    ) -> Placement:
        """The placement of ``call`` under this key. The controller does not choose any of
        ``failed``.

        Args:
            prefill_key: the key of its prefill, where a separate replica may compute that.
            begun: some of the answer is sent already: it is served in any tier.

        Raises:
            ApiError: 429; no replica can guarantee its SLO, and its class does not allow best
                effort.
        """
        if not call.scheduled:
            return Placement()
        decision = await self._decide(call, key, failed, prefill_key, begun)
        if decision is None:
            self._metrics.fallback(Fallback.NO_ANSWER)
            return Placement(tier=Tier.BEST_EFFORT if self._full_s(call) > 0 else None)
        if decision.over_share:
            self._metrics.admission.over_share(call.client.name)
        if decision.reason == UNATTAINABLE:
            raise _refusal(call, decision)
        if decision.replica_id is None:
            self._metrics.fallback(Fallback.NO_DECISION)
            return Placement()
        return self._but_failed(decision, key, prefill_key, failed)

    async def elsewhere(
        self, call: Call, key: int, failed: Sequence[str], replica_id: str
    ) -> Placement | None:
        """Another placement, under this key, of a guaranteed call that is going to miss its TTFT at
        ``replica_id``: one that guarantees what is left of its SLO. ``None``: the call stays."""
        decision = await self._ask(call, key, failed, 0, _GUARANTEED_ONLY, replica_id)
        if decision is None or decision.tier is not Tier.GUARANTEED:
            return None
        return Placement.of(decision)

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
    ) -> Placement:
        """The decision without the replicas that have failed the call."""
        replica_id, prefill_id = decision.replica_id, decision.prefill_id
        if replica_id not in failed and prefill_id not in failed:
            return Placement.of(decision)
        self._metrics.fallback(Fallback.REPEATED)
        # The guarantee holds only at the chosen replicas.
        tier = None if decision.tier is Tier.GUARANTEED else decision.tier
        if prefill_id is not None:
            self._controller.release(prefill_key)
        if replica_id not in failed:
            return Placement(replica_id, tier, role=decision.role)
        self._controller.release(key)
        return Placement(tier=tier)

    async def _decide(
        self, call: Call, key: int, failed: Sequence[str], prefill_key: int, begun: bool
    ) -> RouteDecision | None:
        """The controller's decision; after a wait in the admission queue if the class queues.

        Raises:
            ApiError: 429; the queue is full, or the call waited for too long.
        """
        tiers = self._tiers(call, begun)

        async def ask() -> RouteDecision | None:
            decision = await self._ask(call, key, failed, prefill_key, tiers)
            if decision is not None:
                self._note(call, decision)
                return decision
            # If the controller has just reported that there is no capacity, a missing answer does
            # not admit the request: a client that asks often would get in by a late answer.
            left_s = self._full_s(call)
            if left_s > 0 and tiers == _GUARANTEED_ONLY:
                return RouteDecision(None, UNATTAINABLE, retry_after_s=left_s, room_s=left_s)
            return None

        line = self._lines.get(call.slo.service_class) if tiers == _GUARANTEED_ONLY else None
        if line is None:
            return await ask()
        refused = None
        # A request that arrives while others wait queues behind them, before it asks.
        if len(line) == 0:
            refused = await ask()
            if refused is None or not may_wait(refused):
                return refused
        ttft_s, _, e2e_s, _ = call.slo.columns
        return await line.wait(ask, call.received_s + min(ttft_s, e2e_s), refused, call.client)

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
        )
        decision = await self._controller.route(query)
        self._metrics.decision_s.observe(self._clock() - asked_s)
        if decision is None or decision.predicted_ttft_s is None:
            return decision
        return decision._replace(predicted_ttft_s=waited_s + decision.predicted_ttft_s)


def _refusal(call: Call, decision: RouteDecision) -> ApiError:
    name = call.slo.service_class
    if decision.over_share:
        return ApiError(
            Reason.OVER_SHARE,
            "This API key has used its share of guaranteed capacity while other keys ask for "
            f"theirs, and class {name} does not allow best effort.",
            retry_after_s=decision.retry_after_s,
        )
    when = "now" if decision.retry_after_s is not None else "even when it is idle"
    return ApiError(
        Reason.SLO_UNATTAINABLE,
        f"No replica can meet this SLO {when}, and class {name} does not allow best effort.",
        retry_after_s=decision.retry_after_s,
    )
