"""How requests ended, as a router tells the controller, and why promises were missed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.router.batches.lines import Admitted, BatchMetrics, BatchRequest, LineCaller
from sluice.router.config import Alternative, RouterConfig, ServiceClass
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.retries import RETRY_PAUSE_S
from sluice.router.tenancy.limits import ANYONE, RateLimiter
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
    answer,
    event,
    fail,
    serve,
)
from tests.router.test_admission import (
    best_effort,
    edge_of,
    guaranteed,
    post,
    unattainable,
)
from tests.router.test_disaggregation import HANDLE
from tests.router.virtual_time import settle


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        ({"ttft_ms": 400, "tpot_ms": 200}, ()),
        ({"ttft_ms": 50, "tpot_ms": 200}, ("ttft",)),
        ({"ttft_ms": 400, "tpot_ms": 5}, ("tpot",)),
        ({"ttft_ms": 50, "tpot_ms": 5, "e2e_ms": 10}, ("ttft", "tpot")),
    ],
)
async def test_an_answer_is_held_against_each_objective(
    slo: dict[str, int], missed: tuple[str, ...]
) -> None:
    # The far side's plain answers have their first token after 0.1 s.
    edge = edge_of(guaranteed(), clock=Clock())
    response = await post(edge, slo=slo)
    (ending,) = edge.controller.endings
    assert ending.request_id == response.headers["x-sluice-request-id"]
    assert (ending.outcome, ending.error) == ("ok", "")
    assert ending.missed[: len(missed)] == missed
    assert ending.ttft_s == pytest.approx(0.1) and ending.tokens == 3
    attained = edge.sample("sluice_attained_total", **{"class": "standard", "priority": "1"})
    assert attained == (not missed)


@pytest.mark.parametrize(
    ("behaviour", "decision", "body", "outcome", "error"),
    [
        (answer(400, b'{"error": {}}'), guaranteed(), {}, "client_error", ""),
        (serve, unattainable(), {"slo": {"class": "strict"}}, "refused", "slo_unattainable"),
        (fail(DIED), guaranteed(), {}, "refused", "replica_failed"),
        (fail(DIED, after=2), guaranteed(), {"stream": True}, "failed", "stream_broken"),
    ],
)
async def test_what_was_not_served_says_how_it_ended(
    behaviour: Any, decision: Any, body: dict[str, Any], outcome: str, error: str
) -> None:
    edge = edge_of(decision, side=FarSide(a=behaviour))
    await post(edge, **body)
    (ending,) = edge.controller.endings
    assert (ending.outcome, ending.error, ending.missed) == (outcome, error, ())


def steady(clock: Clock, step_s: float) -> Behaviour:
    """Streams 16 tokens, one each ``step_s``."""

    async def behaviour(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "text/event-stream", replica)
        for _ in range(16):
            clock.now_s += step_s
            yield ResponseChunk(event("a", request.request_id), 1)
            await side.let_go()
        yield ResponseTail(5, 16)

    return behaviour


@pytest.mark.parametrize(
    ("decision", "step_s", "told"),
    [
        (guaranteed(), 0.2, [(0.2, None)] * 3 + [(0.2, 0.2)] * 2),
        (guaranteed(), 0.12, [(None, 0.12), (None, 0.12)]),
        (guaranteed(), 0.05, []),
        (best_effort(), 0.2, []),
    ],
)
async def test_a_promised_stream_that_is_late_is_told_of_while_it_goes_on(
    decision: RouteDecision, step_s: float, told: list[tuple[float | None, float | None]]
) -> None:
    clock = Clock()
    edge = edge_of(decision, side=FarSide(a=steady(clock, step_s)), clock=clock)
    response = await post(edge, stream=True, slo={"ttft_ms": 150, "tpot_ms": 100})
    notices = edge.controller.late_notices
    assert {notice.request_id for notice in notices} <= {response.headers["x-sluice-request-id"]}
    # At 1, 2, 4, 8 and 16 tokens, and of the TPOT not before 8.
    found = [(notice.ttft_s, notice.tpot_s) for notice in notices]
    assert found == [pytest.approx(each, nan_ok=True) for each in told]
    (ending,) = edge.controller.endings
    assert ending.tokens == 16


@pytest.mark.parametrize(
    ("body", "most_tokens"),
    [({}, 0), ({"max_tokens": 20}, 20), ({"max_completion_tokens": 20, "n": 3}, 20)],
)
async def test_an_ending_says_whose_output_it_was_and_how_long_it_might_have_been(
    body: dict[str, Any], most_tokens: int
) -> None:
    edge = edge_of(guaranteed())
    await post(edge, slo={"class": "strict"}, **body)
    (ending,) = edge.controller.endings
    assert (ending.service_class, ending.tenant) == ("strict", ANYONE.tenant)
    assert (ending.tokens, ending.most_tokens) == (3, most_tokens)


async def test_what_no_engine_computes_has_no_ending() -> None:
    edge = edge_of(guaranteed())
    async with edge.client() as client:
        await client.post("/tokenize", json={"model": "m", "prompt": "a b"})
    assert edge.side.calls and edge.controller.endings == []


async def test_a_line_of_a_batch_has_an_ending_for_each_time_that_it_was_sent() -> None:
    full = iter([answer(503, b"{}")] * 2)
    edge = Edge(
        FarSide(a=lambda *call: next(full, serve)(*call)), config=RouterConfig(max_attempts=1)
    )
    caller = LineCaller(
        edge.config,
        edge.fleets,
        RateLimiter(),
        BatchMetrics(CollectorRegistry()),
        Clock().pause,
        Telemetry(),
    )
    body = BatchRequest(7, "line-7", {"model": "m", "messages": CHAT_BODY["messages"]}, 100)
    admitted = await caller.admit(body, "/v1/chat/completions", lambda: ANYONE)
    assert isinstance(admitted, Admitted)
    reply = await caller.run(admitted)
    endings = edge.controller.endings
    assert [ending.outcome for ending in endings] == ["refused", "refused", "ok"]
    assert endings[-1].request_id == reply.request_id


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
