"""Answers that replicas send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from sluice.replica.engine import (
    EVENT_STREAM,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
    ResponseTaken,
)
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError, ReplicaStream
from sluice.scheduling.roles import Role
from sluice.scheduling.routing.base import Tier
from sluice.telemetry.tracing import Span


class MovedError(Exception):
    """An attempt is abandoned for one at another replica that can meet its SLO. Its own replica has
    not failed."""


class Piece(NamedTuple):
    """Bytes to forward, and the output tokens (of the first choice) in them. ``sent`` are the
    chunks that the replica has sent to the client itself: their token counts and send times, on the
    clock of the attempt. ``reasoned``: the reasoning ended with this many of all these tokens; 0:
    it did not end."""

    data: bytes
    tokens: int
    sent: tuple[tuple[int, float], ...] = ()
    reasoned: int = 0


class Attempt:
    """One replica's answer. Iterate over it for the pieces; then :attr:`tail` is set.

    Close it in any case.

    Attributes:
        waited_s: the request's age when it was sent to the replica.
        head: of the response; until it arrives, a status of 500.
        tail: set once the response has ended by itself.
        tier: ``GUARANTEED`` if the SLO is guaranteed at the replica that it was sent to. Without
            admission control there is no guarantee, so it is best effort, too.
        predicted_ttft_s: from the call's arrival to the first token, if the SLO is guaranteed.
        prefill_id: the prefill replica, if it is a separate one.
        prefill: the finished attempt there.
        span: of this attempt, if the request is traced; it ends with :meth:`close`.
        place: the replica that has it, as far as is known. role: of its pool.
        opened: :meth:`begin` has returned.
        told: HAProxy knows the tokens of what the replica has sent to the client itself.
        heard: the replica has sent anything.
        made_s: when it was made.
        heard_s: when something arrived last; before that, when it was made.

    Args:
        request_id: of the attempt.
        place: the replica that it was sent to; ``None``: any.
        close: ends the replica's work and the controller's reservation.
        take: returns the part of a chunk to forward.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        request_id: str,
        stream: ReplicaStream,
        place: str | None,
        role: Role,
        waited_s: float,
        close: Callable[[], None],
        span: Span | None = None,
        take: Callable[[ResponseChunk], Piece] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.place = place
        self.role = role
        self.opened = False
        self.told = True
        self._clock = clock
        self.heard_s = self.made_s = clock()
        self.heard = False
        self._waiter: asyncio.Task[Any] | None = None
        self._given_up: ReplicaFailedError | MovedError | None = None
        self.head = ResponseHead(500, "application/json")
        self.tail: ResponseTail | None = None
        self.waited_s = waited_s
        self.tier = Tier.BEST_EFFORT
        self.predicted_ttft_s: float | None = None
        self.prefill_id: str | None = None
        self.prefill: Attempt | None = None
        self.span = span
        self._items = stream.__aiter__()
        self._ready: list[Piece] = []
        self._close: Callable[[], None] | None = close
        self._taken = take or _all_of
        self._untold_tokens = self._untold_reasoned = 0

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

    def close(self) -> None:
        """Stop the work if the response has not ended by itself. Idempotent."""
        close, self._close = self._close, None
        if close is not None and self.tail is None:
            close()
        self.end_span()

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
        # A response that is not a stream (a refusal, say) is forwarded unchanged.
        take = self._taken if self.head.media_type == EVENT_STREAM else _all_of
        for item in items:
            if isinstance(item, ResponseChunk):
                piece = take(item)
                data.append(piece.data)
                if piece.reasoned:
                    reasoned = tokens + piece.reasoned
                tokens += piece.tokens
            elif isinstance(item, ResponseTail):
                self.tail = item
            elif isinstance(item, ResponseSent):
                self.told = self.told and item.told
                at_s = [self.made_s + offset_s for offset_s in item.offsets_s]
                if item.reasoned:
                    reasoned = sum(count for count, _ in sent) + item.reasoned
                sent += tuple(zip(item.tokens, at_s, strict=True))
        joined = b"".join(data)
        # Tokens without text yet are counted with the next bytes.
        self._untold_tokens = 0 if joined else tokens
        self._untold_reasoned = 0 if joined or sent else reasoned
        return Piece(joined, tokens, sent, reasoned)


def _all_of(chunk: ResponseChunk) -> Piece:
    return Piece(chunk.data, chunk.tokens, reasoned=chunk.reasoned)


class Answer:
    """A call's response: of one attempt, or of several where a stream is resumed. Iterate over it
    for the pieces; then :attr:`tail` is set.

    Close it in any case.

    Args:
        attempt: the first one that has opened.
        resume: opens one that resumes where the last one broke off, or raises the failure.

    Attributes:
        head, waited_s, tier, predicted_ttft_s, prefill_id: of the first attempt, as reported to the
            client.
        promised: the SLO was guaranteed when it was sent to a replica, even if that one failed.
        moved: it has left a replica that was going to miss its TTFT.
        resumes: how often another replica has resumed it.
    """

    def __init__(
        self,
        attempt: Attempt,
        resume: Callable[[Attempt, ReplicaFailedError], Awaitable[Attempt]],
        promised: bool = False,
        moved: bool = False,
    ) -> None:
        self.head = attempt.head
        self.waited_s = attempt.waited_s
        self.tier = attempt.tier
        self.predicted_ttft_s = attempt.predicted_ttft_s
        self.prefill_id = attempt.prefill_id
        self.promised = promised
        self.moved = moved
        self.resumes = 0
        self._attempt = attempt
        self._resume = resume

    @property
    def tail(self) -> ResponseTail | None:
        """Set once the response has ended by itself."""
        return self._attempt.tail

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a prefix cache, once the response has ended by itself."""
        tail = (self._attempt.prefill or self._attempt).tail
        return 0 if tail is None else tail.cached_tokens

    @property
    def queued_s(self) -> float | None:
        """From the call's arrival to the first batch that it was in, once the response has ended by
        itself; ``None`` if the engine does not report it, or another replica has resumed it."""
        attempt = self._attempt.prefill or self._attempt
        if self.resumes or attempt.tail is None or attempt.tail.queued_s is None:
            return None
        return attempt.waited_s + attempt.tail.queued_s

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, in order.

        Raises:
            ReplicaFailedError: it broke off, and no replica can resume it.
        """
        while True:
            try:
                async for piece in self._attempt:
                    yield piece
                return
            except ReplicaFailedError as failure:
                self._attempt = await self._resume(self._attempt, failure)
                self.resumes += 1

    def close(self) -> None:
        """Stop the work if the response has not ended by itself. Idempotent."""
        self._attempt.close()
