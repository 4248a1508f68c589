"""From a validated call to the last byte of its answer: makes attempts while they fail.

A failed attempt is retried if the client has nothing yet; else its stream is resumed if possible.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import inf, isnan, nan

from msgspec import structs

from sluice.controller.client import ControllerClient
from sluice.protocol.messages import LateNotice, RequestEnding
from sluice.protocol.requests import EVENT_STREAM, EngineRequest, request_key
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.announcements import Announcements
from sluice.router.dispatch.attempt import (
    NOT_RESUMED,
    Answer,
    Attempt,
    MovedError,
    OpenAttempts,
    Piece,
    Say,
    SuspicionState,
    Transcript,
    name_of,
)
from sluice.router.dispatch.causes import late_parts
from sluice.router.dispatch.migrations import Migrations, Moves
from sluice.router.dispatch.offers import Offers
from sluice.router.dispatch.placement import PlacementClient, unpromised
from sluice.router.dispatch.retries import (
    NOT_RESUMABLE,
    RETRY_PAUSE_S,
    Pools,
    RetryBudget,
    may_resume,
    may_split,
    prefill_id_of,
    prefill_of,
    rest_of,
)
from sluice.router.dispatch.stall_detector import StallDetector
from sluice.router.dispatch.suspicion import Suspicion
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import (
    Fallback,
    Outcome,
    Phase,
    RequestFigures,
    RouterMetrics,
    StreamPath,
)
from sluice.router.request.call import Call
from sluice.router.request.prompt import TokenEstimator, outputs_of
from sluice.router.serve.contract import (
    ReaderLostError,
    ReplicaFailedError,
    Replicas,
    StalledReaderError,
    error_of,
)
from sluice.router.serve.running import CHOSEN
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.placement.windows import Leftover
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import TokenClock, clock_of
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Kind, Span

STALLED_READER_S = 60.0
"""A client that reads nothing of its stream for this long is dropped, seconds."""

_BUSY = 503
_LATE = (Outcome.OK, Outcome.CANCELLED)
"""Outcomes of promised requests that may be late; the others have failed."""
_PAIR: frozenset[Role] = frozenset(("prefill", "decode"))
_UNTRACED: Mapping[str, str] = {}


class Dispatcher:
    """Opens and resumes responses; one per router process and model. ``transfers_kv``: the engines
    transfer KV, so running streams may move, and sessions' prefixes."""

    def __init__(
        self,
        controller: ControllerClient,
        replicas: Replicas,
        metrics: RouterMetrics,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        transfers_kv: bool = False,
    ) -> None:
        self.clock = clock
        self.announces = config.announce_misses
        """How streams say that their promise is going to be missed, see the configuration."""
        self._controller = controller
        self._replicas = replicas
        self._metrics = metrics
        self._max_attempts = config.max_attempts
        self.estimator = TokenEstimator()
        self._placements = PlacementClient(
            self.estimator, controller, metrics, config, replicas, clock, pause, transfers_kv
        )
        self._budget = budget = RetryBudget(config.retry_budget, clock)
        self._attempts: OpenAttempts = {}
        self._watch: asyncio.Task[None] | None = None
        # These read the open attempts, and may abandon one.
        self._suspicion = Suspicion(self._attempts, metrics, clock)
        self._announcements = Announcements(self._attempts, clock)
        self.offers = Offers(self.quote)
        self._stalls = StallDetector(
            self._attempts,
            replicas,
            controller,
            budget,
            metrics,
            config.stall_after_s,
            clock,
            self._announcements.look,
        )
        placements = self._placements
        Moves(self._attempts, controller, placements, clock)
        self._migrations = (
            Migrations(self._attempts, controller, placements, replicas, metrics, clock)
            if transfers_kv
            else None
        )
        self._pools = Pools(replicas.roles, replicas.single, clock, pause)
        self._pause = pause

    async def restricted(self, call: Call, endpoints: Collection[str]) -> Call:
        """The call, for replicas at these addresses only. Raises ApiError: 503, there is none."""
        only = await self._replicas.at(endpoints)
        if not only:
            raise ApiError(
                Reason.NO_REPLICA, "No replica runs at any endpoint of the gateway's subset."
            )
        return replace(call, only=only)

    async def promised(self, call: Call) -> RouteDecision | None:
        """A promise for a call that was not opened yet, see :meth:`PlacementClient.promised`."""
        key, prefill_key = request_key(call.request_id), 0
        if self._pools.may_split and may_split(call):
            prefill_key = request_key(prefill_id_of(call.request_id))
        return await self._placements.promised(call, key, prefill_key)

    async def open(
        self,
        call: Call,
        fetches: bool = False,
        clock: TokenClock | None = None,
        decision: RouteDecision | None = None,
        say: Say | None = None,
        asked_s: float = nan,
    ) -> Answer:
        """Send ``call`` to a replica, and to another while attempts fail; always :meth:`close` the
        answer.

        ``fetches``: the client's side can fetch a stream from the replica. ``decision``: of
        :meth:`promised`, for the first attempt. ``say``: tells the client which objective will be
        missed. ``asked_s``: when the controller was first asked, if it was. Cancelling stops the
        attempt. Raises ApiError: the last attempt's error, a refused SLO, or quarantine."""
        try:
            case = self._suspicion.open(call) if self._suspicion.contents else SuspicionState()
        except ApiError:
            if decision is not None:
                self._controller.release(request_key(call.request_id))
                if decision.prefill_id is not None:
                    self._controller.release(request_key(prefill_id_of(call.request_id)))
            raise
        transcript = Transcript() if not fetches and may_resume(call) else None
        clock = clock or clock_of(call.slo, call.received_s)
        answer = Answer(call, case, clock, transcript, self._max_attempts, fetches)
        answer.say = say
        answer.waits.asked_s = asked_s
        if decision is not None:
            answer.decided, answer.waits.decided_s = decision, self.clock()
        try:
            attempt = await self._next(answer)
        except BaseException as error:
            if answer.moves_to is not None:
                self._controller.release(request_key(answer.moved_id))
            self._count_unanswered(answer, isinstance(error, asyncio.CancelledError))
            if isinstance(error, ReplicaFailedError):
                raise error_of(error, self._replicas) from error
            raise
        answer.fetched = bool(attempt.head.fetch)
        if attempt.head.media_type == EVENT_STREAM:
            self._metrics.streams(StreamPath.DIRECT if answer.fetched else StreamPath.ROUTER).inc()
        return answer

    async def quote(self, call: Call, token: str, hold_s: float = 0.0) -> Quote | None:
        """What would be decided on ``call`` now; ``token`` takes up what is held. ``None``: the
        controller does not answer."""
        splits = self._pools.may_split and may_split(call)
        return await self._placements.quote(call, token, hold_s, splits)

    async def pieces(
        self, answer: Answer, forward: Callable[[Piece], bool] | None = None
    ) -> AsyncIterator[Piece]:
        """The pieces in order, resumed where the answer breaks off; without those that ``forward``
        gets, see :class:`Attempt`. Raises ReplicaFailedError: no replica can resume it. Raises
        OSError: the client no longer reads the stream."""
        while True:
            try:
                attempt = answer.opened[-1]
                attempt.forward = forward
                while (piece := await attempt.read()) is not None:
                    yield piece
                return
            except MovedError:
                await self._migrate(answer)
            except ReplicaFailedError as failure:
                await self._resume(answer, failure)

    def close(self, answer: Answer) -> None:
        """Stop the work on an answer that has not ended by itself. Idempotent."""
        if answer.moves_to is not None:
            self._controller.release(request_key(answer.moved_id))
        attempt = answer.opened[-1]
        self._end(attempt)
        if self._migrations is not None:
            self._migrations.settled(attempt)

    async def leftover(self, query: RouteQuery, in_flight: int) -> Leftover | None:
        """What promised requests leave for batches with lines like ``query``, if it is known."""
        return await self._controller.leftover(query, in_flight)

    def late(self, call: Call, seen: TokenClock) -> None:
        """Tell the controller which objectives a running call misses."""
        ttft_s, tpot_s, _ = seen.judged_s(self.clock())
        late = call.slo.late(ttft_s, tpot_s, seen.tokens)
        if late != (None, None):
            self._controller.late(LateNotice(call.request_id, *late))

    def ended(
        self,
        call: Call,
        clock: TokenClock,
        outcome: Outcome,
        error: Reason | None,
        answer: Answer | None,
        telemetry: Telemetry | None,
    ) -> None:
        """Account for an ended call: metrics, log line, span, controller's records, and estimates
        of prompt lengths."""
        tail, cached, queued_s, kept = None, 0, None, None
        if answer is not None:
            tail = answer.opened[-1].tail
            # The prompt is that of a separate prefill, and of the first of several attempts.
            prompt = answer.opened[-1].prefill or answer.opened[-1]
            if prompt.tail is not None:
                cached = prompt.tail.cached_tokens
                if prompt.tail.queued_s is not None and len(answer.opened) == 1:
                    queued_s = prompt.request.waited_s + prompt.tail.queued_s
            if tail is not None and tail.prompt_tokens > 0:
                self.estimator.learn(call.prompt, tail.prompt_tokens)
        figures = RequestFigures.of(clock, outcome, self.clock(), tail, cached, queued_s)
        if figures.missed and answer is not None and answer.promises and outcome in _LATE:
            figures = figures._replace(late=late_parts(answer, figures))
        if telemetry is not None:
            self._metrics.ended(call, figures)
            telemetry.ended(call, figures, error, answer)
            admission = self._metrics.admission
            unserved = outcome in (Outcome.CLIENT_ERROR, Outcome.REFUSED)
            if answer is not None and call.scheduled and not unserved:
                admission.admissions(call.slo.service_class, answer.tier).inc()
            if answer is not None and answer.promises and outcome is not Outcome.CLIENT_ERROR:
                failed = outcome not in (Outcome.OK, Outcome.CANCELLED)
                predicted_s = answer.decision.predicted_ttft_s
                moved, client = answer.moved, call.client.name
                said = answer.announcement is not None and answer.announcement.said
                kept = admission.ended(figures, predicted_s, failed, moved, client, said)
        if call.scheduled:
            computed = (figures.prompt or 0) - (figures.cached or 0) + figures.generated
            self._placements.ended(call, computed)
            most_tokens = call.output_tokens
            if most_tokens:
                most_tokens //= outputs_of(call.endpoint, call.body)
            ending = RequestEnding(
                call.request_id,
                outcome.value,
                figures.missed if outcome is Outcome.OK else (),
                figures.sent,
                figures.ttft_s,
                figures.tpot_s,
                figures.e2e_s,
                "" if error is None else error.value,
                call.slo.service_class,
                call.client.tenant,
                most_tokens,
                "" if answer is None else answer.head.replica_id,
                kept,
                figures.judged_s,
                0 if call.turn is None else call.turn.expected_tokens,
                tuple(next(iter(figures.late.values()), {}).items()),
            )
            self._controller.ended(ending)

    async def _next(self, answer: Answer) -> Attempt:
        """Make attempts until one opens. Raises ReplicaFailedError (the last) or ApiError."""
        while True:
            attempt: Attempt | None = None
            failure: ReplicaFailedError | None = None
            try:
                attempt = await self._attempt(answer)
            except MovedError:
                pass
            except ReplicaFailedError as error:
                failure = error
            # A call that is refused before it reaches a replica does not count.
            if answer.attempts == 1:
                self._budget.count_request()
            if attempt is not None:
                self._pools.answered()
                answer.add(attempt)
                return attempt
            if failure is not None:
                await self._before_the_next(answer, failure)

    async def _before_the_next(self, answer: Answer, failure: ReplicaFailedError) -> None:
        """Wait until another attempt may be made, by the call's limit and the process's budget;
        empty pools do not count. Raises ReplicaFailedError: none may."""
        if answer.blame is not None:
            raise answer.blame from failure
        if failure.reason is Reason.NO_REPLICA:
            began_s = self.clock()
            await self._pools.wait(answer, failure)
            answer.waits.pool_s += self.clock() - began_s
            return
        granted, answer.granted = answer.granted, False
        if not failure.retry or (answer.spent and not granted):
            raise failure
        if not granted and not self._budget.take():
            self._metrics.retries_refused.inc()
            raise failure
        self._metrics.retries.inc()
        await self._pause(RETRY_PAUSE_S * 2 ** (answer.made - 1))

    async def _resume(self, answer: Answer, failure: ReplicaFailedError) -> None:
        """Resume a stream. Raises ReplicaFailedError: none can. OSError: the client is gone."""
        broken = answer.opened[-1]
        broken.end_span(failure.reason.value)
        self._note_failure(answer, broken, failure)
        self._end(broken)
        if isinstance(failure, ReaderLostError):
            lost = StalledReaderError if failure.stalled else ConnectionResetError
            raise lost("the stream has no reader any more") from failure
        if answer.blame is not None:
            raise answer.blame from failure
        if answer.transcript is None or not answer.transcript.resumable:
            raise ReplicaFailedError(failure.reason, f"{failure} {NOT_RESUMABLE}") from failure
        await self._before_the_next(answer, failure)
        try:
            await self._next(answer)
        except ApiError:  # the controller admits it nowhere
            raise failure from None
        answer.waits.failed_s += self.clock() - broken.last_item_s
        self._metrics.resumes.inc()

    async def _migrate(self, answer: Answer) -> None:
        """Open an attempt where a stream moves. Raises ReplicaFailedError: none can."""
        source, migrations = answer.opened[-1], self._migrations
        assert migrations is not None
        migrations.left(answer, source)
        try:
            migrations.arrived(answer, await self._next(answer))
            answer.waits.moved_s += self.clock() - source.last_item_s
        except ApiError as error:  # the controller admits it nowhere
            raise ReplicaFailedError(*NOT_RESUMED, retry=False) from error
        finally:
            self._end(source)
            migrations.settled(source)

    async def _attempt(self, answer: Answer) -> Attempt:
        """Make the next attempt, until a stream has sent bytes or another response is complete.

        Each attempt has its own id: the last one's release could be mistaken for this one's. Raises
        ReplicaFailedError (recorded), MovedError (to :attr:`Answer.moves_to`) or ApiError (no
        promise)."""
        answer.attempts += 1
        call, transcript, moves_to = answer.call, answer.transcript, answer.moves_to
        request_id, moves = answer.next_id, moves_to is not None
        decision = moves_to or answer.decided
        answer.moves_to = answer.decided = None

        # What is left of the call, if its client has a part of the stream.
        resume = transcript.begin(request_id) if transcript is not None else None
        if resume is not None:
            tokens = len(resume.token_ids)
            call = rest_of(call, tokens, answer.clock.rest(tokens, self.clock()))

        # Where it goes.
        if decision is None:
            key, prefill_key = request_key(request_id), 0
            if self._pools.may_split and not answer.empty & _PAIR and may_split(call):
                prefill_key = request_key(prefill_id_of(request_id))
            asked_s, first = self.clock(), answer.attempts == 1
            waits = answer.waits if first else None
            decision = await self._placements.find(
                call, key, answer.failed, prefill_key, resume is not None, waits
            )
            decided_s = self.clock()
            answer.alive_s += decided_s - asked_s
            if first:
                answer.waits.decided_s = decided_s
                if isnan(answer.waits.asked_s):
                    answer.waits.asked_s = asked_s
        promised = decision.tier is Tier.GUARANTEED
        answer.promises += promised

        span = None
        if call.span is not None:
            span = call.span.child("attempt", Kind.CLIENT)
            span.set(sluice__attempt=answer.attempts, sluice__hint=decision.replica_id)
        request = EngineRequest(
            request_id,
            call.endpoint,
            call.body,
            call.slo if decision.planned is None else call.slo.with_times(decision.planned),
            self.clock() - call.received_s,
            call.best_effort or decision.tier is Tier.BEST_EFFORT,
            call.prefix,
            _UNTRACED if span is None else span.context,
            resume=resume,
            resumable=transcript is not None,
            confirm=answer.suspicion.suspected,
            tenant=call.client.tenant,
            weight=call.client.caps.weight,
            direct_patience_s=STALLED_READER_S if answer.fetched else None,
            promised=promised,
            turn=call.turn,
            client=self._metrics.clients.label(call.client.name),
        )
        if moves and answer.opened:
            source = answer.opened[-1]
            assert self._migrations is not None
            request = await self._migrations.with_kv_of(source, request)
            source.end_span("moved")
            self._end(source)
        elif decision.kv_from is not None:
            assert self._migrations is not None
            request = await self._migrations.with_cached_kv(decision, request)
        call.charge.sent()
        if decision.prefill_id is None:
            return await self._send(answer, request, decision, span)
        return await self._send_to_pair(answer, request, decision, span)

    async def _send_to_pair(
        self, answer: Answer, request: EngineRequest, decision: RouteDecision, span: Span | None
    ) -> Attempt:
        """Prefill on one replica, decode on another. Returns the prefill's attempt if that
        refuses."""
        prefill = await self._prefill(answer, request, decision, span)
        if prefill.head.status >= 400:
            if request.resume is not None:
                raise ReplicaFailedError(*NOT_RESUMED, retry=False)
            return prefill
        if prefill.moved:
            # The promise was for a P/D pair with the other prefill replica.
            decision = self._void(answer, decision)._replace(prefill_id=prefill.head.replica_id)
        kv_handle = prefill.tail.kv_handle if prefill.tail is not None else None
        waited_s = self.clock() - answer.call.received_s
        request = replace(request, waited_s=waited_s, kv_handle=kv_handle)
        attempt = await self._send(answer, request, decision, span)
        attempt.prefill = prefill
        return attempt

    async def _prefill(
        self, answer: Answer, whole: EngineRequest, decision: RouteDecision, span: Span | None
    ) -> Attempt:
        """Compute the prompt on the chosen prefill replica. Raises ReplicaFailedError."""
        started_s = self.clock()
        own_span = None
        if span is not None:
            own_span = span.child("prefill", Kind.CLIENT)
            own_span.set(sluice__hint=decision.prefill_id)
        trace = _UNTRACED if own_span is None else own_span.context
        request = prefill_of(whole, decision.kv_transfer_s, trace)
        of_prefill = RouteDecision(decision.prefill_id, decision.reason, role="prefill")
        try:
            attempt = await self._begin(answer, request, of_prefill, "prefill", own_span)
        except BaseException as error:
            self._controller.release(request_key(whole.request_id))
            if span is not None:
                span.fail(name_of(error))
                span.end()
            raise
        self._end(attempt)
        if attempt.head.status >= 400:
            self._controller.release(attempt.key)
            self._controller.release(request_key(whole.request_id))
            if span is not None:
                span.end()
            return attempt
        self._metrics.phases(Phase.PREFILL).observe(self.clock() - started_s)
        if attempt.moved:
            self._metrics.fallbacks(Fallback.MOVED).inc()
            self._controller.release(attempt.key)
        return attempt

    async def _send(
        self, answer: Answer, request: EngineRequest, decision: RouteDecision, span: Span | None
    ) -> Attempt:
        """Have the chosen replica, or any without one, answer. Raises ReplicaFailedError."""
        started_s = self.clock()
        wanted = None if decision.replica_id is None else decision.role
        role = self._pools.role_for(answer, wanted)
        attempt = await self._begin(answer, request, decision, role, span, answer.transcript)
        if decision.prefill_id is not None:
            self._note_transfer(attempt, self.clock() - started_s)
        if attempt.moved:
            self._metrics.fallbacks(Fallback.MOVED).inc()
            self._controller.release(attempt.key)
            attempt.decision = self._void(answer, decision)
        elif attempt.head.status >= 400:
            self._controller.release(attempt.key)
        return attempt

    async def _begin(
        self,
        answer: Answer,
        request: EngineRequest,
        decision: RouteDecision,
        role: Role,
        span: Span | None,
        transcript: Transcript | None = None,
    ) -> Attempt:
        """Send to a replica until its answer begins. A failure is recorded and frees its place."""
        suspected = answer.suspicion.suspected
        async with self._suspicion.trial(decision.replica_id) if suspected else nullcontext():
            stream = self._replicas.generate(request, decision.replica_id, answer.failed, role)
            attempt = Attempt(request, decision, role, stream, span, transcript, self.clock)
            self._attempts[attempt] = answer
            if answer.alive_s == -inf:
                answer.alive_s = attempt.made_s
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._stalls.watch(), name="stalls")
            CHOSEN[request.request_id] = attempt.sent_to
            try:
                await attempt.begin()
                if attempt.head.status == _BUSY:
                    raise ReplicaFailedError(Reason.REPLICAS_FULL, "Every replica tried is full.")
                if request.resume is not None and not request.prefill_only:
                    # It continues the stream that the client has?
                    streams = attempt.head.media_type == EVENT_STREAM
                    repeated = answer.transcript is not None and answer.transcript.repeated
                    if attempt.head.status != 200 or not streams or not repeated:
                        raise ReplicaFailedError(*NOT_RESUMED, retry=False)
            except BaseException as error:
                if isinstance(error, ReplicaFailedError):
                    if error.reason is Reason.NO_REPLICA:
                        answer.empty.add(role)
                        answer.uncounted += 1
                    self._note_failure(answer, attempt, error)
                self._stop(attempt)
                attempt.end_span(name_of(error))
                raise
            finally:
                CHOSEN.pop(request.request_id, None)
        return attempt

    def _end(self, attempt: Attempt) -> None:
        """Stop an attempt that has not ended by itself. Idempotent."""
        if not attempt.closed and attempt.tail is None:
            self._stop(attempt)
        attempt.closed = True
        attempt.forward = attempt.stream.forward = None  # they refer to what refers to the attempt
        self._attempts.pop(attempt, None)
        attempt.end_span()

    def _stop(self, attempt: Attempt) -> None:
        """Stop the replica's work on an attempt, and end its reservation."""
        attempt.stream.cancel()
        self._attempts.pop(attempt, None)
        self._controller.release(attempt.key)

    def _note_failure(self, answer: Answer, attempt: Attempt, failure: ReplicaFailedError) -> None:
        """Record that a replica has failed a call. Call this before the attempt is stopped."""
        answer.blame = self._suspicion.judge(answer.call, answer.suspicion, attempt, failure)
        replica_id = attempt.place
        if replica_id is None:
            return
        answer.failed.append(replica_id)
        if failure.dead:
            self._controller.replica_gone([replica_id])
        elif isinstance(failure, ReaderLostError):
            return
        elif failure.reason is Reason.REPLICA_FAILED and not failure.hung:
            self._controller.faulted(replica_id, ReplicaFault.FAILED)

    def _void(self, answer: Answer, decision: RouteDecision) -> RouteDecision:
        """A decision that another replica than the chosen one serves."""
        if decision.tier is Tier.GUARANTEED:
            answer.promises -= 1
        return unpromised(decision)

    def _note_transfer(self, attempt: Attempt, seconds: float) -> None:
        """Record the time from the prompt's end to the first token, or to its bytes if streamed."""
        if attempt.tail is not None and attempt.tail.token_offsets_s:
            seconds = attempt.tail.token_offsets_s[0]
        elif attempt.tail is not None and attempt.head.media_type != EVENT_STREAM:
            return
        self._metrics.phases(Phase.TRANSFER).observe(seconds)

    def _count_unanswered(self, answer: Answer, left: bool) -> None:
        """Count a call that ended before its answer began; ``left``: its client left."""
        if answer.promises:
            slo = answer.call.slo
            if left and not answer.call.body.get("stream"):
                # Its first token may have left the engine in time: only the whole answer is sent.
                slo = structs.replace(slo, ttft_s=None)
            clock = TokenClock(slo, answer.call.received_s)
            outcome = Outcome.CANCELLED if left else Outcome.FAILED
            figures = RequestFigures.of(clock, outcome, self.clock())
            if left:
                figures = figures._replace(late=late_parts(answer, figures))
            moved, client = answer.moved, answer.call.client.name
            self._metrics.admission.ended(figures, None, not left, moved, client)
