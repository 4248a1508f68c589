"""One attempt's answer on its way from a replica, and how an attempt fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
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


class Answer:
    """An open response of one replica. Iterate over it for the pieces; then :attr:`tail` is set.

    Close it in any case.

    Attributes:
        waited_s: the request's age when it was sent to the replica.
        tier: ``GUARANTEED`` if its objective was promised.
        predicted_ttft_s: from the request's arrival to the first token, where that was promised.
        span: of this attempt, where the request is traced; it ends with :meth:`close`.
    """

    def __init__(
        self,
        stream: ReplicaStream,
        waited_s: float,
        close: Callable[[], None],
        span: Span | None = None,
    ) -> None:
        self.head = ResponseHead(500, "application/json")
        self.tail: ResponseTail | None = None
        self.waited_s = waited_s
        self.tier = Tier.BEST_EFFORT
        self.predicted_ttft_s: float | None = None
        self.span = span
        self._items = stream.__aiter__()
        self._ready: list[Piece] = []
        self._close: Callable[[], None] | None = close

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
        data, tokens = [], 0
        for item in items:
            if isinstance(item, ResponseChunk):
                data.append(item.data)
                tokens += item.tokens
            elif isinstance(item, ResponseTail):
                self.tail = item
        return Piece(b"".join(data), tokens)
