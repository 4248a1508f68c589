"""A call's answer: the attempts at it, each one try at a replica, and what its client has of it."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, NamedTuple

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
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
from sluice.scheduling.request.objective import Objective, TokenClock
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Span

NOT_RESUMED = (Reason.INTERNAL, "Another replica could not resume the stream.")

_NO_HEAD = ResponseHead(500, "application/json")
_NO_DECISION = RouteDecision(None, "none")

_CREATED = re.compile(rb'"created": ?\d+')  # the date of an event; it precedes all generated text


class Piece(NamedTuple):
    """Bytes to forward, and the output tokens (of the first choice) in them.

    ``sent``, ``made``: tokens and time (clock of the attempt) of each chunk that the replica has
    sent to the client itself, or of a request of stages. ``reasoned``: tokens until its end."""

    data: bytes
    tokens: int
    sent: tuple[tuple[int, float], ...] = ()
    reasoned: int = 0
    made: tuple[tuple[int, float], ...] = ()


class Transcript:
    """What the client has of a stream over all attempts; 4 bytes per token and 4 per chunk.

    A resuming replica produces the whole stream again, without computing the known tokens. The
    repeated part is compared and dropped: a stream that differs is not forwarded."""

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
        """The part of a chunk that the client lacks: bytes, tokens, and tokens until reasoning
        ended. Raises ReplicaFailedError: the attempt does not repeat what was sent."""
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
    """An attempt is abandoned for one at another replica. Its own replica has not failed."""


def name_of(error: BaseException) -> str:
    """What ended an attempt early, for its span."""
    if isinstance(error, MovedError):
        return "moved"
    return error.reason.value if isinstance(error, ReplicaFailedError) else "cancelled"


class Attempt:
    """One replica's answer: :meth:`begin` it, then :meth:`read` its pieces.

    ``decision``: it promises only while the chosen replica serves. ``key``: of the reservation at
    the controller. ``tail``: set once the response has ended by itself. ``prefill``: the finished
    attempt at a separate prefill replica. ``last_item_s``: at first the time of its making.
    ``forward``: sends a piece that arrives while a read waits; false: the next one is read."""

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
        self.forward: Callable[[Piece], bool] | None = None
        self.opened = False
        self.closed = False
        self.responded = False
        self._clock = clock
        self.last_item_s = self.made_s = clock()
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
        """Whether another replica than the chosen one serves it: then the promise is off."""
        chosen = self.decision.replica_id
        return chosen is not None and self.head.replica_id not in ("", chosen)

    @property
    def waits(self) -> bool:
        """Whether a read of its next items is pending. There is none while the client is slow."""
        return self._waiter is not None and self._abandoned is None

    def sent_to(self, replica_id: str) -> None:
        """Serve has sent it to this replica: its place, until the answer names the replica."""
        if not self.responded:
            self.place = replica_id

    def abandon(self, failure: ReplicaFailedError | MovedError) -> bool:
        """Fail the pending read with ``failure``, if there is one. Returns whether it did."""
        if self._waiter is None or not self.waits:
            return False
        self._abandoned = failure
        return self._waiter.cancel()

    async def begin(self) -> None:
        """Wait for a stream's first bytes, or all of another response. Raises ReplicaFailedError:
        it failed or is incomplete. Raises MovedError: it was abandoned for another one."""
        ready: deque[Piece] = deque()
        while (piece := await self.read()) is not None:
            ready.append(piece)
            if self.head.media_type == EVENT_STREAM:
                break
        self._ready, self.opened = ready, True

    async def read(self) -> Piece | None:
        """What has arrived, as one piece (one send); ``None`` at the end. Raises
        ReplicaFailedError: it failed or ended without a tail. Raises MovedError: it was abandoned
        for another one."""
        if self._ready:
            return self._ready.popleft()
        while self.tail is None:
            # Wait for the next delivery.
            task = self._waiter = asyncio.current_task()
            assert task is not None
            cancelling = task.cancelling()
            if self.forward is not None:
                self.stream.forward = self._forward
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
            if (piece := self._joined(items)) is not None:
                return piece
        return None

    def _forward(self, items: Sequence[ResponseItem]) -> bool:
        piece = self._joined(items)
        return piece is None or (self.forward is not None and self.forward(piece))

    def _joined(self, items: Sequence[ResponseItem]) -> Piece | None:
        """What has arrived as one piece; ``None``: there is nothing to send yet. Raises
        ReplicaFailedError."""
        self.last_item_s, self.responded = self._clock(), True
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
            self._reached_s = min(self._reached_s, self.last_item_s - offsets_s[-1][1])
            made = tuple([(count, self._reached_s + offset_s) for count, offset_s in offsets_s])
        joined = b"".join(data)
        self._pending_tokens = 0 if joined else tokens
        self._pending_reasoned = 0 if joined or sent else reasoned
        if joined:
            self._pending_offsets_s = []
        if joined or sent:
            return Piece(joined, tokens, sent, reasoned, made)
        return None

    def end_span(self, error: str | None = None) -> None:
        """The attempt is over; ``error`` names what ended it early. Idempotent."""
        span, self.span = self.span, None
        if span is not None:
            span.set(sluice__replica=self.head.replica_id or None)
            if error is not None:
                span.fail(error)
            span.end()


@dataclass(slots=True)
class SuspicionState:
    """One call's part in lost replicas.

    ``place``: the lost replica; a further failure there is the same loss. ``spared``: the call was
    one of many suspects at its second replica when that was lost, too."""

    suspected: bool = False
    place: str | None = None
    lasted_s: float = 0.0
    spared: bool = False


@dataclass(slots=True)
class Waits:
    """When a call's first placement began and ended, and seconds that it waited: for a promise, for
    its model's first replica, for a replica in an empty pool, and, as a stream, for the attempt
    after one that failed or moved."""

    asked_s: float = nan
    decided_s: float = nan
    queue_s: float = 0.0
    start_s: float = 0.0
    pool_s: float = 0.0
    failed_s: float = 0.0
    moved_s: float = 0.0


@dataclass(slots=True, eq=False)
class Announcement:
    """What is known of a promised stream that may have to say that it will be late.

    ``best_s``: shortest time per token between two looks, of which the last found ``tokens``, the
    last one at ``at_s``. ``timer``: of its first token."""

    said: bool = False
    best_s: float = inf
    tokens: int = 0
    at_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


Say = Callable[[Objective, "Answer", "Attempt"], None]
"""Tells the client which objective is going to be missed."""


@dataclass(slots=True, eq=False)
class Answer:
    """The state of a call over its attempts. It is open once an attempt is.

    ``transcript``: ``None`` if the stream cannot be resumed. ``fetched``: the client's Envoy may
    fetch the stream from the replica; then it cannot be resumed either. ``opened``: attempts whose
    response has begun; the client has the head of the first. ``alive_s``: the last sign of life;
    time in queues does not count. ``uncounted``: attempts that found a pool empty or were moved.
    ``promises``: counts also those whose replica failed. ``blame``: the failure if the call is
    blamed for lost replicas. ``moved``: the call has left a replica that would miss its TTFT, at
    most once. ``decided``: on its first attempt, before it was opened. ``left``: replicas that the
    running stream has left. ``say``: ``None`` if it cannot announce anything. ``tier``: best effort
    also without admission control."""

    call: Call
    suspicion: SuspicionState
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
    blame: ReplicaFailedError | None = None
    moved: bool = False
    moves_to: RouteDecision | None = None
    decided: RouteDecision | None = None
    move_reason: MoveReason | None = None
    left: list[str] = field(default_factory=list)
    left_s: float = -inf
    say: Say | None = None
    announcement: Announcement | None = None
    waits: Waits = field(default_factory=Waits)
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


OpenAttempts = dict[Attempt, Answer]
"""A router's open attempts at one model, in the order made. Only the dispatcher changes it."""
