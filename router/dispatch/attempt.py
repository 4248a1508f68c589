"""One try at a replica: the controller's decision, the request as sent, and the answer to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from math import inf
from typing import Any

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
    ResponseTaken,
    request_key,
)
from sluice.router.dispatch.transcript import Piece, Transcript, whole_chunk
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError, ReplicaStream
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Span

NOT_RESUMED = (Reason.INTERNAL, "Another replica could not resume the stream.")


class MovedError(Exception):
    """An attempt is abandoned for one at another replica that can meet its SLO, or that takes its
    stream over. Its own replica has not failed."""


def name_of(error: BaseException) -> str:
    """What ended an attempt early, for its span."""
    if isinstance(error, MovedError):
        return "moved"
    return error.reason.value if isinstance(error, ReplicaFailedError) else "cancelled"


class Attempt:
    """One replica's answer. Iterate over it for the pieces; then :attr:`tail` is set.

    Attributes:
        request: as sent to the replica.
        decision: the controller's, which it follows. It has a guarantee only as long as the chosen
            replica is the one that serves it.
        key: of its reservation at the controller.
        stream: from the replica.
        role: of the pool that it was sent to.
        place: the replica that has it, as far as is known.
        span: of this attempt, if the request is traced; :meth:`end_span` ends it.
        head: of the response; until it arrives, a status of 500.
        tail: set once the response has ended by itself.
        prefill: the finished attempt at the prefill replica, if that is a separate one.
        opened: :meth:`begin` has returned.
        closed: it has been stopped, or has ended.
        heard: the replica has sent anything.
        made_s: when it was made.
        heard_s: when something arrived last; before that, when it was made.

    Args:
        transcript: of the stream that it is part of; it selects what of a chunk is forwarded.
        clock: monotonic seconds.
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
        self.head = ResponseHead(500, "application/json")
        self.tail: ResponseTail | None = None
        self.prefill: Attempt | None = None
        self.opened = False
        self.closed = False
        self.heard = False
        self._clock = clock
        self.heard_s = self.made_s = clock()
        self._waiter: asyncio.Task[Any] | None = None
        self._given_up: ReplicaFailedError | MovedError | None = None
        self._items = stream.__aiter__()
        self._ready: list[Piece] = []
        self._taken = whole_chunk if transcript is None else transcript.take
        self._untold_tokens = self._untold_reasoned = 0
        self._untold_offsets_s: list[tuple[int, float]] = []
        # When the request reached the replica, at the earliest that any chunk shows.
        self._reached_s = inf

    @property
    def guaranteed(self) -> bool:
        """Whether its SLO is guaranteed at the replica that serves it."""
        return self.decision.tier is Tier.GUARANTEED

    @property
    def moved(self) -> bool:
        """Whether another replica serves it than the chosen one: then no replica will confirm the
        reservation, and the guarantee does not hold."""
        chosen = self.decision.replica_id
        return chosen is not None and self.head.replica_id not in ("", chosen)

    @property
    def waits(self) -> bool:
        """Whether a read of its next items is pending. There is none while the client is slow."""
        return self._waiter is not None and self._given_up is None

    def sent_to(self, replica_id: str) -> None:
        """Serve has sent it to this replica: its place, until the answer names the replica."""
        if not self.heard:
            self.place = replica_id

    def give_up(self, failure: ReplicaFailedError | MovedError) -> bool:
        """Fail the pending read with ``failure``, if there is one. Returns whether it did."""
        if self._waiter is None or not self.waits:
            return False
        self._given_up = failure
        return self._waiter.cancel()

    async def begin(self) -> None:
        """Wait for the first bytes of an event stream, or for all of any other response.

        Raises:
            ReplicaFailedError: it failed, or ended without a head or a tail.
            MovedError: it was abandoned for another one.
        """
        head = None
        while self.tail is None:
            items = await self._next_items()
            if items and isinstance(items[0], ResponseTaken):
                self.place = items[0].replica_id
                items = items[1:]
            if head is None and items:
                head = self.head = self._head_of(items)
            piece = self._take(items)
            if piece.data or piece.sent:
                self._ready.append(piece)
                if head is not None and head.media_type == EVENT_STREAM:
                    break
        self.opened = True

    def check_resumed(self, transcript: Transcript | None) -> None:
        """Check that it continues the stream that the client has received.

        Raises:
            ReplicaFailedError: it does not.
        """
        repeated = transcript is not None and transcript.repeated
        if self.head.status != 200 or self.head.media_type != EVENT_STREAM or not repeated:
            raise ReplicaFailedError(*NOT_RESUMED, retry=False)

    def _head_of(self, items: Sequence[ResponseItem]) -> ResponseHead:
        """The head, which is the first of all items.

        Raises:
            ReplicaFailedError: it is something else.
        """
        head = items[0]
        if not isinstance(head, ResponseHead):
            raise ReplicaFailedError(
                Reason.INTERNAL, "A replica's response had no head.", retry=False
            )
        self.place = head.replica_id or self.place
        return head

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces that :meth:`begin` read, then the following ones.

        Raises:
            ReplicaFailedError: it failed, or ended without a tail.
        """
        for piece in self._ready:
            yield piece
        self._ready.clear()
        while self.tail is None:
            piece = self._take(await self._next_items())
            if piece.data or piece.sent:
                yield piece

    def end_span(self, error: str | None = None) -> None:
        """The attempt is over; ``error`` names what ended it early. Idempotent."""
        span, self.span = self.span, None
        if span is not None:
            span.set(sluice__replica=self.head.replica_id or None)
            if error is not None:
                span.fail(error)
            span.end()

    async def _next_items(self) -> Sequence[ResponseItem]:
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
            if self._given_up is None or task.uncancel() > cancelling:
                raise
            raise self._given_up from None
        finally:
            self._waiter = None
        self.heard_s = self._clock()
        self.heard = True
        return items

    def _take(self, items: Sequence[ResponseItem]) -> Piece:
        """Join the chunks of one delivery, so that they cost one send."""
        data, tokens, reasoned = [], self._untold_tokens, self._untold_reasoned
        sent: tuple[tuple[int, float], ...] = ()
        offsets_s = self._untold_offsets_s
        # A response that is not a stream (a refusal, say) is forwarded unchanged.
        take = self._taken if self.head.media_type == EVENT_STREAM else whole_chunk
        for item in items:
            if isinstance(item, ResponseChunk):
                piece = take(item)
                data.append(piece.data)
                if piece.reasoned:
                    reasoned = tokens + piece.reasoned
                tokens += piece.tokens
                if item.offset_s and piece.tokens:
                    offsets_s.append((piece.tokens, item.offset_s))
            elif isinstance(item, ResponseTail):
                self.tail = item
            elif isinstance(item, ResponseSent):
                at_s = [self.made_s + offset_s for offset_s in item.offsets_s]
                if item.reasoned:
                    reasoned = sum(count for count, _ in sent) + item.reasoned
                sent += tuple(zip(item.tokens, at_s, strict=True))
        if offsets_s:
            self._reached_s = min(self._reached_s, self.heard_s - offsets_s[-1][1])
        joined = b"".join(data)
        # Tokens without text yet are counted with the next bytes.
        self._untold_tokens = 0 if joined else tokens
        self._untold_reasoned = 0 if joined or sent else reasoned
        if joined:
            self._untold_offsets_s = []
        made = tuple([(count, self._reached_s + offset_s) for count, offset_s in offsets_s])
        return Piece(joined, tokens, sent, reasoned, made)
