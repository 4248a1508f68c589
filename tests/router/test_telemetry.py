"""What a router logs of requests, and the spans that it makes, over the real API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from sluice.router.batches.lines import Admitted, BatchMetrics, BatchRequest, LineCaller
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.limits import ANYONE, RateLimiter
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, Tier
from sluice.telemetry.logs import JsonLines, LogsConfig, TracingConfig
from sluice.telemetry.tracing import Tracer
from tests.router.far_side import (
    CHAT_BODY,
    Clock,
    Edge,
    FarController,
    FarSide,
    answer,
    fail,
    serve,
)

KEY = "k" * 32
SECRET = "the prompt that nobody else may read"
BODY = {**CHAT_BODY, "messages": [{"role": "user", "content": SECRET}], "stream": True}
PROMISED = RouteDecision("a", "placed", tier=Tier.GUARANTEED, predicted_ttft_s=0.125)
CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_CONTEXT = {"traceparent": f"00-{CLIENT_TRACE}-b7ad6b7169203331-01"}
SLO = {"class": "interactive", "ttft_ms": 60_000, "tpot_ms": 60_000}


class Lines(logging.Handler):
    """The fields of the accounts of requests, and all that was logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.levels: list[str] = []
        self.setFormatter(JsonLines("router-1"))

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))
        if hasattr(record, "fields"):
            self.fields.append(record.fields)
            self.levels.append(record.levelname)


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("sluice.router")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def replica_failure() -> ReplicaFailedError:
    return ReplicaFailedError(Reason.REPLICA_FAILED, "It died.")


async def test_an_answered_request_has_one_line_with_its_figures(lines: Lines) -> None:
    config = RouterConfig.model_validate({"api_keys": [{"key": KEY, "name": "acme"}]})
    edge = Edge(FarSide(a=serve), FarController(PROMISED), config)
    async with edge.client() as client:
        response = await client.post(
            "/v1/chat/completions",
            json={**BODY, "slo": SLO},
            headers={"authorization": f"Bearer {KEY}", "x-request-id": "mine\x7f1"},
        )
    (line,) = lines.fields
    assert line["predicted_ttft_ms"] >= 125
    for name in ("e2e_ms", "ttft_ms", "tpot_ms"):
        assert line.pop(name) >= 0
    assert line == {
        "request_id": response.headers["x-sluice-request-id"],
        "outcome": "ok",
        "endpoint": "chat",
        "client": "acme",
        "client_request_id": "mine?1",
        "model": "m",
        "class": "interactive",
        "priority": 4,
        "admission": "guaranteed",
        "replica": "a",
        "predicted_ttft_ms": line["predicted_ttft_ms"],
        "attained": True,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 3,
    }
    written = "\n".join(lines.text)
    assert SECRET not in written and KEY not in written


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ("all", ["client_error", "refused", "failed", "failed", "ok"]),
        ("failed", ["refused", "failed", "failed"]),
        ("none", []),
    ],
)
async def test_which_requests_have_a_line(lines: Lines, requests: Any, expected: list[str]) -> None:
    telemetry = Telemetry(LogsConfig(requests=requests))
    strict = RouterConfig.model_validate(
        {"classes": {"standard": {"ttft_ms": 1, "when_unattainable": "reject"}}}
    )
    bodies: list[tuple[Edge, dict[str, Any]]] = [
        (Edge(FarSide(a=serve), telemetry=telemetry), {"model": "m"}),
        (
            Edge(
                FarSide(a=serve),
                FarController(RouteDecision(None, UNATTAINABLE, retry_after_s=1.0)),
                strict,
                telemetry=telemetry,
            ),
            BODY,
        ),
        (Edge(FarSide(a=fail(replica_failure(), after=1)), telemetry=telemetry), BODY),
        (Edge(FarSide(a=answer(500, b"{}")), telemetry=telemetry), CHAT_BODY),
        (Edge(FarSide(a=serve), telemetry=telemetry), CHAT_BODY),
    ]
    for edge, body in bodies:
        async with edge.client() as client:
            await client.post("/v1/chat/completions", json=body)
    assert [line["outcome"] for line in lines.fields] == expected
    assert all(
        (level == "WARNING") == (line["outcome"] == "failed")
        for level, line in zip(lines.levels, lines.fields, strict=True)
    )


async def test_who_has_no_key_is_in_the_log_without_what_was_tried(lines: Lines) -> None:
    config = RouterConfig.model_validate({"api_keys": [KEY]})
    async with Edge(FarSide(a=serve), config=config).client() as client:
        tried = {"authorization": "Bearer wrong-key-12345"}
        response = await client.post("/v1/chat/completions", json=BODY, headers=tried)
    assert response.status_code == 401
    (line,) = lines.fields
    assert line["reason"] == "invalid_api_key" and line["outcome"] == "client_error"
    assert line["request_id"] == response.headers["x-sluice-request-id"]
    assert "wrong-key" not in "\n".join(lines.text)


# Spans.


def traced(**config: object) -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    settings = TracingConfig.model_validate(config)
    return Telemetry(LogsConfig(), Tracer(settings, "router-1", exporter)), exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    named = {span.name: span for span in spans}
    assert len(named) == len(spans), [span.name for span in spans]
    return named


async def test_a_request_is_traced_from_the_client_to_the_replica(lines: Lines) -> None:
    telemetry, exporter = traced()
    edge = Edge(FarSide(a=serve), FarController(PROMISED), telemetry=telemetry)
    async with edge.client() as client:
        response = await client.post(
            "/v1/chat/completions", json={**BODY, "slo": SLO}, headers=CLIENT_CONTEXT
        )
    spans = by_name(exporter)
    assert set(spans) == {"chat", "decision", "attempt"}
    root, decision, attempt = spans["chat"], spans["decision"], spans["attempt"]
    assert root.parent is not None and f"{root.parent.trace_id:032x}" == CLIENT_TRACE
    for part in (decision, attempt):
        assert part.parent is not None and part.parent.span_id == root.context.span_id
        assert root.start_time <= part.start_time <= part.end_time <= root.end_time  # type: ignore[operator]
    # The replica goes on under the attempt.
    (call,) = edge.side.calls
    assert call[1].trace["traceparent"].split("-")[1:3] == [
        CLIENT_TRACE,
        f"{attempt.context.span_id:016x}",
    ]
    attributes = dict(root.attributes or {})
    assert attributes["sluice.request_id"] == response.headers["x-sluice-request-id"]
    assert attributes["sluice.outcome"] == "ok" and attributes["sluice.attained"] is True
    assert attributes["sluice.class"] == "interactive" and attributes["sluice.replica"] == "a"
    assert attributes["sluice.admission"] == "guaranteed"
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (decision.attributes or {})["sluice.tier"] == "guaranteed"
    assert lines.fields[0]["trace_id"] == CLIENT_TRACE
    assert SECRET not in "".join(span.to_json() for span in spans.values())


async def test_each_attempt_has_its_span_and_says_how_it_failed() -> None:
    telemetry, exporter = traced()
    edge = Edge(
        FarSide(a=fail(replica_failure()), b=serve), FarController("a", "b"), telemetry=telemetry
    )
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=BODY)
    attempts = [span for span in exporter.get_finished_spans() if span.name == "attempt"]
    told = [(dict(span.attributes or {}), span.status.status_code) for span in attempts]
    assert [(each["sluice.attempt"], each.get("error.type")) for each, _ in told] == [
        (1, "replica_failed"),
        (2, None),
    ]
    assert [status for _, status in told] == [StatusCode.ERROR, StatusCode.UNSET]


async def test_a_broken_stream_is_an_error_and_a_refusal_is_none() -> None:
    telemetry, exporter = traced()
    edge = Edge(FarSide(a=fail(replica_failure(), after=1)), telemetry=telemetry)
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=BODY)
        await client.post("/v1/chat/completions", json={"model": "m"})
    broken, refused = (span for span in exporter.get_finished_spans() if span.name == "chat")
    assert broken.status.status_code is StatusCode.ERROR
    assert (broken.attributes or {})["error.type"] == "stream_broken"
    assert refused.status.status_code is StatusCode.UNSET
    assert (refused.attributes or {})["sluice.outcome"] == "client_error"


async def test_what_is_not_sampled_or_has_no_key_makes_no_span() -> None:
    telemetry, exporter = traced(sample_ratio=0.0)
    config = RouterConfig.model_validate({"api_keys": [KEY]})
    edge = Edge(FarSide(a=serve), config=config, telemetry=telemetry)
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=BODY, headers=CLIENT_CONTEXT)
        await client.post(
            "/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {KEY}"}
        )
    assert not exporter.get_finished_spans()
    assert [dict(request.trace) for _, request in edge.side.calls] == [{}]


async def test_a_line_of_a_batch_is_told_once_however_often_it_was_put_off(lines: Lines) -> None:
    full = iter([answer(503, b"{}")] * 3)
    telemetry, exporter = traced()
    edge = Edge(
        FarSide(a=lambda *call: next(full, serve)(*call)),
        config=RouterConfig(max_attempts=1),
    )
    told = LineCaller(
        edge.config,
        edge.fleets,
        RateLimiter(),
        BatchMetrics(CollectorRegistry()),
        Clock().pause,
        telemetry,
    )
    body = BatchRequest(7, "line-7", {"model": "m", "messages": CHAT_BODY["messages"]}, 100)
    admitted = await told.admit(body, "/v1/chat/completions", lambda: ANYONE)
    assert isinstance(admitted, Admitted)
    reply = await told.run(admitted)
    (line,) = lines.fields
    assert (line["outcome"], line["class"], line["admission"]) == ("ok", "batch", "best-effort")
    assert (line["request_id"], line["client_request_id"]) == (reply.request_id, "line-7")
    ended = [span for span in exporter.get_finished_spans() if span.name == "chat"]
    outcomes = [(span.attributes or {})["sluice.outcome"] for span in ended]
    assert outcomes == ["refused", "refused", "refused", "ok"]
