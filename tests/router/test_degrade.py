"""Degrading by consent: a class accepts less than it asked for rather than no promise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sluice.deploy.config import parse_config
from sluice.protocol.requests import EngineRequest, RequestBody
from sluice.router.config import Alternative, RouterConfig, ServiceClass
from sluice.router.dispatch.degrade import degraded
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize, output_limit
from sluice.scheduling.request.job import DECLINED, RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.router.far_side import CHAT_BODY, Edge, FarController, FarSide, Items, serve
from tests.router.test_admission import best_effort, guaranteed, unattainable

ACCEPTS = (Alternative(max_tokens=8), Alternative(ttft_ms=2_000, tpot_ms=300))
CONFIG = RouterConfig(
    classes={
        "standard": ServiceClass(ttft_ms=400, tpot_ms=200),
        "flexible": ServiceClass(ttft_ms=400, tpot_ms=200, accepts=ACCEPTS),
        "strict": ServiceClass(ttft_ms=400, when_unattainable="reject", accepts=ACCEPTS),
    }
)
NO = RouteDecision(None, DECLINED)


def edge_of(*decisions: RouteDecision | str | None) -> Edge:
    return Edge(FarSide(a=serve), FarController(*decisions), CONFIG)


async def post(edge: Edge, name: str, **body: Any) -> httpx.Response:
    async with edge.client() as client:
        return await client.post(
            "/v1/chat/completions",
            json={**CHAT_BODY, "max_tokens": 64, "slo": {"class": name}, **body},
        )


async def test_a_request_that_is_promised_as_asked_is_not_degraded() -> None:
    edge = edge_of(guaranteed())
    response = await post(edge, "flexible")
    assert "x-sluice-degraded" not in response.headers
    assert response.headers["x-sluice-promised-ttft-ms"] == "400.0"
    (query,) = edge.controller.queries
    assert query.elsewhere and query.output_tokens == 64
    (_, request), *_ = edge.side.calls
    assert request.promised and request.body["max_tokens"] == 64


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_are_asked_about_in_order_and_each_alone(stream: bool) -> None:
    edge = edge_of(NO, NO, guaranteed())
    response = await post(edge, "flexible", stream=stream)
    assert response.status_code == 200
    assert response.headers["x-sluice-degraded"] == "ttft_ms=2000, tpot_ms=300"
    assert response.headers["x-sluice-promised-ttft-ms"] == "2000.0"
    assert response.headers["x-sluice-admission"] == "guaranteed"
    asked = [(each.slo.ttft_s, each.output_tokens) for each in edge.controller.queries]
    assert asked == [(0.4, 64), (0.4, 8), (2.0, 64)]
    (_, request), *_ = edge.side.calls
    assert request.slo.times_s == (2.0, 0.3, None)
    degraded = {"class": "flexible", "field": "tpot_ms"}
    assert edge.sample("sluice_degraded_total", **degraded) == 1
    kept = edge.sample("sluice_promises_total", **{"class": "flexible", "outcome": "kept"})
    assert kept == 1


async def test_fewer_tokens_go_to_the_engine_whose_finish_reason_says_so() -> None:
    edge = edge_of(NO, guaranteed())
    response = await post(edge, "flexible")
    assert response.headers["x-sluice-degraded"] == "max_tokens=8"
    (_, request), *_ = edge.side.calls
    assert request.body["max_tokens"] == 8
    assert request.promised


async def test_without_any_promise_the_class_says_what_happens() -> None:
    edge = edge_of(NO, NO, NO, best_effort())
    response = await post(edge, "flexible")
    assert response.headers["x-sluice-admission"] == "best-effort"
    assert "x-sluice-degraded" not in response.headers
    assert [each.elsewhere for each in edge.controller.queries] == [True, True, True, False]

    edge = edge_of(NO, NO, unattainable())
    response = await post(edge, "strict", max_tokens=4)  # the first alternative changes nothing
    assert response.status_code == 429
    assert len(edge.controller.queries) == 3


async def test_a_controller_that_does_not_answer_is_not_asked_about_alternatives() -> None:
    edge = edge_of()
    response = await post(edge, "flexible")
    assert response.status_code == 200
    assert len(edge.controller.queries) == 2
    assert edge.sample("sluice_fallback_total", reason="no_answer") == 1


async def test_another_model_or_adapter_answers_if_the_key_may_use_it() -> None:
    accepts = (Alternative(model="unknown"), Alternative(model="local"))
    config = RouterConfig(classes={"standard": ServiceClass(ttft_ms=400, accepts=accepts)})
    edge = Edge(FarSide(a=serve), FarController(NO, guaranteed()), config)
    response = await post(edge, "standard")
    assert response.headers["x-sluice-degraded"] == "model=local"
    first, second = edge.controller.queries
    assert first.prefix != second.prefix or not first.prefix
    assert edge.side.calls[0][1].body["model"] == "local"


async def test_a_model_that_is_too_short_for_the_request_is_no_alternative() -> None:
    accepts = (Alternative(model="local"),)
    config = RouterConfig(classes={"standard": ServiceClass(ttft_ms=400, accepts=accepts)})
    for longest, said in ((63, None), (4_096, "model=local")):
        side = FarSide(a=serve)
        side.max_model_len = longest
        response = await post(Edge(side, FarController(NO, guaranteed()), config), "standard")
        assert response.headers.get("x-sluice-degraded") == said


async def test_a_request_that_takes_up_a_quote_is_not_degraded() -> None:
    edge = edge_of(NO, guaranteed())
    async with edge.client() as client:
        headers = {"x-sluice-quote": "0" * 32}
        body = {**CHAT_BODY, "slo": {"class": "flexible"}}
        await client.post("/v1/chat/completions", json=body, headers=headers)
    (query,) = edge.controller.queries
    assert query.takes and not query.elsewhere


async def test_classes_without_alternatives_ask_once() -> None:
    edge = edge_of(best_effort())
    await post(edge, "standard")
    (query,) = edge.controller.queries
    assert not query.elsewhere


def call(endpoint: Any = "chat", slo: SLO | None = None, **body: Any) -> Call:
    made = RequestBody.of({"model": "m", **body})
    output = output_limit(endpoint, made)
    return Call("r", endpoint, made, slo or SLO(), PromptSize(1, 1), 0.0, output_tokens=output)


def test_an_alternative_only_asks_for_less() -> None:
    asked = call(slo=SLO(ttft_s=1, tpot_s=0.1), messages=[], max_completion_tokens=16, n=2)
    assert degraded(asked, Alternative(max_tokens=16)) is None
    assert degraded(asked, Alternative(ttft_ms=900, e2e_ms=9_000, model="m")) is None
    changed = degraded(asked, Alternative(ttft_ms=1_500, tpot_ms=50, max_tokens=5))
    assert changed is not None
    assert changed.slo.times_s == (1.5, 0.1, None)
    assert changed.output_tokens == 10
    assert changed.degraded == {"ttft_ms": "1500", "max_tokens": "5"}
    assert isinstance(changed.body, RequestBody)
    assert RequestBody.of_parts(*changed.body.parts) == {**asked.body, "max_completion_tokens": 5}


def test_tokens_of_reasoning_are_limited_by_the_engines_own_field() -> None:
    budget = Alternative(thinking_tokens=256)
    changed = degraded(call(messages=[]), budget)
    assert changed is not None and changed.body["thinking_token_budget"] == 256
    assert degraded(call(messages=[], thinking_token_budget=100), budget) is None
    assert degraded(call("responses", input="x"), budget) is None


def test_what_an_engine_would_refuse_is_not_applied() -> None:
    shorter = Alternative(max_tokens=8)
    assert degraded(call(messages=[], max_tokens=64, min_tokens=9), shorter) is None
    thinking = {"type": "enabled", "budget_tokens": 1_024}
    assert (
        degraded(call("messages", messages=[], max_tokens=64, thinking=thinking), shorter) is None
    )
    assert degraded(call("embeddings", input="x"), shorter) is None
    staged = SLO.of_stages([Stage(1.0, 0.1, None, 4), Stage(None, 0.1)])
    assert degraded(call(slo=staged, messages=[]), Alternative(ttft_ms=9_000)) is None


@pytest.mark.parametrize(
    ("accepts", "said"),
    [
        ([{"model": "other"}], "model 'other' is not one of: a, b"),
        ([{"thinking_tokens": 8}], "needs reasoning-parser or reasoning-config"),
        ([{}], "needs one of: max_tokens, thinking_tokens, model, ttft_ms, tpot_ms, e2e_ms"),
        ([{"max_tokens": 1}] * 5, "at most 4 items"),
        ([{"max_tokens": 0}], "greater than or equal to 1"),
        ([{"temperature": 1}], "there is no such key"),
    ],
)
def test_alternatives_are_checked_at_the_start(accepts: Any, said: str) -> None:
    classes = {"standard": {"ttft_ms": 400, "accepts": accepts}}
    with pytest.raises(ValueError, match="accepts") as refused:
        parse_config({"models": {"a": {}, "b": {}}, "router": {"classes": classes}})
    assert said in str(refused.value)
    allowed = {"standard": {"accepts": [{"model": "b"}, {"thinking_tokens": 8}]}}
    engine = {"vllm_args": {"reasoning_parser": "qwen3"}}
    parse_config({"engine": engine, "models": {"a": {}, "b": {}}, "router": {"classes": allowed}})


async def test_a_promise_of_a_quarantined_request_is_released() -> None:
    edge = edge_of(guaranteed())
    seen: list[Call] = []

    async def noted(side: FarSide, replica: str, request: EngineRequest) -> Items:
        seen.extend(answer.call for answer in edge.dispatcher._attempts.values())
        async for item in serve(side, replica, request):
            yield item

    edge.side.behaviours["a"] = noted
    assert (await post(edge, "flexible")).status_code == 200
    edge.dispatcher._suspicion._remember(seen[0], 2, 0.0)
    edge.controller.released.clear()
    assert (await post(edge, "flexible")).status_code == 422
    assert edge.controller.released == [edge.controller.queries[-1].key]
