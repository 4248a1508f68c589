"""The spans of one request in a replica: its wait, its prefill and its decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from sluice.replica.engine import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
)
from sluice.telemetry.tracing import Span, Tracer, attribute_of


class RequestTrace:
    """Watches the items of one response. At its end, this makes the child spans of the request's
    span:

    - ``queue``: from its arrival at the replica to its first batch;
    - ``prefill``: from there to its first token;
    - ``decode``: from there to its last.

    If the engine does not report the first batch, there is neither ``queue`` nor ``prefill``.

    Attributes:
        request: the request, with the trace context for the engine's own spans.
    """

    def __init__(self, span: Span, request: EngineRequest, clock: Callable[[], float]) -> None:
        self.request = replace(request, trace=span.context)
        self._span = span
        self._clock = clock
        self._received_s = clock()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._status = 0
        self._tail: ResponseTail | None = None

    @classmethod
    def begin(
        cls, tracer: Tracer, request: EngineRequest, clock: Callable[[], float] = time.monotonic
    ) -> RequestTrace | None:
        """The trace of ``request``, or ``None`` if it is not traced.

        Args:
            clock: monotonic seconds, the tracer's.
        """
        span = tracer.join("generate", request.trace, clock())
        if span is None:
            return None
        span.set(
            sluice__request_id=request.request_id,
            sluice__endpoint=request.endpoint,
            sluice__class=request.slo.service_class,
            sluice__best_effort=request.best_effort,
        )
        return cls(span, request, clock)

    def saw(self, item: ResponseItem) -> None:
        """An item left the engine."""
        if isinstance(item, ResponseChunk):
            if item.tokens:
                self._last_s = self._clock()
                if self._first_s is None:
                    self._first_s = self._last_s
        elif isinstance(item, ResponseTail):
            self._tail = item
            if item.kv_handle is not None:  # only its prompt was requested
                self._first_s = self._clock()
        elif isinstance(item, ResponseHead):
            self._status = item.status

    def end(self) -> None:
        """The response ended, by itself or early."""
        span, tail = self._span, self._tail
        if tail is None:
            span.set(sluice__ended_early=True)
        else:
            counts = {"prompt_tokens": tail.prompt_tokens, "output_tokens": tail.output_tokens}
            span.set(**{attribute_of(name): count for name, count in counts.items()})
            if tail.token_offsets_s:  # a plain response: its one chunk has no times of tokens
                self._first_s = self._received_s + tail.token_offsets_s[0]
                self._last_s = self._received_s + tail.token_offsets_s[-1]
            if tail.queued_s is not None and self._first_s is not None:
                # Engine and replica share a clock, but the engine reads it a little earlier.
                started_s = min(self._received_s + tail.queued_s, self._first_s)
                self._part("queue", self._received_s, started_s)
                self._part("prefill", started_s, self._first_s)
        if self._first_s is not None and self._last_s is not None:
            self._part("decode", self._first_s, self._last_s)
        if self._status >= 500:
            span.fail(str(self._status))
        span.end()

    def _part(self, name: str, start_s: float, end_s: float) -> None:
        self._span.child(name, start_s=start_s).end(end_s)
