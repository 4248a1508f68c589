"""The spans of a request in a replica, with a real simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from sluice.protocol.requests import EngineRequest
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.request.objective import SLO
from sluice.telemetry.logs import TracingConfig
from sluice.telemetry.tracing import Tracer
from tests.replica.controller_side import MirrorOfOne

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
PARTS = ("queue", "prefill", "decode")


@asynccontextmanager
async def running(tracer: Tracer, max_live: int = 8) -> AsyncIterator[Replica]:
    truth = SimulatedEngineConfig(step_s=0.002, token_s=0, context_token_s=0, kv_blocks=64)
    engine = SimulatedEngine(
        EngineConfig(kind="simulated", policy="fcfs", simulated=truth), "replica-1", max_live
    )
    config = ReplicaConfig(max_live_requests=max_live)
    replica = Replica("replica-1", "node-1", engine, config, MirrorOfOne(), tracer)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


def tracer_to(exporter: InMemorySpanExporter) -> Tracer:
    return Tracer(TracingConfig(enabled=True), "replica-1", exporter)


def completion(trace: dict[str, str], **body: object) -> EngineRequest:
    slo = SLO(service_class="interactive")
    asked = {"prompt": "a prompt", "max_tokens": 4, **body}
    return EngineRequest("r", "completions", asked, slo, trace=trace)


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_of_a_prompt_for_another_replica_there_is_no_decode() -> None:
    exporter = InMemorySpanExporter()
    async with running(tracer_to(exporter)) as replica:
        async for _ in replica.generate(replace(completion(CONTEXT), prefill_only=True)):
            pass
    spans = named(exporter)
    assert set(spans) == {"generate", "queue", "prefill"}
    assert spans["prefill"].end_time <= spans["generate"].end_time


@pytest.mark.parametrize("stream", [False, True])
async def test_queue_prefill_and_decode_follow_one_another_inside_the_call(stream: bool) -> None:
    exporter = InMemorySpanExporter()
    async with running(tracer_to(exporter)) as replica:
        async for _ in replica.generate(completion(CONTEXT, stream=stream)):
            pass
    spans = named(exporter)
    assert set(spans) == {"generate", *PARTS}
    call = spans["generate"]
    assert f"{call.context.trace_id:032x}" == TRACE
    assert call.parent is not None and f"{call.parent.span_id:016x}" == "b7ad6b7169203331"
    attributes = dict(call.attributes or {})
    assert (
        attributes["gen_ai.usage.output_tokens"] == 4
        and attributes["sluice.class"] == "interactive"
    )
    at = call.start_time
    for name in PARTS:
        part = spans[name]
        assert part.parent is not None and part.parent.span_id == call.context.span_id
        assert part.start_time == at if name != "queue" else part.start_time >= at
        assert part.end_time is not None and part.end_time >= part.start_time
        at = part.end_time
    assert call.end_time is not None and at <= call.end_time
    assert spans["decode"].end_time > spans["decode"].start_time  # type: ignore[operator]


async def test_a_call_that_is_left_or_refused_ends_its_span() -> None:
    exporter = InMemorySpanExporter()
    async with running(tracer_to(exporter)) as replica:
        answer = replica.generate(completion(CONTEXT, stream=True, max_tokens=500))
        await anext(answer)
        await answer.aclose()
        await replica.drain()
        left = named(exporter)["generate"]
        assert (left.attributes or {})["sluice.ended_early"] is True
        exporter.clear()
        async for _ in replica.generate(completion(CONTEXT, max_tokens=-1)):
            pass
    refused = named(exporter)
    assert set(refused) == {"generate"}
    assert refused["generate"].status.status_code is StatusCode.UNSET


async def test_a_call_without_a_context_has_no_span() -> None:
    exporter = InMemorySpanExporter()
    async with running(tracer_to(exporter)) as replica:
        async for _ in replica.generate(completion({})):
            pass
    assert not exporter.get_finished_spans()
