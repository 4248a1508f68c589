"""What a router tells the controller of each request's end."""

from __future__ import annotations

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
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.tenancy.limits import ANYONE, RateLimiter
from sluice.scheduling.request.job import RouteDecision
from tests.router.far_side import (
    CHAT_BODY,
    DIED,
    Behaviour,
    Clock,
    Edge,
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
