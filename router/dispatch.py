"""From a validated call to an open response: the controller's decision, a replica, and retries.

Nothing has been sent to the client while a call is here, so a failed attempt is made again on
another replica. An event stream counts as open when it holds its first bytes, any other response
when it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from controller.messages import Tier
from replica.engine import EngineRequest, request_key
from router.answer import Answer, ReplicaFailedError, ReplicaStream
from router.call import Call
from router.config import RouterConfig
from router.destinations import Controller, Destination, Destinations
from router.errors import ApiError, Reason
from router.metrics import Fallback, RouterMetrics
from router.prompt_size import TokenEstimator
from scheduling.roles import Role
from telemetry.tracing import Kind

RETRY_PAUSE_S = 0.02
"""Pause before the second attempt, doubled before each later one: time for the news of a dead
replica to arrive, and a brake on a failure that hits every replica."""

_BUSY = 503
_UNTRACED: Mapping[str, str] = {}


class Replicas(Protocol):
    """The way to the replicas, in pools by their roles."""

    @property
    def roles(self) -> Sequence[Role]:
        """The pools that there are, in the order in which they are to be asked to serve a request
        whole: mixed, decode, prefill. At least one."""

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role
    ) -> ReplicaStream:
        """Send a request to ``target`` in the pool of ``role``, one of :attr:`roles`; or where that
        is ``None`` or unknown to any replica of that pool, if possible none of ``avoid``.

        The stream fails with ``NO_REPLICA`` where the pool has none, and :class:`Dispatcher` goes
        on with the next pool."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body of any replica.

        Raises:
            ReplicaFailedError: none answered.
        """


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
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self._destinations = Destinations(controller, metrics, config, clock, pause)
        self._controller = controller
        self._replicas = replicas
        self._metrics = metrics
        self._max_attempts = config.max_attempts
        self._pause = pause

    @property
    def estimator(self) -> TokenEstimator:
        """Learns from answers how long prompts are."""
        return self._destinations.estimator

    async def open(self, call: Call) -> Answer:
        """Send ``call`` to a replica, and to another while attempts fail.

        Cancelling it stops the attempt under way.

        Raises:
            ApiError: every attempt failed, and it tells of the last one; or the objective cannot be
                promised and the call may not be served without.
        """
        failed: list[str] = []
        for attempt in range(1, self._max_attempts + 1):
            try:
                answer = await self._try(call, attempt, failed)
            except ReplicaFailedError as failure:
                if not failure.retry or attempt == self._max_attempts:
                    raise ApiError(failure.reason, str(failure)) from failure
            else:
                if call.scheduled:
                    self._metrics.admission.admitted(call.slo.service_class, answer.tier)
                return answer
            self._metrics.retries.inc()
            await self._pause(RETRY_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("max_attempts is at least 1")

    async def _try(self, call: Call, attempt: int, failed: list[str]) -> Answer:
        """One attempt. A replica that fails it is added to ``failed``."""
        # Each attempt has its own id: an engine may still hold the last one, and the ledger could
        # take the release of the last one for that of this one.
        request_id = call.request_id if attempt == 1 else f"{call.request_id}-{attempt}"
        key = request_key(request_id)
        destination = await self._find(call, key, failed)
        target = destination.replica_id
        span = None
        if call.span is not None:
            span = call.span.child("attempt", Kind.CLIENT)
            span.set(sluice__attempt=attempt, sluice__hint=target)
        waited_s = self.clock() - call.received_s
        request = EngineRequest(
            request_id,
            call.endpoint,
            call.body,
            call.slo,
            waited_s,
            call.best_effort or destination.tier is Tier.BEST_EFFORT,
            call.prefix,
            _UNTRACED if span is None else span.context,
        )
        call.charge.sent()
        stream = self._replicas.generate(request, target, failed, self._replicas.roles[0])

        def close() -> None:
            stream.cancel()
            self._controller.release(key)

        answer = Answer(stream, waited_s, close, span)
        try:
            await answer.begin()
            if answer.head.status == _BUSY:
                raise ReplicaFailedError(Reason.REPLICAS_FULL, "Every replica tried is full.")
        except ReplicaFailedError as failure:
            close()
            answer.end_span(failure.reason.value)
            self._note_failure(answer.head.replica_id or target, failure, failed)
            raise
        except BaseException:
            close()
            answer.end_span("cancelled")
            raise
        self._note_place(answer, destination, key)
        return answer

    async def _find(self, call: Call, key: int, failed: Sequence[str]) -> Destination:
        """See :meth:`Destinations.find`; with a span of its own, the wait in a line included."""
        if call.span is None:
            return await self._destinations.find(call, key, failed)
        span = call.span.child("decision")
        try:
            destination = await self._destinations.find(call, key, failed)
            predicted_s = destination.predicted_ttft_s
            span.set(
                sluice__replica=destination.replica_id,
                sluice__tier=destination.tier and destination.tier.value,
                sluice__predicted_ttft_ms=None if predicted_s is None else 1000 * predicted_s,
            )
            return destination
        except ApiError as error:
            span.set(error__type=error.reason.value)
            raise
        finally:
            span.end()

    def _note_failure(
        self, replica_id: str | None, failure: ReplicaFailedError, failed: list[str]
    ) -> None:
        if replica_id is None:
            return
        failed.append(replica_id)
        if failure.dead:
            self._controller.replica_gone([replica_id])

    def _note_place(self, answer: Answer, destination: Destination, key: int) -> None:
        """Free a reservation that no replica will confirm. What was promised there is not promised
        where the request went instead."""
        target, head = destination.replica_id, answer.head
        if target is not None and head.replica_id not in ("", target):
            self._metrics.fallback(Fallback.MOVED)
            self._controller.release(key)
            return
        if head.status >= 400:
            self._controller.release(key)
        if destination.tier is Tier.GUARANTEED:
            answer.tier = Tier.GUARANTEED
            answer.predicted_ttft_s = destination.predicted_ttft_s
