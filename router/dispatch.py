"""From a validated call to an open response: the controller's decision, a replica, and retries.

Nothing has been sent to the client while a call is here, so a failed attempt is made again on
another replica. An event stream counts as open when it holds its first bytes, any other response
when it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from controller.messages import RouteDecision, RouteQuery, Tier
from replica.engine import EngineRequest, ResponseHead, request_key
from router.answer import Answer, ReplicaFailedError, ReplicaStream
from router.call import Call
from router.errors import ApiError, Reason
from router.metrics import Fallback, RouterMetrics
from router.prompt_size import TokenEstimator

RETRY_PAUSE_S = 0.02
"""Pause before the second attempt, doubled before each later one: time for the news of a dead
replica to arrive, and a brake on a failure that hits every replica."""

_BUSY = 503
_ANY_TIER = frozenset(Tier)
_BEST_EFFORT_ONLY = frozenset({Tier.BEST_EFFORT})


class Replicas(Protocol):
    """The way to the replicas."""

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str]
    ) -> ReplicaStream:
        """Send a request to ``target``, or where that is ``None`` or unknown to any replica, if
        possible none of ``avoid``."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body of any replica.

        Raises:
            ReplicaFailedError: none answered.
        """


class Controller(Protocol):
    """What the dispatcher needs of the controller's client."""

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision, or ``None`` where the controller does not answer in time."""

    def release(self, key: int) -> None:
        """The request does not run where it was placed. Returns at once."""

    def replica_gone(self, replica_ids: Sequence[str]) -> None:
        """These replicas serve nothing any more. Returns at once."""


class Dispatcher:
    """Opens responses. One per router process.

    Args:
        clock: monotonic seconds; the one of :attr:`Call.received_s`.
        pause: waits for that many seconds.
    """

    def __init__(
        self,
        controller: Controller,
        replicas: Replicas,
        metrics: RouterMetrics,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.estimator = TokenEstimator()
        self._controller = controller
        self._replicas = replicas
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._pause = pause

    async def open(self, call: Call) -> Answer:
        """Send ``call`` to a replica, and to another while attempts fail.

        Cancelling it stops the attempt under way.

        Raises:
            ApiError: every attempt failed; it tells of the last one.
        """
        failed: list[str] = []
        for attempt in range(1, self._max_attempts + 1):
            try:
                return await self._try(call, attempt, failed)
            except ReplicaFailedError as failure:
                if not failure.retry or attempt == self._max_attempts:
                    raise ApiError(failure.reason, str(failure)) from failure
            self._metrics.retries.inc()
            await self._pause(RETRY_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("max_attempts is at least 1")

    async def _try(self, call: Call, attempt: int, failed: list[str]) -> Answer:
        """One attempt. A replica that fails it is added to ``failed``."""
        # Each attempt has its own id: an engine may still hold the last one, and the ledger could
        # take the release of the last one for that of this one.
        request_id = call.request_id if attempt == 1 else f"{call.request_id}-{attempt}"
        key = request_key(request_id)
        target = await self._decide(call, key, failed)
        waited_s = self.clock() - call.received_s
        stream = self._replicas.generate(
            EngineRequest(
                request_id, call.endpoint, call.body, call.slo, waited_s, call.best_effort
            ),
            target,
            failed,
        )

        def close() -> None:
            stream.cancel()
            self._controller.release(key)

        answer = Answer(stream, waited_s, close)
        try:
            await answer.begin()
            if answer.head.status == _BUSY:
                raise ReplicaFailedError(Reason.REPLICAS_FULL, "Every replica tried is full.")
        except ReplicaFailedError as failure:
            close()
            self._note_failure(answer.head.replica_id or target, failure, failed)
            raise
        except BaseException:
            close()
            raise
        self._note_place(answer.head, target, key)
        return answer

    async def _decide(self, call: Call, key: int, failed: Sequence[str]) -> str | None:
        """The controller's choice, or ``None`` to leave it to Serve."""
        started_s = self.clock()
        query = RouteQuery(
            key,
            call.slo,
            self.estimator.estimate(call.prompt),
            started_s - call.received_s,
            _BEST_EFFORT_ONLY if call.best_effort else _ANY_TIER,
        )
        decision = await self._controller.route(query)
        self._metrics.decision_s.observe(self.clock() - started_s)
        if decision is None:
            self._metrics.fallback(Fallback.NO_ANSWER)
            return None
        if decision.replica_id is None:
            self._metrics.fallback(Fallback.NO_DECISION)
        elif decision.replica_id in failed:
            self._controller.release(key)
            self._metrics.fallback(Fallback.REPEATED)
            return None
        return decision.replica_id

    def _note_failure(
        self, replica_id: str | None, failure: ReplicaFailedError, failed: list[str]
    ) -> None:
        if replica_id is None:
            return
        failed.append(replica_id)
        if failure.dead:
            self._controller.replica_gone([replica_id])

    def _note_place(self, head: ResponseHead, target: str | None, key: int) -> None:
        """Free a reservation that no replica will confirm."""
        if target is not None and head.replica_id not in ("", target):
            self._metrics.fallback(Fallback.MOVED)
            self._controller.release(key)
        elif head.status >= 400:
            self._controller.release(key)
