"""Answers on their way from replicas, and how an attempt at one fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from replica.engine import EVENT_STREAM, ResponseChunk, ResponseHead, ResponseItem, ResponseTail
from router.errors import Reason
from scheduling.routing.base import Tier
from telemetry.tracing import Span


class ReplicaFailedError(Exception):
    """A replica did not serve an attempt.

    Args:
        reason: what the client is told if this was the last attempt.
        message: what happened, without inner details.
        dead: the replica is known to serve nothing any more.
        retry: another replica may do better.
    """

    def __init__(
        self, reason: Reason, message: str, *, dead: bool = False, retry: bool = True
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.dead = dead
        self.retry = retry


class ReplicaStream(Protocol):
    """One attempt's answer, on its way."""

    def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        """Yield items as they come: a head, chunks, a tail.

        Raises:
            ReplicaFailedError: the replica or the way to it failed.
        """

    def cancel(self) -> None:
        """Stop the replica's work. Never blocks; harmless after the end."""


class Piece(NamedTuple):
    """Bytes to hand on, and the output tokens (of the first choice) in them."""

    data: bytes
    tokens: int


class Attempt:
    """One replica's answer. Iterate over it for the pieces; then :attr:`tail` is set.

    Close it in any case.

    Attributes:
        waited_s: the request's age when it was sent to the replica.
        head: of the response; before there is one, a status of 500.
        tail: once the response has ended by itself.
        tier: ``GUARANTEED`` if the objective was promised where it was sent. Where admission is off
            nothing is promised, so it is best effort, too.
        predicted_ttft_s: from the call's arrival to the first token, where that was promised.
        prefill_id: the replica that has computed the prompt, where that is another one.
        span: of this attempt, where the request is traced; it ends with :meth:`close`.

    Args:
        close: ends the replica's work and the controller's reservation.
        take: what to hand on of a chunk.
    """

    def __init__(
        self,
        stream: ReplicaStream,
        waited_s: float,
        close: Callable[[], None],
        span: Span | None = None,
        take: Callable[[ResponseChunk], Piece] | None = None,
    ) -> None:
        self.head = ResponseHead(500, "application/json")
        self.tail: ResponseTail | None = None
        self.waited_s = waited_s
        self.tier = Tier.BEST_EFFORT
        self.predicted_ttft_s: float | None = None
        self.prefill_id: str | None = None
        self.span = span
        self._items = stream.__aiter__()
        self._ready: list[Piece] = []
        self._close: Callable[[], None] | None = close
        self._taken = take or _all_of
        self._untold_tokens = 0

    async def begin(self) -> None:
        """Wait for the first bytes of an event stream, or for all of any other response.

        Raises:
            ReplicaFailedError: it failed, or ended without a head or a tail.
        """
        head = None
        while self.tail is None:
            items = await self._next_items()
            if head is None and items:
                if not isinstance(items[0], ResponseHead):
                    raise ReplicaFailedError(
                        Reason.INTERNAL, "A replica's response had no head.", retry=False
                    )
                head = self.head = items[0]
            piece = self._take(items)
            if piece.data:
                self._ready.append(piece)
                if head is not None and head.media_type == EVENT_STREAM:
                    return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """What :meth:`begin` read, then what follows.

        Raises:
            ReplicaFailedError: it failed, or ended without a tail.
        """
        for piece in self._ready:
            yield piece
        self._ready.clear()
        while self.tail is None:
            piece = self._take(await self._next_items())
            if piece.data:
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
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            raise ReplicaFailedError(
                Reason.REPLICA_FAILED, "The replica's response ended too early."
            ) from None

    def _take(self, items: Sequence[ResponseItem]) -> Piece:
        """Join the chunks of one delivery, so that they cost one send."""
        data, tokens = [], self._untold_tokens
        # What is no stream (a refusal, say) is handed on as it is.
        take = self._taken if self.head.media_type == EVENT_STREAM else _all_of
        for item in items:
            if isinstance(item, ResponseChunk):
                piece = take(item)
                data.append(piece.data)
                tokens += piece.tokens
            elif isinstance(item, ResponseTail):
                self.tail = item
        joined = b"".join(data)
        # Tokens of which no text has come yet leave with the next bytes.
        self._untold_tokens = 0 if joined else tokens
        return Piece(joined, tokens)


def _all_of(chunk: ResponseChunk) -> Piece:
    return Piece(chunk.data, chunk.tokens)


class Answer:
    """A call's response: of one attempt, or of several where a stream is resumed. Iterate over it
    for the pieces; then :attr:`tail` is set.

    Close it in any case.

    Args:
        attempt: the first one that has opened.
        resume: opens one that goes on where the last one broke off, or raises the failure.

    Attributes:
        head, waited_s, tier, predicted_ttft_s, prefill_id: of the first attempt, as the client was
            told.
        resumes: how often another replica has gone on.
    """

    def __init__(
        self,
        attempt: Attempt,
        resume: Callable[[Attempt, ReplicaFailedError], Awaitable[Attempt]],
    ) -> None:
        self.head = attempt.head
        self.waited_s = attempt.waited_s
        self.tier = attempt.tier
        self.predicted_ttft_s = attempt.predicted_ttft_s
        self.prefill_id = attempt.prefill_id
        self.resumes = 0
        self._attempt = attempt
        self._resume = resume

    @property
    def tail(self) -> ResponseTail | None:
        """Set once the response has ended by itself."""
        return self._attempt.tail

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, in order.

        Raises:
            ReplicaFailedError: it broke off, and nobody can go on with it.
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
