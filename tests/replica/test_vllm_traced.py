"""Real vLLM where requests are traced: its times, and the span that it makes itself."""

from __future__ import annotations

import asyncio

import pytest

from sluice.protocol.requests import EngineRequest, ResponseTail
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.server import Replica
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.request.objective import SLO
from sluice.telemetry.logs import TracingConfig
from sluice.telemetry.tracing import Tracer
from tests.known_profile import known_profile
from tests.otlp_collector import collector
from tests.replica.controller_side import MirrorOfOne
from tests.replica.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.release]

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


async def test_vllm_tells_when_a_request_ran_and_traces_it_itself(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as at:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        # vLLM sets it; so it is as before after the test.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", at.url)
        config = EngineConfig(
            model=str(local_model(tmp_path, layers=2, hidden=128)),
            served_model_name="small",
            cache_dir=tmp_path,
            vllm_args={
                "max-model-len": 512,
                "kv-cache-memory-bytes": 32 << 20,
                "otlp-traces-endpoint": at.url,
            },
            latency_profile=known_profile(tmp_path),
            grammar_check_s=0,
        )
        tracer = Tracer(TracingConfig(endpoint=at.url), "replica-1")
        engine = VllmEngine(config, "replica-1", 8, traced=True)
        replica = Replica("replica-1", "node-1", engine, ReplicaConfig(), MirrorOfOne(), tracer)
        try:
            await replica.start()
            body = {"model": "small", "prompt": "In the morning", "max_tokens": 4}
            request = EngineRequest("r", "completions", body, SLO(), trace=CONTEXT)
            items = [item async for batch in replica.generate(request) for item in batch]
            untraced = EngineRequest("s", "completions", body, SLO())
            async for _ in replica.generate(untraced):
                pass
        finally:
            await replica.stop()
            await asyncio.to_thread(tracer.shutdown)
        assert isinstance(items[-1], ResponseTail) and items[-1].queued_s is not None

        await until(lambda: "llm_request" in at.of_trace(TRACE))
        spans = at.of_trace(TRACE)
    assert set(spans) == {"generate", "queue", "prefill", "decode", "llm_request"}
    generate = spans["generate"][1]
    for name in ("queue", "prefill", "decode", "llm_request"):
        assert spans[name][1].parent_span_id == generate.span_id
    ends = [spans[name][1].end_time_unix_nano for name in ("queue", "prefill", "decode")]
    assert generate.start_time_unix_nano <= ends[0] <= ends[1] <= ends[2]
    assert ends[2] <= generate.end_time_unix_nano
    told = str([span for _, span in at.spans])
    assert "In the morning" not in told
