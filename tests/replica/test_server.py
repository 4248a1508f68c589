"""A replica in one process: a real simulated engine, and the controller's side of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineDeadError,
    EngineRequest,
    Progress,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
)
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.engine import chunks_of
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.server import MAX_BATCH_BYTES, MAX_BUFFERED_ITEMS
from sluice.scheduling.request.objective import SLO
from sluice.telemetry.logs import TracingConfig
from sluice.telemetry.tracing import Tracer
from tests.replica.controller_side import MirrorOfOne
from tests.replica.waiting import until


@asynccontextmanager
async def running(
    mirror: MirrorOfOne | None = None,
    engine_type: type[SimulatedEngine] = SimulatedEngine,
    step_s: float = 0.0,
    tracer: Tracer | None = None,
    **config: Any,
) -> AsyncIterator[Replica]:
    truth = SimulatedEngineConfig(step_s=step_s, token_s=0, context_token_s=0, kv_blocks=64)
    replica_config = ReplicaConfig(**{"report_interval_s": 0.001, "max_live_requests": 8, **config})
    engine = engine_type(
        EngineConfig(kind="simulated", policy="fcfs", simulated=truth),
        "replica-1",
        replica_config.max_live_requests,
    )
    target = mirror or MirrorOfOne()
    replica = Replica("replica-1", "node-1", engine, replica_config, target, tracer)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


def completion(request_id: str = "r", **body: Any) -> EngineRequest:
    return EngineRequest(request_id, "completions", {"prompt": "a prompt", **body}, SLO())


async def batches_of(replica: Replica, request: EngineRequest) -> list[list[ResponseItem]]:
    return [batch async for batch in replica.generate(request)]


def tokens_of(batches: list[list[ResponseItem]]) -> int:
    return sum(
        item.tokens for batch in batches for item in batch if isinstance(item, ResponseChunk)
    )


async def test_a_response_is_complete_and_names_the_replica() -> None:
    async with running() as replica:
        for stream in (True, False):
            batches = await batches_of(replica, completion(max_tokens=30, stream=stream))
            head, tail = batches[0][0], batches[-1][-1]
            assert isinstance(head, ResponseHead)
            assert (head.status, head.replica_id) == (200, "replica-1")
            assert isinstance(tail, ResponseTail)
            assert tail.output_tokens == tokens_of(batches) == 30
        await until(lambda: replica.live_requests == 0)


async def test_the_engine_s_own_refusals_pass_through() -> None:
    async with running() as replica:
        (batch,) = await batches_of(replica, completion(max_tokens=0))
        assert batch[0] == ResponseHead(400, "application/json", "replica-1")


class ItemByItem(SimulatedEngine):
    """Counts the items that left it; each token is an item of its own."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        self.left = 0
        for _ in range(int(request.body["max_tokens"])):
            self.left += 1
            yield ResponseChunk(b"x", 1)


async def test_what_is_ready_comes_at_once_and_never_more_than_fits() -> None:
    async with running(engine_type=ItemByItem) as replica:
        engine = replica.engine
        assert isinstance(engine, ItemByItem)
        total = 3 * MAX_BUFFERED_ITEMS
        stream = replica.generate(completion(max_tokens=total))
        sizes = [len(await anext(stream))]
        # The consumer is away: the engine's stream runs on until the buffer is full, and waits.
        await until(lambda: engine.left > MAX_BUFFERED_ITEMS)
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine.left <= sum(sizes) + MAX_BUFFERED_ITEMS + 1
        sizes += [len(batch) async for batch in stream]
        assert sum(sizes) == total
        assert max(sizes) == MAX_BUFFERED_ITEMS


class PastTheIterator(SimulatedEngine):
    """Hands on as many chunks as there is space for, and yields the next one."""

    async def generate(self, request: EngineRequest, *forward: Any) -> AsyncIterator[ResponseItem]:
        self.taken = 0
        yield ResponseHead(200, "text/event-stream")
        while forward[0](ResponseChunk(b"%d " % self.taken, 1)):
            self.taken += 1
        yield ResponseChunk(b"%d " % self.taken, 1)
        yield ResponseTail(1, self.taken + 1)


async def test_chunks_that_are_handed_on_are_bounded_and_come_in_order() -> None:
    async with running(engine_type=PastTheIterator) as replica:
        items = [item for batch in await batches_of(replica, completion()) for item in batch]
        data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
        assert [*map(int, data.split())] == [*range(MAX_BUFFERED_ITEMS)]
        assert isinstance(items[0], ResponseHead) and isinstance(items[-1], ResponseTail)


class InLargeChunks(SimulatedEngine):
    """Answers with chunks of the most that a chunk may have."""

    async def generate(self, request: EngineRequest, *_: Any) -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, "application/json")
        for chunk in chunks_of(b"x" * int(request.body["bytes"])):
            yield chunk


async def test_a_long_answer_is_several_messages() -> None:
    total = 5 * MAX_BATCH_BYTES + 7
    async with running(engine_type=InLargeChunks) as replica:
        batches = await batches_of(replica, completion(bytes=total))
    sizes = [
        sum(len(item.data) for item in batch if isinstance(item, ResponseChunk))
        for batch in batches
    ]
    assert sum(sizes) == total
    assert max(sizes) < 2 * MAX_BATCH_BYTES


@given(st.binary(max_size=50), st.integers(1, 20))
def test_the_chunks_of_an_answer_are_the_answer(data: bytes, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice.replica.engine.MAX_CHUNK_BYTES", most)
        chunks = list(chunks_of(data, tokens=3))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert all(len(chunk.data) <= most for chunk in chunks)
    assert sum(chunk.tokens for chunk in chunks) == 3


async def test_a_single_item_is_not_held_back() -> None:
    async with running(step_s=3600.0) as replica:
        stream = replica.generate(completion(stream=True))
        assert await anext(stream) == [ResponseHead(200, EVENT_STREAM, "replica-1")]
        await stream.aclose()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_the_engine_is_free_when_the_consumer_goes(stream: bool, way: str) -> None:
    mirror = MirrorOfOne()
    async with running(mirror, step_s=3600.0) as replica:
        request = completion("gone", stream=stream)
        if way == "close" and stream:
            batches = replica.generate(request)
            await anext(batches)
            await until(lambda: replica.snapshot()["rows"] == 1)
            await batches.aclose()
        else:
            task = asyncio.create_task(batches_of(replica, request))
            await until(lambda: replica.snapshot()["rows"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: replica.live_requests == 0)
        assert replica.snapshot()["rows"] == 0
        await until(lambda: request_key("gone") in mirror.finished)


async def test_a_consumer_that_goes_at_once_leaves_nothing_behind() -> None:
    mirror = MirrorOfOne()
    async with running(mirror, step_s=3600.0) as replica:
        first = asyncio.create_task(batches_of(replica, completion("gone")))
        await asyncio.sleep(0)  # it waits now; the engine has not been asked yet
        assert replica.live_requests == 1
        first.cancel()
        await until(lambda: request_key("gone") in mirror.finished)
        assert replica.live_requests == 0
        assert await replica.drain()


async def test_requests_over_the_limit_get_503() -> None:
    mirror = MirrorOfOne()
    async with running(mirror, step_s=3600.0, max_live_requests=2) as replica:
        tasks = [asyncio.create_task(batches_of(replica, completion(name))) for name in "01"]
        await until(lambda: replica.live_requests == 2)
        (batch,) = await batches_of(replica, completion("third"))
        head, chunk, tail = batch
        assert head == ResponseHead(503, "application/json", "replica-1")
        assert isinstance(chunk, ResponseChunk)
        assert "2 requests" in json.loads(chunk.data)["error"]["message"]
        assert tail == ResponseTail(0, 0)
        # The controller had reserved room for it.
        await until(lambda: request_key("third") in mirror.finished)
        await replica.abort("0")
        await tasks[0]
        await until(lambda: replica.live_requests == 1)
        tasks[1].cancel()


async def test_best_effort_of_one_tenant_does_not_take_all_slots() -> None:
    async with running(step_s=3600.0, max_live_requests=10) as replica:

        async def send(name: str, tenant: int, best_effort: bool = True) -> bool:
            request = replace(completion(name), best_effort=best_effort, tenant=tenant)
            before = replica.live_requests
            task = asyncio.create_task(batches_of(replica, request))
            await until(lambda: task.done() or replica.live_requests > before)
            tasks.append(task)
            return not task.done()

        tasks: list[asyncio.Task[list[list[ResponseItem]]]] = []
        assert [await send(f"a{index}", 1) for index in range(10)] == [True] * 8 + [False] * 2
        assert await send("b", 2)
        assert await send("promised", 1, best_effort=False)
        assert not await send("late", 3)
        for task in tasks:
            task.cancel()
        await until(lambda: replica.live_requests == 0)
        assert [await send(f"again{index}", 1) for index in range(8)] == [True] * 8
        for task in tasks:
            task.cancel()


async def test_an_engine_s_death_reaches_the_consumer_after_its_items() -> None:
    async with running(step_s=3600.0) as replica:
        stream = replica.generate(completion(stream=True))
        assert len(await anext(stream)) == 1
        await replica.engine.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await anext(stream)
        with pytest.raises(EngineDeadError):
            await batches_of(replica, completion())


async def test_a_drain_waits_for_live_requests_and_is_reported() -> None:
    mirror = MirrorOfOne()
    async with running(mirror) as replica:
        stream = replica.generate(completion(max_tokens=100, stream=True))
        first = await anext(stream)
        drain = asyncio.create_task(replica.drain())
        await until(lambda: mirror.draining)
        # The engine is done, the consumer is not.
        await until(lambda: replica.live_requests == 0)
        assert not drain.done()
        rest = [batch async for batch in stream]
        assert await drain
        assert tokens_of([first, *rest]) == 100
    assert mirror.left


async def test_a_drain_gives_up_after_its_limit() -> None:
    async with running(step_s=3600.0, drain_timeout_s=0.01) as replica:
        task = asyncio.create_task(batches_of(replica, completion()))
        await until(lambda: replica.live_requests == 1)
        assert not await replica.drain()
        await replica.stop()
        with pytest.raises(EngineDeadError):
            await task


async def test_the_mirror_follows_live_traffic_to_the_end() -> None:
    mirror = MirrorOfOne()
    async with running(mirror) as replica:
        requests = [completion(str(index), max_tokens=40, stream=True) for index in range(8)]
        results = await asyncio.gather(*(batches_of(replica, request) for request in requests))
        assert [tokens_of(result) for result in results] == [40] * 8
        await until(lambda: set(mirror.finished) == {request_key(r.request_id) for r in requests})
        await until(lambda: mirror.shows(replica.engine.state()))
        snapshot = replica.snapshot()
    assert snapshot["registered"]
    assert snapshot["info"]["policy"] == "fcfs"
    assert json.loads(json.dumps(snapshot))["summary"]["free_kv_blocks"] == 64


async def test_a_stalled_engine_is_reported_until_it_recovers_though_its_requests_leave() -> None:
    mirror = MirrorOfOne()

    def reported() -> bool:
        return bool(mirror.messages) and mirror.messages[-1].hung

    async with running(mirror, step_s=0.001, hung_after_s=0.1) as replica:
        engine = replica.engine
        assert isinstance(engine, SimulatedEngine)
        assert tokens_of(await batches_of(replica, completion("first", max_tokens=10))) == 10
        engine.stall()
        request = completion("stuck", max_tokens=10, stream=True)
        task = asyncio.create_task(batches_of(replica, request))
        await until(reported)
        assert replica.progress(["stuck", "other"]) == Progress("replica-1", True, ("other",))
        assert replica.snapshot()["hung"]
        await replica.check_health()
        engine.recover()
        assert tokens_of(await task) == 10
        await until(lambda: not reported())
        assert not replica.progress([]).hung

        engine.stall()
        stream = replica.generate(completion("left", stream=True))
        await anext(stream)
        await until(lambda: replica.progress([]).hung)
        await stream.aclose()
        await until(lambda: replica.live_requests == 0)
        assert replica.progress(["left"]) == Progress("replica-1", True, ("left",))
        engine.recover()
        await until(lambda: not replica.progress([]).hung)


TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
PARTS = ("queue", "prefill", "decode")


@asynccontextmanager
async def tracing() -> AsyncIterator[tuple[Replica, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    tracer = Tracer(TracingConfig(), "replica-1", exporter)
    async with running(step_s=0.002, tracer=tracer) as replica:
        yield replica, exporter


def traced_completion(trace: dict[str, str], **body: object) -> EngineRequest:
    slo = SLO(service_class="interactive")
    asked = {"prompt": "a prompt", "max_tokens": 4, **body}
    return EngineRequest("r", "completions", asked, slo, trace=trace)


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_of_a_prompt_for_another_replica_there_is_no_decode() -> None:
    async with tracing() as (replica, exporter):
        await batches_of(replica, replace(traced_completion(CONTEXT), prefill_only=True))
    spans = named(exporter)
    assert set(spans) == {"generate", "queue", "prefill"}
    assert spans["prefill"].end_time <= spans["generate"].end_time


@pytest.mark.parametrize("stream", [False, True])
async def test_queue_prefill_and_decode_follow_one_another_inside_the_call(stream: bool) -> None:
    async with tracing() as (replica, exporter):
        await batches_of(replica, traced_completion(CONTEXT, stream=stream))
    spans = named(exporter)
    assert set(spans) == {"generate", *PARTS}
    call = spans["generate"]
    assert f"{call.context.trace_id:032x}" == TRACE
    assert call.parent is not None and f"{call.parent.span_id:016x}" == "b7ad6b7169203331"
    attributes = dict(call.attributes or {})
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["sluice.class"] == "interactive"
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
    async with tracing() as (replica, exporter):
        answer = replica.generate(traced_completion(CONTEXT, stream=True, max_tokens=500))
        await anext(answer)
        await answer.aclose()
        await replica.drain()
        left = named(exporter)["generate"]
        assert (left.attributes or {})["sluice.ended_early"] is True
        exporter.clear()
        await batches_of(replica, traced_completion(CONTEXT, max_tokens=-1))
    refused = named(exporter)
    assert set(refused) == {"generate"}
    assert refused["generate"].status.status_code is StatusCode.UNSET


async def test_a_call_without_a_context_has_no_span() -> None:
    async with tracing() as (replica, exporter):
        await batches_of(replica, traced_completion({}))
    assert not exporter.get_finished_spans()
