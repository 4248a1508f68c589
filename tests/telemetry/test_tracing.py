"""Spans with the real SDK, kept in memory; their configuration."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from sluice.telemetry.logs import TelemetryConfig, TracingConfig
from sluice.telemetry.tracing import Kind, Tracer, make_tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}


def tracer_to(exporter: InMemorySpanExporter, **config: object) -> Tracer:
    """At 100 s of the monotonic clock it is 1000 s after 1970."""
    settings = TracingConfig.model_validate(config)
    return Tracer(settings, "router-7", exporter, lambda: 100.0, lambda: 1_000_000_000_000)


def test_spans_have_the_times_and_the_parents_that_they_are_given() -> None:
    exporter = InMemorySpanExporter()
    tracer = tracer_to(exporter)
    root = tracer.begin("chat", SAMPLED, start_s=90.0)
    assert root is not None and root.trace_id == TRACE
    child = root.child("attempt", Kind.CLIENT, start_s=95.0)
    child.set(sluice__replica="a", sluice__nothing=None)
    child.end(99.5)
    root.fail("internal_error")
    root.end()
    attempt, edge = exporter.get_finished_spans()
    assert edge.parent is not None and f"{edge.parent.span_id:016x}" == "b7ad6b7169203331"
    assert attempt.parent is not None and attempt.parent.span_id == edge.context.span_id
    assert attempt.context.trace_id == edge.context.trace_id == int(TRACE, 16)
    assert edge.start_time == 990_000_000_000
    assert (attempt.start_time, attempt.end_time) == (995_000_000_000, 999_500_000_000)
    assert (edge.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert dict(attempt.attributes or {}) == {"sluice.replica": "a"}
    assert edge.status.status_code is StatusCode.ERROR
    assert edge.resource.attributes["service.name"] == "sluice-router"
    assert edge.resource.attributes["service.instance.id"] == "router-7"


def test_a_context_goes_on_in_another_process() -> None:
    exporter = InMemorySpanExporter()
    root = tracer_to(exporter).begin("chat", SAMPLED, 90.0)
    assert root is not None
    assert root.context["tracestate"] == "vendor=1"
    far = tracer_to(exporter).join("generate", root.context, 95.0)
    assert far is not None and far.trace_id == TRACE
    far.end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None and span.parent.is_remote


def test_who_decides_whether_a_request_is_traced() -> None:
    exporter = InMemorySpanExporter()
    always, never = tracer_to(exporter), tracer_to(exporter, sample_ratio=0.0)
    assert always.begin("chat", {}, 90.0) is not None
    assert never.begin("chat", {}, 90.0) is None
    # A client that has decided is followed,
    assert always.begin("chat", UNSAMPLED, 90.0) is None
    assert never.begin("chat", SAMPLED, 90.0) is not None
    # unless clients are strangers.
    own = tracer_to(exporter, sample_ratio=0.0, trust_client=False)
    assert own.begin("chat", SAMPLED, 90.0) is None
    # A replica makes no trace that its router did not make.
    assert always.join("generate", {}, 90.0) is None


@pytest.mark.parametrize("traceparent", ["", "00-zz-1-01", "00-" + "0" * 32 + "-1-01", "x" * 9999])
def test_a_context_that_is_none_begins_a_new_trace(traceparent: str) -> None:
    root = tracer_to(InMemorySpanExporter()).begin("chat", {"traceparent": traceparent}, 90.0)
    assert root is not None and int(root.trace_id, 16) != 0


def test_it_is_off_by_default_and_then_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert make_tracer(TelemetryConfig().tracing, "router-7") is None
    with pytest.raises(ValueError, match="sluice-serve\\[otel\\]"):
        make_tracer(TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"), "router-7")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "collector:4318"),
        ("endpoint", "ftp://collector/v1/traces"),
        ("endpoint", "http://user:secret@collector:4318/v1/traces"),
        ("sample_ratio", 1.5),
        ("sampel_ratio", 0.5),
    ],
)
def test_a_wrong_setting_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refusal:
        TracingConfig.model_validate({field: value})
    assert field in str(refusal.value)
