"""What a router tells the controller of each request's end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.batches.line_caller import Admitted, LineCaller
from router.batches.lines import Line
from router.batches.metrics import BatchMetrics
from router.config import RouterConfig
from router.rate_limits import RateLimiter
from router.telemetry import Telemetry
from router.trust import ANYONE
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarSide, answer, fail, hang, serve
from tests.router.test_admission import BROKEN, edge_of, guaranteed, post, unattainable
from tests.router.test_disconnect import Client, content


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
        (fail(BROKEN), guaranteed(), {}, "refused", "replica_failed"),
        (fail(BROKEN, after=2), guaranteed(), {"stream": True}, "failed", "stream_broken"),
    ],
)
async def test_what_was_not_served_says_how_it_ended(
    behaviour: Any, decision: Any, body: dict[str, Any], outcome: str, error: str
) -> None:
    edge = edge_of(decision, side=FarSide(a=behaviour))
    await post(edge, **body)
    (ending,) = edge.controller.endings
    assert (ending.outcome, ending.error, ending.missed) == (outcome, error, ())


async def test_a_client_that_leaves_is_told_of() -> None:
    edge = Edge(FarSide(a=hang))
    client = Client(edge, content())
    await edge.side.until(lambda: bool(edge.side.live))
    client.leave()
    await asyncio.wait([client.task])
    (ending,) = edge.controller.endings
    assert (ending.outcome, ending.ttft_s, ending.tokens) == ("cancelled", None, 0)


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
    body = Line("line-7", {"model": "m", "messages": CHAT_BODY["messages"]}, 100)
    admitted = await caller.admit(body, "/v1/chat/completions", lambda: ANYONE)
    assert isinstance(admitted, Admitted)
    reply = await caller.run(admitted)
    endings = edge.controller.endings
    assert [ending.outcome for ending in endings] == ["refused", "refused", "ok"]
    assert endings[-1].request_id == reply.request_id
