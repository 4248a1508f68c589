"""Why promises were missed, as a router finds it from its stamps and its replicas' reports."""

from __future__ import annotations

import logging

import pytest

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseHead, ResponseTail
from sluice.router.config import Alternative, RouterConfig, ServiceClass
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.retries import RETRY_PAUSE_S
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.lateness import ENGINE, Cause
from tests.router.far_side import (
    CHAT_BODY,
    DIED,
    WORDS,
    Behaviour,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    event,
    serve,
)
from tests.router.test_disaggregation import HANDLE
from tests.router.virtual_time import settle

PROMISED = RouteDecision("a", "placed", Tier.GUARANTEED, 0.2, own_s=0.1)


def reported(**parts: float) -> tuple[float, ...]:
    return tuple([parts.get(cause.value, 0.0) for cause in ENGINE])


def slow(
    clock: Clock, first_s: float, token_s: float = 0.0, late: tuple[float, ...] = ()
) -> Behaviour:
    """A replica whose first token, and each later one, takes so long, and what it says of that."""

    async def behaviour(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "text/event-stream", replica)
        clock.now_s += first_s
        for word in WORDS:
            yield ResponseChunk(event(word, request.request_id, word is WORDS[-1]), 1)
            await settle()  # the router has it
            clock.now_s += token_s
        yield ResponseTail(5, len(WORDS), late_parts=late)

    return behaviour


async def stream(edge: Edge, **slo: float) -> None:
    async with edge.client() as client:
        body = {**CHAT_BODY, "stream": True, "slo": slo}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_the_parts_are_in_the_log_line_and_in_what_the_controller_hears(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    first = reported(prefills=0.3, own_prefill=0.1, engine_stall=0.5)
    side = FarSide(a=slow(clock, 1.0, late=first + reported()))
    edge = Edge(side, FarController(PROMISED), clock=clock, telemetry=Telemetry())
    with caplog.at_level(logging.INFO, "sluice.router.dispatch.access_log"):
        await stream(edge, ttft_ms=400)
    # Of the prefills before it 0.1 s was predicted, and all of its own; 0.1 s was on the way.
    (ending,) = edge.controller.endings
    assert dict(ending.late) == pytest.approx(
        {
            Cause.ENGINE_STALL: 0.5 * 0.6 / 0.8,
            Cause.PREFILLS: 0.2 * 0.6 / 0.8,
            Cause.WAY_BACK: 0.1 * 0.6 / 0.8,
        }
    )
    assert edge.causes("ttft") == {"engine_stall": 1}
    (record,) = caplog.records
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["late"], fields["cause"], fields["late_ms"]) == ("ttft", "engine_stall", 600.0)
    parts = [fields[f"late_{name}_ms"] for name in ("engine_stall", "prefills", "way_back")]
    assert parts == [375.0, 150.0, 75.0]


async def test_between_tokens_all_but_the_promised_pace_is_a_cause() -> None:
    clock = Clock()
    after = reported(decodes=0.15, prefills=0.25)
    side = FarSide(a=slow(clock, 0.1, 0.2, reported(own_prefill=0.1) + after))
    edge = Edge(side, FarController(PROMISED), clock=clock)
    await stream(edge, ttft_ms=400, tpot_ms=100)
    (ending,) = edge.controller.endings
    assert ending.missed == ("tpot",)
    assert dict(ending.late) == {Cause.PREFILLS: pytest.approx(0.2)}


@pytest.mark.parametrize("accepts", [(), (Alternative(max_tokens=8),)])
async def test_a_late_answer_of_the_controller_is_the_decisions(
    accepts: tuple[Alternative, ...],
) -> None:
    clock = Clock()

    class Busy(FarController):
        async def route(self, query: RouteQuery) -> RouteDecision | None:
            clock.now_s += 0.5
            return await super().route(query)

    config = RouterConfig(classes={"standard": ServiceClass(accepts=accepts)})
    edge = Edge(FarSide(a=slow(clock, 0.1)), Busy(PROMISED), config, clock)
    await stream(edge, ttft_ms=400)
    assert edge.causes("ttft") == {"decision": 1}


async def test_a_stream_that_was_resumed_was_late_for_the_failure() -> None:
    clock = Clock()

    async def dies(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "text/event-stream", replica)
        yield ResponseChunk(event(WORDS[0], request.request_id), 1, (1,))
        await settle()
        clock.now_s += 2.0
        raise DIED

    async def resumes(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "text/event-stream", replica)
        for number, word in enumerate(WORDS, 1):
            data = event(word, request.resume.response_id if request.resume else "x")
            yield ResponseChunk(data, 1, (number,))
        yield ResponseTail(5, 3)

    decisions = PROMISED, PROMISED._replace(replica_id="b")
    edge = Edge(FarSide(a=dies, b=resumes), FarController(*decisions), clock=clock)
    await stream(edge, ttft_ms=400, tpot_ms=100)
    assert edge.causes("tpot") == {"failure": 1}
    (ending,) = edge.controller.endings
    late_s = 2.0 + RETRY_PAUSE_S - 2 * 0.1
    assert sum(part_s for _, part_s in ending.late) == pytest.approx(late_s)


async def test_of_a_pair_both_replicas_report() -> None:
    clock = Clock()

    async def prefill(side: FarSide, replica: str, request: EngineRequest) -> Items:
        clock.now_s += 0.3
        yield ResponseHead(200, "application/json", replica)
        late = reported(own_prefill=0.1, prefills=0.2) + reported()
        yield ResponseTail(5, 0, kv_handle=HANDLE, late_parts=late)

    decode = slow(clock, 0.7, late=reported(kv_transfer=0.7) + reported())
    side = FarSide(p=prefill, a=decode, b=serve)
    side.roles = ("mixed", "decode", "prefill")
    pair = PROMISED._replace(prefill_id="p", role="decode", kv_transfer_s=0.05)
    edge = Edge(side, FarController(pair), clock=clock)
    await stream(edge, ttft_ms=400)
    (ending,) = edge.controller.endings
    # 0.65 s more for the transfer and 0.15 s more before its prefill than predicted.
    expected = {Cause.KV_TRANSFER: 0.65 * 0.6 / 0.8, Cause.PREFILLS: 0.15 * 0.6 / 0.8}
    assert dict(ending.late) == pytest.approx(expected)
