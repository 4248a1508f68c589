"""Quotes and offers over HTTP: the real API, controller and simulated engines in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sluice.controller.config import ControllerConfig
from sluice.protocol.requests import request_key
from sluice.replica.config import SimulatedEngineConfig
from sluice.router import wire
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.dispatch.offers import MAX_OFFERING
from sluice.scheduling.placement.quotes import Offer, Quote
from sluice.scheduling.request.job import (
    DECLINED,
    NO_REPLICA,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
)
from tests.router.batches.routers import until_true
from tests.router.far_side import CHAT_BODY, Edge, FarController, FarSide, serve
from tests.router.local_controller import LocalController
from tests.router.local_replicas import Replicas
from tests.router.test_admission import guaranteed, unattainable

ENGINE = SimulatedEngineConfig(step_s=0.005, token_s=0.0001, context_token_s=0.0)
CLASSES = {
    "chat": ServiceClass(ttft_ms=60_000, tpot_ms=5_000, when_unattainable="reject"),
    "free": ServiceClass(),
}
CONFIG = RouterConfig(classes=CLASSES, default_class="chat")
SIZED = {"prompt_tokens": 2_000, "output_tokens": 50, "class": "chat"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    # However busy the machine is: a silent replica promises nothing.
    controller = LocalController(time.monotonic, ControllerConfig(stale_after_s=60.0))
    side = Replicas(controller, ENGINE)
    await side.start("a")
    edge = Edge(side, controller, CONFIG)  # type: ignore[arg-type]
    try:
        async with edge.client() as made:
            yield made
    finally:
        await side.servers["a"].stop()
        await side.replicas["a"].stop()


async def asked(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(wire.QUOTE_PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_session_from_quote_to_accepted_offer(client: httpx.AsyncClient) -> None:
    quote = await asked(client, **CHAT_BODY, max_tokens=5, hold_ms=1_000)
    assert (quote["object"], quote["class"], quote["admission"]) == (
        *("slo.quote", "chat"),
        "guaranteed",
    )
    assert quote["objective"] == {"ttft_ms": 60_000, "tpot_ms": 5_000}
    assert quote["roles"] == ["mixed"]
    assert quote["hold_ms"] == 1_000
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert list(quote[name]) == ["0.5", "0.9", "0.99"]
        assert 0 < quote[name]["0.5"] <= quote[name]["0.9"] <= quote[name]["0.99"]

    body = {**CHAT_BODY, "max_tokens": 5}
    path, headers = "/v1/chat/completions", {wire.QUOTE_HEADER: quote["quote"]}
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers[wire.ADMISSION_HEADER] == "guaranteed"

    unmet = await asked(client, **SIZED, slo={"ttft_ms": 1})
    assert unmet["admission"] == "refused"
    assert unmet["offer"]["ttft_ms"] > 1
    assert "ttft_ms" not in unmet
    impossible = {**body, "slo": {"ttft_ms": 1}}
    refused = await client.post(path, json=impossible)
    assert refused.status_code == 429
    offer = refused.json()["error"]["offer"]
    assert offer["ttft_ms"] > 1
    assert offer["takes"] == ["later", "slower"]
    assert offer["expires_ms"] == 1_000
    for name, header in wire.OFFER_HEADERS.items():
        assert float(refused.headers.get(header, 0)) == offer.get(name, 0)
    took = {**body, "slo": {"ttft_ms": offer["ttft_ms"], "tpot_ms": offer["tpot_ms"]}}
    headers = {wire.QUOTE_HEADER: refused.headers[wire.QUOTE_HEADER]}
    accepted = await client.post(path, json=took, headers=headers)
    assert accepted.status_code == 200
    assert accepted.headers[wire.ADMISSION_HEADER] == "guaranteed"


async def test_a_quote_by_size_alone_is_longer_for_a_longer_prompt(
    client: httpx.AsyncClient,
) -> None:
    short, long = [
        await asked(client, **{**SIZED, "prompt_tokens": tokens}) for tokens in (10, 3_000)
    ]
    assert short["ttft_ms"]["0.9"] < long["ttft_ms"]["0.9"]
    free = await asked(client, **{**SIZED, "class": "free"}, hold_ms=500)
    assert (free["admission"], free["objective"]) == ("best-effort", {})
    assert "quote" not in free, "without a promise there is nothing to hold"


class Quoting(FarController):
    """Answers quotes with one of its own."""

    def __init__(self, quote: Quote | None) -> None:
        super().__init__("a")
        self.quote_, self.held_s = quote, -1.0

    async def quote(self, query: Any, hold_s: float) -> Quote | None:
        self.queries.append(query)
        self.held_s = hold_s
        return self.quote_


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": "5"}, "prompt_tokens"),
        ({"prompt_tokens": 5, "output_tokens": 0}, "output_tokens"),
        ({"prompt_tokens": 5, "messages": []}, "messages"),
        ({"prompt_tokens": 5, "class": "none"}, "slo.class"),
        ({"prompt_tokens": 5, "slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
        ({"prompt_tokens": 5, "hold_ms": -1}, "hold_ms"),
        ({**CHAT_BODY, "hold_ms": "1"}, "hold_ms"),
        ({"model": "m"}, "messages"),
    ],
)
async def test_what_is_asked_wrongly_is_refused_as_in_a_request(
    body: dict[str, Any], param: str
) -> None:
    edge = Edge(FarSide(a=serve), Quoting(None), CONFIG)
    async with edge.client() as client:
        answer = await client.post(wire.QUOTE_PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("quote", "code"),
    [(None, "controller_down"), (Quote(RouteDecision(None, NO_REPLICA)), "no_replica")],
)
async def test_without_a_controller_or_replicas_there_is_no_quote(
    quote: Quote | None, code: str
) -> None:
    edge = Edge(FarSide(a=serve), Quoting(quote), CONFIG)
    async with edge.client() as client:
        answer = await client.post(wire.QUOTE_PATH, json=CHAT_BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)


async def test_a_token_is_checked_and_known_to_the_controller_by_its_key() -> None:
    controller = Quoting(None)
    edge = Edge(FarSide(a=serve), controller, CONFIG)
    token = "0123456789abcdef" * 2
    async with edge.client() as client:
        for value, status in (("x", 400), (token.upper(), 400), (token, 200)):
            headers = {wire.QUOTE_HEADER: value}
            answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
            assert answer.status_code == status
    (query,) = controller.queries
    assert query.takes == request_key(token)


async def test_a_token_that_nothing_is_held_for_waits_behind_the_others_of_its_class() -> None:
    class Full(FarController):
        free = False

        async def route(self, query: RouteQuery) -> RouteDecision | None:
            first = query.takes and not any(each.takes for each in self.queries)
            self.queries.append(query)
            if query.elsewhere:  # nothing is held
                return RouteDecision(None, DECLINED)
            return guaranteed() if self.free or first else unattainable()

    waits = ServiceClass(ttft_ms=60_000, when_unattainable="queue", queue_limit_s=60)
    config = RouterConfig(classes={"chat": waits}, default_class="chat")
    edge = Edge(FarSide(a=serve), controller := Full("a"), config)
    async with edge.client() as client, asyncio.TaskGroup() as tasks:

        async def sent(**headers: str) -> None:
            path = "/v1/chat/completions"
            answer = await client.post(path, json=CHAT_BODY, headers=headers)
            assert answer.status_code == 200, answer.text

        async def queued(requests: int) -> None:
            name = "sluice_admission_queue_requests"
            await until_true(lambda: edge.sample(name, **{"class": "chat"}) == requests)

        tasks.create_task(sent())
        await queued(1)
        tasks.create_task(sent(**{wire.QUOTE_HEADER: "0" * 32}))
        await queued(2)
        controller.free = True


async def test_a_flood_of_refusals_asks_for_few_offers_at_a_time() -> None:
    go, full, asked = asyncio.Event(), asyncio.Event(), 0

    class Slow(FarController):
        async def quote(self, query: Any, hold_s: float) -> Quote | None:
            nonlocal asked
            asked += 1
            if asked == MAX_OFFERING:
                full.set()
            await go.wait()
            return Quote(refusal, offer=Offer((1.0, 1.0, None)))

    refusal = RouteDecision(None, UNATTAINABLE, retry_after_s=1.0)
    edge = Edge(FarSide(a=serve), Slow(refusal), CONFIG)
    async with edge.client() as client:

        async def refused() -> httpx.Response:
            return await client.post("/v1/chat/completions", json=CHAT_BODY)

        waiting = [asyncio.create_task(refused()) for _ in range(MAX_OFFERING)]
        await full.wait()
        assert "offer" not in (await refused()).json()["error"]
        go.set()
        answers = await asyncio.gather(*waiting, refused())
        assert {answer.status_code for answer in answers} == {429}
        assert all("offer" in answer.json()["error"] for answer in answers)
