"""From a validated call to an open response and to its end: makes attempts while they fail.

The client's state decides what follows a failure. If the client has received nothing, the call is
retried on another replica; if it has received part of a stream, another replica resumes the stream
where that is possible. An event stream counts as open when it holds its first bytes, any other
response when it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from sluice.controller.messages import LateNotice, RequestEnding
from sluice.replica.engine import EVENT_STREAM
from sluice.router.answer import Answer, Attempt, MovedError
from sluice.router.config import RouterConfig
from sluice.router.dispatch.attempt import Attempts, CallState
from sluice.router.dispatch.client_watch import StalledReaderError
from sluice.router.dispatch.direct import DirectAnswer
from sluice.router.dispatch.placement import Controller, PlacementClient
from sluice.router.dispatch.resumable import NOT_RESUMABLE, may_resume
from sluice.router.dispatch.retry_budget import RetryBudget
from sluice.router.dispatch.stall_detector import StallDetector
from sluice.router.dispatch.suspicion import Suspicion
from sluice.router.dispatch.transcript import Transcript
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Outcome, RouterMetrics, StreamWay
from sluice.router.request.call import Call
from sluice.router.request.prompt_size import TokenEstimator, outputs_of
from sluice.router.serve.contract import NobodyTakesError, ReplicaFailedError, Replicas
from sluice.router.serve.hint import NO_REPLICA_WAIT_S
from sluice.scheduling.objective import TokenClock

RETRY_PAUSE_S = 0.02
"""Pause before the second attempt, doubled before each later one, seconds: time for the report of a
dead replica to arrive, and a backoff for a failure that hits every replica."""

EMPTY_POOLS_PAUSE_S = 0.25
"""Pause before pools that were all found empty are asked again, seconds."""


class Dispatcher:
    """Opens responses. One per router process.

    Args:
        clock: monotonic seconds; the one of :attr:`Call.received_s`.
        pause: sleeps for the given number of seconds.
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
        self._placements = PlacementClient(controller, metrics, config, clock, pause)
        stalls = StallDetector(replicas, controller, metrics, config.stall_after_s, clock)
        self._suspicion = Suspicion(metrics, clock)
        self._legs = Attempts(
            controller,
            replicas,
            self._placements,
            metrics,
            stalls,
            self._suspicion,
            self._leave,
            clock,
        )
        self._controller = controller
        self._budget = RetryBudget(config.retry_budget, clock)
        self._metrics = metrics
        self._max_attempts = config.max_attempts
        self._pause = pause
        # When all pools were first and last found empty, with no answer in between.
        self._empty_since_s = self._last_empty_s = float("-inf")

    @property
    def estimator(self) -> TokenEstimator:
        """Estimates prompt lengths, and learns them from answers."""
        return self._placements.estimator

    async def open(self, call: Call, direct: DirectAnswer | None = None) -> Answer:
        """Send ``call`` to a replica, and to another while attempts fail. If the answer is a stream
        that HAProxy can fetch from the replica, ``direct`` is notified.

        Cancelling it stops the current attempt.

        Raises:
            ApiError: every attempt failed, and the error is that of the last one; or the SLO cannot
                be guaranteed and the class does not allow best effort; or the call is quarantined.
        """
        case = self._suspicion.open(call)
        transcript = Transcript() if may_resume(call) else None
        state = CallState(call, transcript, case=case, direct=direct)
        try:
            attempt = await self._attempts(state)
        except BaseException as error:
            self._legs.drop(state)
            self._count_unanswered(state, isinstance(error, asyncio.CancelledError))
            if isinstance(error, ReplicaFailedError):
                raise ApiError(error.reason, str(error)) from error
            raise
        if direct is not None and attempt.head.fetch:
            direct.began(attempt)
        else:
            state.direct = None
        if attempt.head.media_type == EVENT_STREAM:
            fetched = state.direct is not None
            self._metrics.stream(StreamWay.DIRECT if fetched else StreamWay.ROUTER)
        if call.scheduled:
            self._metrics.admission.admitted(call.slo.service_class, attempt.tier)
        resume = partial(self._resume, state)
        return Answer(attempt, resume, promised=state.promises > 0, moved=state.moved)

    def _count_unanswered(self, state: CallState, left: bool) -> None:
        """Count a call that ended before its answer began; ``left``: its client left."""
        if state.promises:
            call = state.call
            slo = call.slo
            if left and not call.body.get("stream"):
                # Its first token may have left the engine in time: only the whole answer is sent.
                slo = replace(slo, ttft_s=None)
            clock = TokenClock(slo, call.received_s)
            self._metrics.admission.ended(clock, None, not left, self.clock(), state.moved)

    def ended(
        self,
        call: Call,
        seen: TokenClock,
        outcome: Outcome,
        reason: Reason | None,
        now_s: float,
        replica_id: str = "",
        kept: bool | None = None,
    ) -> None:
        """Tell the controller how a call ended. Does not wait.

        Args:
            seen: the times of its tokens.
            reason: of its error, if it failed.
            replica_id, kept: see :class:`RequestEnding`.
        """
        if not call.scheduled:
            return
        missed = seen.missed(now_s) if outcome is Outcome.OK else ()
        self._controller.ended(
            RequestEnding(
                call.request_id,
                outcome.value,
                missed,
                seen.tokens,
                seen.ttft_s,
                seen.tpot_s,
                seen.e2e_s(now_s),
                "" if reason is None else reason.value,
                call.slo.service_class,
                call.client.tenant,
                call.output_tokens // outputs_of(call.endpoint, call.body),
                replica_id,
                kept,
                seen.judged_s(now_s) if call.slo.stages else None,
            )
        )

    def progressed(self, call: Call, seen: TokenClock) -> None:
        """Report to the controller the objectives that a guaranteed call misses while it still
        runs. ``seen``: the times of its tokens so far. Does not wait."""
        ttft_s, tpot_s, _ = seen.judged_s(self.clock())
        late = call.slo.late(ttft_s, tpot_s, seen.tokens)
        if late != (None, None):
            self._controller.late(LateNotice(call.request_id, *late))

    async def _attempts(self, state: CallState) -> Attempt:
        """The first attempt that does not fail.

        Raises:
            ReplicaFailedError: no attempt is left; it is the last one's failure.
            ApiError: see :meth:`open`.
        """
        while True:
            try:
                attempt = await self._legs.attempt(state)
            except MovedError:
                self._count_first(state)
            except ReplicaFailedError as failure:
                self._count_first(state)
                await self._before_the_next(state, failure)
            else:
                self._last_empty_s = float("-inf")
                self._count_first(state)
                return attempt

    def _count_first(self, state: CallState) -> None:
        """Count the first attempt for the retry budget. A call that was refused before it reached a
        replica does not count."""
        if state.attempts == 1:
            self._budget.count_request()

    async def _before_the_next(self, state: CallState, failure: ReplicaFailedError) -> None:
        """Return when another attempt may be made.

        Raises:
            ReplicaFailedError: no further attempt may be made.
        """
        if state.verdict is not None:
            raise state.verdict from failure
        if failure.reason is Reason.NO_REPLICA:
            if not self._legs.whole(state):
                await self._wait_for_pools(state, failure)
            return
        granted, state.granted = state.granted, False
        if not granted and self._spent(state):
            raise failure
        if not failure.retry:
            raise failure
        if not granted and not self._budget.take():
            self._metrics.retries_refused.inc()
            raise failure
        self._metrics.retries.inc()
        await self._pause(RETRY_PAUSE_S * 2 ** (state.made - 1))

    async def _wait_for_pools(self, state: CallState, failure: ReplicaFailedError) -> None:
        """Return when pools that were all empty may be asked again. Together they get the time for
        which a single pool keeps requests waiting, counted from when all were first found empty.

        Raises:
            ReplicaFailedError: they have been empty for too long.
        """
        now_s = self.clock()
        if now_s - self._last_empty_s > NO_REPLICA_WAIT_S:
            self._empty_since_s = now_s
        self._last_empty_s = now_s
        if not self._legs.has_pools or now_s - self._empty_since_s >= NO_REPLICA_WAIT_S:
            raise failure
        await self._pause(EMPTY_POOLS_PAUSE_S)
        state.empty.clear()

    def _spent(self, state: CallState) -> bool:
        """Whether the call has used all of its attempts."""
        return state.made >= self._max_attempts

    def _leave(self, state: CallState, attempt: Attempt) -> bool:
        """Whether ``attempt``, whose replica hangs, is to be abandoned: for another one, which is
        then granted, or finally if it may be the cause. A call that cannot be resumed on another
        replica waits: its replica may recover."""
        if self._suspicion.ends_when_hung(state.call):
            return True
        transcript = state.transcript
        begun = attempt.opened or (transcript is not None and transcript.begun)
        if begun and not (transcript is not None and transcript.resumable and attempt.told):
            return False
        if self._spent(state) or not self._budget.take():
            return False
        state.granted = True
        return True

    async def _resume(
        self, state: CallState, broken: Attempt, failure: ReplicaFailedError
    ) -> Attempt:
        """An attempt that resumes a stream that broke off.

        Raises:
            ReplicaFailedError: no attempt can resume it.
            NotReportedError, StalledReaderError: the client no longer reads the stream.
        """
        broken.end_span(failure.reason.value)
        self._legs.note_failure(state, broken, failure)
        broken.close()
        if isinstance(failure, NobodyTakesError) and failure.stalled:
            raise StalledReaderError from failure
        direct, state.direct = state.direct, None
        if direct is not None:
            got = await direct.broken()
            if not got.counts:
                self._metrics.stream(StreamWay.UNFETCHED)
            if state.transcript is not None:
                state.transcript.told(*got)
        if state.verdict is not None:
            raise state.verdict from failure
        if state.transcript is None or not state.transcript.resumable:
            raise ReplicaFailedError(failure.reason, f"{failure} {NOT_RESUMABLE}") from failure
        await self._before_the_next(state, failure)
        try:
            attempt = await self._attempts(state)
        except ApiError:  # the controller admits it nowhere
            raise failure from None
        self._metrics.resumes.inc()
        return attempt
