"""Spans of requests, with OpenTelemetry's own SDK, exported over OTLP.

Off, OpenTelemetry is not imported; a request that is not sampled has no span. Times are given on
this process's monotonic clock; a span carries Unix time."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sluice.telemetry.logs import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

Attribute = str | bool | int | float

CONTEXT_HEADERS = ("traceparent", "tracestate")
"""The W3C trace context, as headers of a request and as fields of a call to a replica."""

_SCOPE = "sluice"

_CONVENTIONAL = {
    "model": "gen_ai__request__model",
    "prompt_tokens": "gen_ai__usage__input_tokens",
    "cached_tokens": "gen_ai__usage__cache_read__input_tokens",
    "output_tokens": "gen_ai__usage__output_tokens",
}
"""Attributes that have a name in OpenTelemetry's conventions for generative models."""


def attribute_of(figure: str) -> str:
    """The attribute name of one of our figures, as a keyword of :meth:`Span.set`."""
    return _CONVENTIONAL.get(figure) or f"{_SCOPE}__{figure}"


class Kind(enum.Enum):
    """The kind of a span, by its name in OpenTelemetry."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


class Span:
    """A span that is being recorded; end it in any case. Never set a prompt, an output or a key."""

    __slots__ = ("_offset_ns", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: OtelSpan, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        # Unix time less the monotonic one. One for all of a trace in this process: its spans must
        # not seem to overlap because a clock was read a moment later.
        self._offset_ns = offset_ns

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def is_recording(self) -> bool:
        """Whether it is sampled."""
        return bool(self._span.is_recording())

    @property
    def context(self) -> dict[str, str]:
        """The W3C context in which another process continues under this span."""
        carrier: dict[str, str] = {}
        tracer = self._tracer
        tracer.propagator.inject(carrier, context=tracer.api.set_span_in_context(self._span))
        return carrier

    def child(self, name: str, kind: Kind = Kind.INTERNAL, start_s: float | None = None) -> Span:
        """A span under this one, from ``start_s`` (monotonic) or from now."""
        return self._tracer.start(
            name, self._tracer.api.set_span_in_context(self._span), kind, start_s, self._offset_ns
        )

    def set(self, **attributes: Attribute | None) -> None:
        """Set attributes: ``a__b`` is named ``a.b``, and what is ``None`` is left out."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name.replace("__", "."), value)

    def fail(self, reason: str) -> None:
        """It ended in an error of this name, from a bounded set."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", reason)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self, end_s: float | None = None) -> None:
        """It ended at ``end_s`` (monotonic), or now."""
        self._span.end(self._tracer.unix_ns(end_s, self._offset_ns))


class Tracer:
    """Makes the spans of one process; use ``make_tracer``. Not OpenTelemetry's global provider,
    which is the engine's. The kind of ``process`` is what stands before its first dash;
    ``exporter`` gets spans at once. Raises ValueError: OpenTelemetry is not installed."""

    def __init__(
        self,
        config: TracingConfig,
        process: str,
        exporter: SpanExporter | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                "telemetry.tracing.endpoint needs OpenTelemetry: install the extra `otel`, such as "
                f"pip install 'sluice-serve[otel]' ({error})"
            ) from error
        resource = Resource.create(
            {
                "service.name": f"{_SCOPE}-{process.partition('-')[0]}",
                "service.instance.id": process,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        if exporter is None:
            remote = OTLPSpanExporter(endpoint=config.endpoint)
            self._provider.add_span_processor(BatchSpanProcessor(remote))
        else:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SCOPE)
        self.propagator = TraceContextTextMapPropagator()
        self.api = trace
        self._clock = clock
        self._unix_clock_ns = unix_clock_ns
        self._trust_client = config.trust_client

    def begin(self, name: str, headers: Mapping[str, str], start_s: float) -> Span | None:
        """A client's request, or ``None``: not sampled. ``headers`` have names in lower case."""
        return self._first(name, headers if self._trust_client else {}, start_s)

    def join(self, name: str, context: Mapping[str, str], start_s: float) -> Span | None:
        """A call from another process, by its :attr:`Span.context`; ``None``: not sampled."""
        return self._first(name, context, start_s) if context else None

    def start(
        self, name: str, context: Context, kind: Kind, start_s: float | None, offset_ns: int
    ) -> Span:
        """A span from ``start_s`` or now; ``offset_ns``: from its clock to Unix time."""
        span = self._tracer.start_span(
            name,
            context=context,
            kind=self.api.SpanKind[kind.value],
            start_time=self.unix_ns(start_s, offset_ns),
        )
        return Span(self, span, offset_ns)

    def unix_ns(self, at_s: float | None, offset_ns: int) -> int:
        """Unix nanoseconds of a monotonic time of this process, or of now."""
        return int((self._clock() if at_s is None else at_s) * 1e9) + offset_ns

    def shutdown(self) -> None:
        """Export the remaining spans, and stop. It blocks, for seconds if no collector answers."""
        self._provider.shutdown()

    def _first(self, name: str, headers: Mapping[str, str], start_s: float) -> Span | None:
        from opentelemetry.context import Context

        carrier = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
        # An empty context, not the current one: that may be the engine's or the server's.
        context = self.propagator.extract(carrier, context=Context())
        offset_ns = self._unix_clock_ns() - int(self._clock() * 1e9)
        span = self.start(name, context, Kind.SERVER, start_s, offset_ns)
        return span if span.is_recording else None


def make_tracer(config: TracingConfig, process: str) -> Tracer | None:
    """The process's tracer; ``None``: tracing is off. Raises ValueError: no OpenTelemetry."""
    return Tracer(config, process) if config.endpoint is not None else None
