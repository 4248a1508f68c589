"""One attempt at a call: the controller's decision, the prefill replica if it is a separate one,
and the replica that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from sluice.controller.messages import Tier, Trouble
from sluice.replica.engine import EVENT_STREAM, EngineRequest, ResponseChunk, request_key
from sluice.router.answer import Attempt, MovedError, Piece
from sluice.router.dispatch.direct import DirectAnswer
from sluice.router.dispatch.moves import Moves
from sluice.router.dispatch.placement import Controller, Placement, PlacementClient
from sluice.router.dispatch.resumable import may_split, prompt_slo, rest_of
from sluice.router.dispatch.stall_detector import StallDetector
from sluice.router.dispatch.suspicion import Case, Suspicion
from sluice.router.dispatch.transcript import Transcript
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Fallback, Phase, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.serve.choices import CHOICES
from sluice.router.serve.contract import NobodyTakesError, ReplicaFailedError, Replicas
from sluice.scheduling.prefix import NO_PREFIX
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Kind, Span

_BUSY = 503
_NOT_RESUMED = (Reason.INTERNAL, "Another replica could not resume the stream.")
_UNTRACED: Mapping[str, str] = {}


@dataclass(slots=True)
class CallState:
    """State of a call over its attempts.

    Attributes:
        transcript: what its client has received of the stream; ``None`` if the stream cannot be
            resumed.
        attempts: made so far, the current one included.
        failed: replicas that have failed the call.
        empty: pools that had no replica for the call when they were last asked.
        in_vain: attempts that found a pool empty or were moved: neither counts as a failed one.
        promises: attempts whose SLO was guaranteed at the replica that they were sent to.
        granted: the current attempt is abandoned for another one, which the retry budget allows.
        case: the call's part in lost replicas.
        verdict: the failure that ends the call, if it is blamed for lost replicas.
        direct: tells HAProxy where to fetch the stream; ``None``: the router relays the stream.
        moved: the call has left a replica that was going to miss its TTFT; it does so at most once.
        moves_to: the placement of the next attempt after such a move.
    """

    call: Call
    transcript: Transcript | None
    attempts: int = 0
    failed: list[str] = field(default_factory=list)
    empty: set[Role] = field(default_factory=set)
    granted: bool = False
    in_vain: int = 0
    promises: int = 0
    case: Case = field(default_factory=Case)
    verdict: ReplicaFailedError | None = None
    direct: DirectAnswer | None = None
    moved: bool = False
    moves_to: Placement | None = None

    @property
    def moved_id(self) -> str:
        """The id of the attempt at the replica that the call moves to."""
        return f"{self.call.request_id}-moved"

    @property
    def made(self) -> int:
        """The attempts that reached a replica and were not moved."""
        return self.attempts - self.in_vain


class Attempts:
    """Makes attempts. One per router process.

    Args:
        stalls: detects attempts at unresponsive replicas.
        suspicion: tracks calls that may be the cause of lost replicas.
        leave: whether an attempt may be abandoned for another one, which is then granted.
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
    """

    def __init__(
        self,
        controller: Controller,
        replicas: Replicas,
        placements: PlacementClient,
        metrics: RouterMetrics,
        stalls: StallDetector,
        suspicion: Suspicion,
        leave: Callable[[CallState, Attempt], bool],
        clock: Callable[[], float],
    ) -> None:
        self._moves = Moves(clock)
        controller.on_push(self._moves.waits, self._moves.missing)
        self._controller = controller
        self._replicas = replicas
        self._placements = placements
        self._metrics = metrics
        self._stalls = stalls
        self._suspicion = suspicion
        self._leave = leave
        self._clock = clock
        self._splits = {"prefill", "decode"} <= set(replicas.roles)

    @property
    def has_pools(self) -> bool:
        """Whether there are several pools."""
        return len(self._replicas.roles) > 1

    def whole(self, state: CallState) -> list[Role]:
        """The pools that may still serve the whole call, in their order."""
        return [role for role in self._replicas.roles if role not in state.empty]

    async def attempt(self, state: CallState) -> Attempt:
        """Make the next attempt. When this returns, an event stream has sent its first new bytes,
        and any other response is complete. The response may be a refusal of the engine.

        Each attempt has its own id: an engine may still hold the last attempt, and the ledger could
        mistake the release of the last attempt for a release of this one. Cancelling stops the
        whole attempt.

        Raises:
            ReplicaFailedError: the attempt failed. The replica that failed it is recorded.
            MovedError: it was abandoned for one at :attr:`CallState.moves_to`.
            ApiError: the SLO cannot be guaranteed, and the class does not allow best effort.
        """
        state.attempts += 1
        call, transcript = state.call, state.transcript
        request_id = call.request_id
        moves_to, state.moves_to = state.moves_to, None
        if moves_to is not None:
            request_id = state.moved_id
        elif state.attempts > 1:
            request_id += f"-{state.attempts}"
        resume = transcript.begin(request_id) if transcript is not None else None
        if resume is not None:
            call = rest_of(call, len(resume.token_ids), self._clock() - call.received_s)
        placement = moves_to or await self._find(state, call, request_id, resume is not None)
        if placement.tier is Tier.GUARANTEED:
            state.promises += 1
        span = None
        if call.span is not None:
            span = call.span.child("attempt", Kind.CLIENT)
            span.set(sluice__attempt=state.attempts, sluice__hint=placement.replica_id)
        request = EngineRequest(
            request_id,
            call.endpoint,
            call.body,
            call.slo if placement.planned is None else call.slo.with_times(placement.planned),
            self._clock() - call.received_s,
            call.best_effort or placement.tier is Tier.BEST_EFFORT,
            call.prefix if resume is None else NO_PREFIX,
            _UNTRACED if span is None else span.context,
            resume=resume,
            resumable=transcript is not None,
            confirm=state.case.suspected,
            tenant=call.client.tenant,
            weight=call.client.caps.weight,
            direct_patience_s=_patience_s(state, placement.replica_id),
            promised=placement.tier is Tier.GUARANTEED,
        )
        call.charge.sent()
        if placement.prefill_id is None:
            return await self._answer(state, request, placement, span)
        first = await self._prefill(state, request, placement, span)
        if first.head.status >= 400:
            if resume is not None:
                raise ReplicaFailedError(*_NOT_RESUMED, retry=False)
            return first
        if first.head.replica_id not in ("", placement.prefill_id):
            # The guarantee was for a P/D pair with the other prefill replica.
            if placement.tier is Tier.GUARANTEED:
                state.promises -= 1
            placement = placement._replace(
                prefill_id=first.head.replica_id, tier=None, predicted_ttft_s=None
            )
        handoff = first.tail.handoff if first.tail is not None else None
        waited_s = self._clock() - call.received_s
        request = replace(request, waited_s=waited_s, handoff=handoff)
        answer = await self._answer(state, request, placement, span)
        answer.prefill = first
        return answer

    async def _find(self, state: CallState, call: Call, request_id: str, begun: bool) -> Placement:
        """See :meth:`PlacementClient.find`; with its own span, which includes the time queued."""
        key, prefill_key = request_key(request_id), 0
        if self._splits and not state.empty & {"prefill", "decode"} and may_split(call):
            prefill_key = request_key(_prefill_id(request_id))
        if call.span is None:
            return await self._placements.find(call, key, state.failed, prefill_key, begun)
        span = call.span.child("decision")
        try:
            found = await self._placements.find(call, key, state.failed, prefill_key, begun)
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

    async def _prefill(
        self, state: CallState, request: EngineRequest, placement: Placement, span: Span | None
    ) -> Attempt:
        """Compute the prompt on the chosen prefill replica.

        Raises:
            ReplicaFailedError: it failed.
        """
        started_s = self._clock()
        own_id = _prefill_id(request.request_id)
        slo = prompt_slo(request.slo, placement.handover_s)
        leg = replace(
            request,
            request_id=own_id,
            slo=slo,
            prefill_only=True,
            resumable=False,
            direct_patience_s=None,
        )
        own_span = None
        if span is not None:
            own_span = span.child("prefill", Kind.CLIENT)
            own_span.set(sluice__hint=placement.prefill_id)
            leg = replace(leg, trace=own_span.context)
        try:
            first = await self._send(state, leg, placement.prefill_id, "prefill", own_span)
        except BaseException as error:
            self._controller.release(request_key(request.request_id))
            _end(span, error)
            raise
        first.close()
        refused = first.head.status >= 400
        if refused:
            self._controller.release(request_key(own_id))
            self._controller.release(request_key(request.request_id))
            _end(span, None)
        else:
            self._metrics.leg(Phase.PREFILL, self._clock() - started_s)
            if self._has_moved(first, placement.prefill_id):
                self._controller.release(request_key(own_id))
        return first

    async def _answer(
        self, state: CallState, request: EngineRequest, placement: Placement, span: Span | None
    ) -> Attempt:
        """Have the call answered by the chosen replica, or by any if none was chosen.

        Raises:
            ReplicaFailedError: it failed.
        """
        started_s = self._clock()
        target, key = placement.replica_id, request_key(request.request_id)
        rest = self.whole(state) or list(self._replicas.roles)
        role = placement.role if target is not None and placement.role in rest else rest[0]
        take = state.transcript.take if state.transcript is not None else None
        attempt = await self._send(state, request, target, role, span, take)
        if placement.prefill_id is not None:
            self._note_handover(attempt, self._clock() - started_s)
            attempt.prefill_id = placement.prefill_id
        if self._has_moved(attempt, target):
            self._controller.release(key)
            if placement.tier is Tier.GUARANTEED:
                state.promises -= 1
            return attempt
        if attempt.head.status >= 400:
            self._controller.release(key)
        if placement.tier is Tier.GUARANTEED:
            attempt.tier = Tier.GUARANTEED
            attempt.predicted_ttft_s = placement.predicted_ttft_s
        return attempt

    async def _send(
        self,
        state: CallState,
        request: EngineRequest,
        target: str | None,
        role: Role,
        span: Span | None,
        take: Callable[[ResponseChunk], Piece] | None = None,
    ) -> Attempt:
        """Send a request to one replica, and wait until its answer has begun.

        Raises:
            ReplicaFailedError: it failed. Its reservation is released, and the replica that failed
                is recorded.
        """
        async with self._suspicion.trial(state.case, target):
            return await self._begin(state, request, target, role, span, take)

    async def _begin(
        self,
        state: CallState,
        request: EngineRequest,
        target: str | None,
        role: Role,
        span: Span | None,
        take: Callable[[ResponseChunk], Piece] | None,
    ) -> Attempt:
        """See :meth:`_send`."""
        stream = self._replicas.generate(request, target, state.failed, role)

        key = request_key(request.request_id)

        def close() -> None:
            stream.cancel()
            self._moves.forget(key)
            CHOICES.forget(request.request_id)
            self._stalls.forget(attempt)
            self._suspicion.ended(attempt)
            self._controller.release(key)

        attempt = Attempt(
            request.request_id,
            stream,
            target,
            role,
            request.waited_s,
            close,
            span,
            take,
            self._clock,
        )
        self._stalls.watch(attempt, partial(self._leave, state, attempt))
        self._suspicion.sent(state.case, attempt)
        CHOICES.expect(request.request_id, attempt.sent_to)
        if target is not None and _may_move(state, request):
            move = partial(self._move, state, attempt, target)
            self._moves.watch(key, target, state.call, move)
        try:
            await attempt.begin()
            CHOICES.forget(request.request_id)
            self._moves.forget(key)
            if attempt.head.status == _BUSY:
                raise ReplicaFailedError(Reason.REPLICAS_FULL, "Every replica tried is full.")
            if request.resume is not None and not request.prefill_only:
                _check_resumed(state, attempt)
        except BaseException as error:
            if isinstance(error, ReplicaFailedError):
                if error.reason is Reason.NO_REPLICA:
                    state.empty.add(role)
                    state.in_vain += 1
                self.note_failure(state, attempt, error)
            close()
            attempt.end_span(_name_of(error))
            raise
        return attempt

    async def _move(self, state: CallState, attempt: Attempt, replica_id: str) -> None:
        """Abandon an attempt that is going to miss its TTFT at ``replica_id``, if another replica
        can guarantee what is left of the SLO and the attempt has produced nothing meanwhile."""
        call, key = state.call, request_key(state.moved_id)
        found = await self._placements.elsewhere(call, key, state.failed, replica_id)
        if found is None:
            return
        if attempt.opened or not attempt.give_up(MovedError()):
            self._controller.release(key)
            return
        state.moved, state.moves_to = True, found
        state.in_vain += 1

    def drop(self, state: CallState) -> None:
        """A call ended: release the reservation of a move that was not made."""
        if state.moves_to is not None:
            self._controller.release(request_key(state.moved_id))

    def note_failure(self, state: CallState, attempt: Attempt, failure: ReplicaFailedError) -> None:
        """Record that a replica has failed a call. Call this before the attempt is closed."""
        state.verdict = self._suspicion.judge(state.call, state.case, attempt, failure)
        replica_id = attempt.place
        if replica_id is None:
            return
        state.failed.append(replica_id)
        if failure.dead:
            self._controller.replica_gone([replica_id])
        elif isinstance(failure, NobodyTakesError):
            return
        elif failure.reason is Reason.REPLICA_FAILED and not failure.hung:
            self._controller.troubled(replica_id, Trouble.FAILED)

    def _has_moved(self, attempt: Attempt, target: str | None) -> bool:
        """Whether another replica serves than the chosen one: then no replica will confirm the
        reservation, and the chosen replica's guarantee does not hold here."""
        moved = target is not None and attempt.head.replica_id not in ("", target)
        if moved:
            self._metrics.fallback(Fallback.MOVED)
        return moved

    def _note_handover(self, attempt: Attempt, seconds: float) -> None:
        """Record the time from the prompt's end to the first token, or to its bytes if streamed."""
        if attempt.tail is not None and attempt.tail.token_offsets_s:
            seconds = attempt.tail.token_offsets_s[0]
        elif attempt.tail is not None and attempt.head.media_type != EVENT_STREAM:
            return
        self._metrics.leg(Phase.HANDOVER, seconds)


def _may_move(state: CallState, request: EngineRequest) -> bool:
    """Whether an attempt may be abandoned for one at a replica that is earlier. At most once per
    call; not for a phase of a P/D pair, and not for a call suspected of losing replicas."""
    whole = not request.prefill_only and request.handoff is None and request.resume is None
    stated = state.call.slo.ttft_s is not None
    return request.promised and stated and whole and not (state.moved or state.case.suspected)


def _patience_s(state: CallState, replica_id: str | None) -> float | None:
    return None if state.direct is None else state.direct.patience_s(replica_id)


def _prefill_id(request_id: str) -> str:
    return f"{request_id}.prefill"


def _check_resumed(state: CallState, attempt: Attempt) -> None:
    """Check that an answer continues the stream that the client has received.

    Raises:
        ReplicaFailedError: it does not.
    """
    repeated = state.transcript is not None and state.transcript.repeated
    if attempt.head.status != 200 or attempt.head.media_type != EVENT_STREAM or not repeated:
        raise ReplicaFailedError(*_NOT_RESUMED, retry=False)


def _name_of(error: BaseException) -> str:
    if isinstance(error, MovedError):
        return "moved"
    return error.reason.value if isinstance(error, ReplicaFailedError) else "cancelled"


def _end(span: Span | None, error: BaseException | None) -> None:
    if span is not None:
        if error is not None:
            span.fail(_name_of(error))
        span.end()
