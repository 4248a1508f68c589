"""Real vLLM where requests are traced: its times, and the span that it makes itself."""

from __future__ import annotations

import asyncio

import pytest

from sluice.protocol.requests import EngineRequest, ResponseTail
from sluice.replica.config import ReplicaConfig
from sluice.replica.server import Replica
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.request.objective import SLO
from sluice.telemetry.logs import TracingConfig
from sluice.telemetry.tracing import Tracer
from tests.otlp_collector import collector
from tests.replica.controller_side import MirrorOfOne
from tests.replica.small_engine import small_config
from tests.replica.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.release]

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BODY = {"model": "small", "prompt": "In the morning", "max_tokens": 4}


async def test_vllm_tells_when_a_request_ran_and_traces_it_itself(model, tmp_path, monkeypatch):
    with collector() as at:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        # vLLM sets it; so it is as before after the test.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", at.url)
        config = small_config(model, tmp_path, otlp_traces_endpoint=at.url)
        tracer = Tracer(TracingConfig(endpoint=at.url), "replica-1")
        engine = VllmEngine(config, "replica-1", 8, traced=True)
        replica = Replica("replica-1", "node-1", engine, ReplicaConfig(), MirrorOfOne(), tracer)
        try:
            await replica.start()
            request = EngineRequest("r", "completions", BODY, SLO(), trace=CONTEXT)
            items = [item async for batch in replica.generate(request) for item in batch]
            async for _ in replica.generate(EngineRequest("s", "completions", BODY, SLO())):
                pass
        finally:
            await replica.stop()
            await asyncio.to_thread(tracer.shutdown)
        assert isinstance(items[-1], ResponseTail) and items[-1].queued_s is not None

        await until(lambda: "llm_request" in at.of_trace(TRACE))
        spans = at.of_trace(TRACE)
    parts = ("queue", "prefill", "decode")
    assert set(spans) == {"generate", *parts, "llm_request"}
    generate = spans["generate"][1]
    for name in (*parts, "llm_request"):
        assert spans[name][1].parent_span_id == generate.span_id
    ends = [spans[name][1].end_time_unix_nano for name in (*parts, "generate")]
    assert generate.start_time_unix_nano <= ends[0] and ends == sorted(ends)
    assert "In the morning" not in str([span for _, span in at.spans])
