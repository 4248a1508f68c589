"""A call's answer: the attempts at it, each one try at a replica, and what its client has of it."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseSent,
    ResponseTail,
    ResponseTaken,
    Resume,
    request_key,
)
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import MoveReason
from sluice.router.request.call import Call
from sluice.router.serve.contract import ReplicaFailedError, ReplicaStream
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import TokenClock
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Span

NOT_RESUMED = (Reason.INTERNAL, "Another replica could not resume the stream.")

_NO_HEAD = ResponseHead(500, "application/json")
_NO_DECISION = RouteDecision(None, "none")

_CREATED = re.compile(rb'"created": ?\d+')
"""The date of an event; it precedes all generated text."""


class Piece(NamedTuple):
    """Bytes to forward, and the output tokens (of the first choice) in them.

    Attributes:
        sent: of chunks that the replica has sent to the client itself: the tokens of each, and when
            it was sent, on the clock of the attempt.
        reasoned: the reasoning ended with this many of all these tokens; 0: it did not end.
        made: of a request of stages: the tokens of each chunk, and when they left the engine, on
            the same clock.
    """

    data: bytes
    tokens: int
    sent: tuple[tuple[int, float], ...] = ()
    reasoned: int = 0
    made: tuple[tuple[int, float], ...] = ()


class Transcript:
    """The part of a stream that the client has, over all attempts, so that another replica can
    resume it. Its memory is 4 bytes per token and 4 per chunk.

    The resuming replica produces the whole stream again, without computing the known tokens
    (:class:`~sluice.protocol.requests.Resume`). The repeated part is dropped here and compared with
    what was sent: a stream that differs is not forwarded. Each attempt starts with :meth:`begin`,
    and each of its chunks goes through :meth:`take`.
    """

    def __init__(self) -> None:
        self._response_id = ""
        self._token_ids = array("I")
        self._chunks = array("I")
        self._bytes = 0
        self._created = b""
        self.resumable = True
        """Whether all sent tokens are known: a replica does not report tokens from which another
        one could not resume."""
        # Of the current attempt: the chunks and bytes that it has repeated, and its own date.
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""

    @property
    def begun(self) -> bool:
        """Whether the client has any of it."""
        return self._bytes > 0

    @property
    def repeated(self) -> bool:
        """Whether the current attempt has repeated everything that the client has."""
        return self._repeated == len(self._chunks)

    def begin(self, request_id: str) -> Resume | None:
        """An attempt under this id starts. Returns the state to resume from, if any was sent."""
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""
        if self._bytes:
            return Resume(tuple(self._token_ids), tuple(self._chunks), self._response_id)
        # A failed attempt may have generated tokens without text yet.
        self._token_ids, self._chunks = array("I"), array("I")
        self._response_id = request_id
        self.resumable = True
        return None

    def take(self, chunk: ResponseChunk) -> tuple[bytes, int, int]:
        """The part of a chunk to send to the client, nothing if the client has it already: bytes,
        tokens and, if the reasoning ended in it, its tokens until then. Raises ReplicaFailedError:
        the attempt does not repeat what was sent."""
        if self._repeated < len(self._chunks):
            self._check_repeated(chunk)
            return b"", 0, 0
        data = chunk.data
        if self._created_again:
            data = data.replace(self._created_again, self._created, 1)
        elif data and not self._created:
            self._created = _created_in(data)
        self._token_ids.extend(chunk.token_ids)
        self._chunks.append(chunk.tokens)
        self.resumable = self.resumable and len(chunk.token_ids) == chunk.tokens
        self._repeated += 1
        self._bytes += len(data)
        return data, chunk.tokens, chunk.reasoned

    def _check_repeated(self, chunk: ResponseChunk) -> None:
        same = chunk.tokens == self._chunks[self._repeated]
        self._repeated += 1
        self._repeated_bytes += len(chunk.data)
        if not self._created_again:
            self._created_again = _created_in(chunk.data)
        if self._repeated == len(self._chunks):
            # The names of tool calls differ each time, so the bytes are counted, not compared.
            same = same and self._repeated_bytes == self._bytes
        if not same:
            raise ReplicaFailedError(
                Reason.INTERNAL, "Another replica produced a different stream.", retry=False
            )


def _created_in(data: bytes) -> bytes:
    found = _CREATED.search(data)
    return found[0] if found is not None else b""


class MovedError(Exception):
    """An attempt is abandoned for one at another replica that can meet its SLO, or that takes its
    stream over. Its own replica has not failed."""


def name_of(error: BaseException) -> str:
    """What ended an attempt early, for its span."""
    if isinstance(error, MovedError):
        return "moved"
    return error.reason.value if isinstance(error, ReplicaFailedError) else "cancelled"


class Attempt:
    """One replica's answer: :meth:`begin` it, then :meth:`read` its pieces. ``transcript``: of the
    stream that it is part of; it selects what of a chunk is forwarded.

    Attributes:
        request: as sent to the replica.
        decision: the controller's, which it follows. It has a promise only as long as the chosen
            replica is the one that serves it.
        key: of its reservation at the controller.
        role: of the pool that it was sent to.
        place: the replica that has it, as far as is known.
        head: of the response; until it arrives, a status of 500.
        tail: set once the response has ended by itself.
        prefill: the finished attempt at the prefill replica, if that is a separate one.
        opened: :meth:`begin` has returned.
        closed: it has been stopped, or has ended.
        heard: the replica has sent anything.
        heard_s: when something arrived last; before that, when it was made.
    """

    def __init__(
        self,
        request: EngineRequest,
        decision: RouteDecision,
        role: Role,
        stream: ReplicaStream,
        span: Span | None = None,
        transcript: Transcript | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.decision = decision
        self.key = request_key(request.request_id)
        self.stream = stream
        self.role = role
        self.place = decision.replica_id
        self.span = span
        self.head = _NO_HEAD
        self.tail: ResponseTail | None = None
        self.prefill: Attempt | None = None
        self.opened = False
        self.closed = False
        self.heard = False
        self._clock = clock
        self.heard_s = self.made_s = clock()
        self._has_head = False
        self._waiter: asyncio.Task[Any] | None = None
        self._abandoned: ReplicaFailedError | MovedError | None = None
        self._items = stream.__aiter__()
        self._ready: deque[Piece] = deque()
        self._transcript = transcript
        # Tokens without text yet are counted with the next bytes.
        self._pending_tokens = self._pending_reasoned = 0
        self._pending_offsets_s: list[tuple[int, float]] = []
        # When the request reached the replica, at the earliest that any chunk shows.
        self._reached_s = inf

    @property
    def moved(self) -> bool:
        """Whether another replica serves it than the chosen one: then no replica will confirm the
        reservation, and the promise does not hold."""
        chosen = self.decision.replica_id
        return chosen is not None and self.head.replica_id not in ("", chosen)

    @property
    def waits(self) -> bool:
        """Whether a read of its next items is pending. There is none while the client is slow."""
        return self._waiter is not None and self._abandoned is None

    def sent_to(self, replica_id: str) -> None:
        """Serve has sent it to this replica: its place, until the answer names the replica."""
        if not self.heard:
            self.place = replica_id

    def abandon(self, failure: ReplicaFailedError | MovedError) -> bool:
        """Fail the pending read with ``failure``, if there is one. Returns whether it did."""
        if self._waiter is None or not self.waits:
            return False
        self._abandoned = failure
        return self._waiter.cancel()

    async def begin(self) -> None:
        """Wait for the first bytes of an event stream, or for all of any other response. Raises
        ReplicaFailedError: it failed, or ended without a head or a tail. Raises MovedError: it was
        abandoned for another one."""
        ready: deque[Piece] = deque()
        while (piece := await self.read()) is not None:
            ready.append(piece)
            if self.head.media_type == EVENT_STREAM:
                break
        self._ready, self.opened = ready, True

    async def read(self) -> Piece | None:
        """The next piece; ``None``: the response has ended by itself. What arrives together is one
        piece, so that it costs one send. Raises ReplicaFailedError: it failed, or ended without a
        tail. Raises MovedError: it was abandoned for another one."""
        if self._ready:
            return self._ready.popleft()
        while self.tail is None:
            # Wait for the next delivery.
            task = self._waiter = asyncio.current_task()
            assert task is not None
            cancelling = task.cancelling()
            try:
                items = await anext(self._items)
            except StopAsyncIteration:
                raise ReplicaFailedError(
                    Reason.REPLICA_FAILED, "The replica's response ended too early."
                ) from None
            except asyncio.CancelledError:
                # Our own cancellation, unless another one came, too.
                if self._abandoned is None or task.uncancel() > cancelling:
                    raise
                raise self._abandoned from None
            finally:
                self._waiter = None
            self.heard_s, self.heard = self._clock(), True

            # Join its chunks.
            data, tokens, reasoned = [], self._pending_tokens, self._pending_reasoned
            sent: tuple[tuple[int, float], ...] = ()
            offsets_s = self._pending_offsets_s
            for item in items:
                if isinstance(item, ResponseChunk) and self._has_head:
                    own = item.data, item.tokens, item.reasoned
                    # A response that is not a stream (a refusal, say) is forwarded unchanged.
                    if self._transcript is not None and self.head.media_type == EVENT_STREAM:
                        own = self._transcript.take(item)
                    data.append(own[0])
                    if own[2]:
                        reasoned = tokens + own[2]
                    tokens += own[1]
                    if item.offset_s and own[1]:
                        offsets_s.append((own[1], item.offset_s))
                elif isinstance(item, ResponseTaken):
                    self.place = item.replica_id
                elif isinstance(item, ResponseHead):
                    self.head, self._has_head = item, True
                    self.place = item.replica_id or self.place
                elif not self._has_head:
                    raise ReplicaFailedError(
                        Reason.INTERNAL, "A replica's response had no head.", retry=False
                    )
                elif isinstance(item, ResponseTail):
                    self.tail = item
                elif isinstance(item, ResponseSent):
                    times_s = [self.made_s + offset_s for offset_s in item.offsets_s]
                    if item.reasoned:
                        reasoned = sum(count for count, _ in sent) + item.reasoned
                    sent += tuple(zip(item.tokens, times_s, strict=True))

            made: tuple[tuple[int, float], ...] = ()
            if offsets_s:
                self._reached_s = min(self._reached_s, self.heard_s - offsets_s[-1][1])
                made = tuple([(count, self._reached_s + offset_s) for count, offset_s in offsets_s])
            joined = b"".join(data)
            self._pending_tokens = 0 if joined else tokens
            self._pending_reasoned = 0 if joined or sent else reasoned
            if joined:
                self._pending_offsets_s = []
            if joined or sent:
                return Piece(joined, tokens, sent, reasoned, made)
        return None

    def check_resumed(self, transcript: Transcript | None) -> None:
        """Check that it continues the stream that the client has received. Raises
        ReplicaFailedError: it does not."""
        repeated = transcript is not None and transcript.repeated
        if self.head.status != 200 or self.head.media_type != EVENT_STREAM or not repeated:
            raise ReplicaFailedError(*NOT_RESUMED, retry=False)

    def end_span(self, error: str | None = None) -> None:
        """The attempt is over; ``error`` names what ended it early. Idempotent."""
        span, self.span = self.span, None
        if span is not None:
            span.set(sluice__replica=self.head.replica_id or None)
            if error is not None:
                span.fail(error)
            span.end()


@dataclass(slots=True)
class Case:
    """One call's part in lost replicas.

    Attributes:
        suspected: it was at a replica when that was lost.
        place: the replica that was lost. A further failure there is the same loss.
        lasted_s: how long the call had been there.
        spared: it was one of many suspects at its second replica when that was lost, too.
    """

    suspected: bool = False
    place: str | None = None
    lasted_s: float = 0.0
    spared: bool = False


@dataclass(slots=True, eq=False)
class Answer:
    """The state of a call over its attempts. It is open once an attempt is.

    Attributes:
        case: the call's part in lost replicas.
        clock: when its tokens reached the client, as far as is known.
        transcript: what its client has received of the stream; ``None`` if the stream cannot be
            resumed.
        max_attempts: at most, of those that count.
        fetched: its client's Envoy may fetch the stream from the replica, and does so once an
            attempt is open; then it cannot be resumed.
        opened: the attempts whose response has begun, in order. The client has the head of the
            first; each later one resumes the stream of the one before.
        attempts: made so far, the current one included.
        failed: replicas that have failed the call.
        alive_s: when there was a sign of life of the call last. Its time in queues does not count.
        empty: pools that had no replica for the call when they were last asked.
        uncounted: attempts that found a pool empty or were moved: neither counts as a failed one.
        promises: attempts whose SLO was promised at the replica that they were sent to, even if
            that replica failed.
        granted: the current attempt is abandoned for another one, which the retry budget allows.
        verdict: the failure that ends the call, if it is blamed for lost replicas.
        moved: the call has left a replica that was going to miss its TTFT; it does so at most once.
        moves_to: the decision for the next attempt after such a move, or after its stream has moved
            (:mod:`sluice.router.dispatch.migrations`).
        move_reason: why its stream moves.
        left: the replicas that its running stream has left. left_s: when it left the last one.
        head, decision, tier: that the client was sent, once it is open. Without admission control
            there is no promise, so the tier is best effort, too.
    """

    call: Call
    case: Case
    clock: TokenClock
    transcript: Transcript | None = None
    max_attempts: int = 1
    fetched: bool = False
    opened: list[Attempt] = field(default_factory=list)
    attempts: int = 0
    failed: list[str] = field(default_factory=list)
    alive_s: float = -inf
    empty: set[Role] = field(default_factory=set)
    uncounted: int = 0
    promises: int = 0
    granted: bool = False
    verdict: ReplicaFailedError | None = None
    moved: bool = False
    moves_to: RouteDecision | None = None
    move_reason: MoveReason | None = None
    left: list[str] = field(default_factory=list)
    left_s: float = -inf
    head: ResponseHead = _NO_HEAD
    decision: RouteDecision = _NO_DECISION
    tier: Tier = Tier.BEST_EFFORT

    @property
    def made(self) -> int:
        """The attempts that reached a replica and were not moved."""
        return self.attempts - self.uncounted

    @property
    def spent(self) -> bool:
        """Whether the call has used all of its attempts."""
        return self.made >= self.max_attempts

    @property
    def moved_id(self) -> str:
        """The id of the attempt at the replica that the call moves to."""
        number = f"-{len(self.opened)}" if self.opened else ""
        return f"{self.call.request_id}-moved{number}"

    @property
    def next_id(self) -> str:
        """The id of the attempt that is about to be made."""
        if self.moves_to is not None:
            return self.moved_id
        number = f"-{self.attempts}" if self.attempts > 1 else ""
        return self.call.request_id + number

    def add(self, attempt: Attempt) -> None:
        """The response of an attempt has begun."""
        if not self.opened:
            self.head, self.decision = attempt.head, attempt.decision
            if attempt.decision.tier is Tier.GUARANTEED:
                self.tier = Tier.GUARANTEED
        self.opened.append(attempt)

    @property
    def waited_s(self) -> float:
        """The call's age when it was sent to the replica that answered it."""
        return self.opened[0].request.waited_s

    @property
    def tail(self) -> ResponseTail | None:
        """Set once the response has ended by itself."""
        return self.opened[-1].tail

    @property
    def resumes(self) -> int:
        """How often another replica has resumed it, its moves included."""
        return len(self.opened) - 1

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a prefix cache, once the response has ended by itself."""
        attempt = self.opened[-1]
        tail = (attempt.prefill or attempt).tail
        return 0 if tail is None else tail.cached_tokens

    @property
    def queued_s(self) -> float | None:
        """From the call's arrival to the first batch that it was in, once the response has ended by
        itself; ``None`` if the engine does not report it, or another replica has resumed it."""
        attempt = self.opened[-1].prefill or self.opened[-1]
        if len(self.opened) > 1 or attempt.tail is None or attempt.tail.queued_s is None:
            return None
        return attempt.request.waited_s + attempt.tail.queued_s


OpenAttempts = dict[Attempt, Answer]
"""The attempts that a router has open at one model's replicas, in the order in which they were
made. The dispatcher adds and removes them; those that watch attempts read it."""
