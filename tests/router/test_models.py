"""Several models behind one router, and the endpoints beside chat and completions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.observability.metrics import MetricsPusher
from sluice.protocol.messages import MetricsPush
from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.router.api import make_api
from sluice.router.config import RouterConfig
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.models import TTL_S, Catalog, Model, ModelRegistry
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.metrics.page import merged
from sluice.router.serve.contract import ReplicaFailedError
from tests.router.far_side import CHAT_BODY, Edge, FarController, FarSide, Items, local_page, serve
from tests.router.virtual_time import VirtualTime


class Side(FarSide):
    """Replicas of one model; ``None`` answers nothing."""

    def __init__(self, model: str | None) -> None:
        super().__init__(**({} if model is None else {f"{model}-0": serve}))
        self.model = model
        self.loaded: list[str] = []
        """Adapters that were loaded while serving."""

    async def models(self) -> dict[str, object]:
        if self.model is None:
            raise ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.")
        names = (self.model, *self.loaded)
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


class Two:
    """A router for the models ``a``, which has an adapter, and ``b``, which may load some."""

    def __init__(self, b_serves: bool = True) -> None:
        self.sides = {"a": Side("a"), "b": Side("b" if b_serves else None)}
        self.controllers = {name: FarController(f"{name}-0") for name in self.sides}
        self.metrics = {name: RouterMetrics() for name in self.sides}
        self.edge = RouterMetrics()
        config = RouterConfig()
        self.fleets = ModelRegistry(
            [
                Model(
                    name,
                    Dispatcher(self.controllers[name], side, self.metrics[name], config),
                    Catalog(side),
                    self.metrics[name],
                    adapters=("a-tuned",) if name == "a" else (),
                    dynamic=name == "b",
                )
                for name, side in self.sides.items()
            ],
            self.edge,
        )
        self.api = make_api(config, self.fleets, local_page(self.edge))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.api), base_url="http://localhost"
        )


def requests_of(metrics: RouterMetrics, **labels: str) -> float:
    labels = {"class": "standard", "outcome": "ok", "endpoint": "chat", **labels}
    return metrics.registry.get_sample_value("sluice_requests_total", labels) or 0.0


async def test_a_request_goes_to_its_models_replicas_and_is_counted_there() -> None:
    two = Two()
    async with two.client() as client:
        for model in ("a", "b", "a-tuned", "b"):
            answer = await client.post("/v1/chat/completions", json={**CHAT_BODY, "model": model})
            assert answer.headers["x-sluice-replica"] == f"{model[0]}-0"
    sent = {
        name: [call.body["model"] for _, call in side.calls] for name, side in two.sides.items()
    }
    assert sent == {"a": ["a", "a-tuned"], "b": ["b", "b"]}
    assert [len(each.queries) for each in two.controllers.values()] == [2, 2]
    assert [requests_of(each) for each in two.metrics.values()] == [2, 2]


async def test_an_unknown_model_is_refused_before_any_replica_or_controller() -> None:
    two = Two()
    async with two.client() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT_BODY, "model": "c"})
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model 'c' does not exist; GET /v1/models lists those that do.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert not any(side.calls for side in two.sides.values())
    assert not any(each.queries for each in two.controllers.values())
    assert requests_of(two.edge, **{"class": "none", "outcome": "client_error"}) == 1


async def test_an_adapter_that_a_replica_lists_is_known_where_it_may_load_some() -> None:
    two = Two()
    two.sides["a"].loaded = ["of-a"]
    two.sides["b"].loaded = ["of-b"]
    async with two.client() as client:

        async def ask(model: str) -> int:
            body = {**CHAT_BODY, "model": model}
            return (await client.post("/v1/chat/completions", json=body)).status_code

        assert [await ask(name) for name in ("of-b", "of-a", "of-c")] == [200, 404, 404]
        assert (await client.get("/v1/models/of-b")).status_code == 200
    assert [request.body["model"] for _, request in two.sides["b"].calls] == ["of-b"]
    with pytest.raises(ApiError):
        await two.fleets.find("of-b", allowed=("a", "b"))


async def test_models_are_listed_and_a_missing_one_is_told() -> None:
    async with Two().client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == ["a", "b"]
        assert (await client.get("/health")).json() == {"status": "ok"}
    async with Two(b_serves=False).client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == ["a"]
        health = await client.get("/health")
    assert (health.status_code, health.json()) == (
        200,
        {"status": "degraded", "unavailable": ["b"]},
    )


async def test_one_model_is_described_or_not_found() -> None:
    two = Two()
    name = "org/b"
    two.fleets._by_name[name] = two.fleets.of("b")
    two.sides["b"].model = name
    async with two.client() as client:
        for each, path in (("a", "a"), (name, name), (name, "org%2Fb")):
            answer = await client.get(f"/v1/models/{path}")
            assert (answer.status_code, answer.json()) == (200, {"id": each, "object": "model"})
        for path in ("c", "a/b", "a-tuned", "%00", "x" * 2_000):
            answer = await client.get(f"/v1/models/{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                404,
                "model_not_found",
                "model",
            )
            assert len(answer.text) < 500
    async with Two(b_serves=False).client() as client:
        assert (await client.get("/v1/models/a")).status_code == 200
        assert (await client.get("/v1/models/b")).status_code == 503


async def test_a_key_sees_the_models_that_it_may_use() -> None:
    config = RouterConfig.model_validate(
        {"api_keys": [{"key": "k" * 20, "limits": {"models": ["other"]}}]}
    )
    async with Edge(FarSide(a=serve), config=config).client() as client:
        answer = await client.get("/v1/models/m", headers={"authorization": f"Bearer {'k' * 20}"})
    assert answer.status_code == 404


async def test_the_root_says_where_to_look_and_needs_no_key() -> None:
    config = RouterConfig.model_validate({"api_keys": ["k" * 20]})
    async with Edge(FarSide(a=serve), config=config).client() as client:
        told = (await client.get("/")).json()
        assert "page" not in told
        for name, path in told.items():
            if name not in ("name", "api"):
                assert (await client.get(path)).status_code in (200, 401, 403)


async def test_a_drained_model_is_listed_and_not_healthy() -> None:
    two = Two()
    async with two.client() as client:
        two.sides["b"].drained = True
        assert (await client.get("/health")).json() == {"status": "degraded", "unavailable": ["b"]}
        assert len((await client.get("/v1/models")).json()["data"]) == 2
    two = Two()
    async with two.client() as client:
        two.sides["a"].drained = two.sides["b"].drained = True
        health = await client.get("/health")
        assert health.status_code == 503 and "drained" in health.json()["error"]["message"]


async def test_models_that_are_away_are_waited_for_together() -> None:
    """Each takes until its deadline, and a load balancer's probe does not wait for their sum."""
    two = Two()
    asked = dict.fromkeys(two.sides, False)
    both = asyncio.Event()

    def answering(name: str) -> Callable[[], Awaitable[dict[str, object]]]:
        async def models() -> dict[str, object]:
            asked[name] = True
            if all(asked.values()):
                both.set()
            await both.wait()
            return {"object": "list", "data": [{"id": name, "object": "model"}]}

        return models

    for name, side in two.sides.items():
        side.models = answering(name)  # type: ignore[method-assign]
    async with two.client() as client:
        assert (await client.get("/health")).json() == {"status": "ok"}


async def test_tokens_need_a_model_only_where_there_are_several() -> None:
    body = {"prompt": "hello"}
    async with Two().client() as client:
        answer = await client.post("/tokenize", json=body)
        assert answer.status_code == 400
        assert "several" in answer.json()["error"]["message"]
    async with Edge(FarSide(a=serve)).client() as client:
        assert (await client.post("/tokenize", json=body)).status_code == 200


def test_two_models_cannot_share_a_name() -> None:
    two = Two()
    with pytest.raises(ValueError, match="'a'"):
        ModelRegistry([*two.fleets, *two.fleets], two.edge)
    with pytest.raises(ValueError, match="at least one"):
        ModelRegistry([], two.edge)


# Metrics of several models as one page.


async def test_the_pages_of_models_are_one_page_with_their_names() -> None:
    pages, edge = {name: RouterMetrics() for name in ("a", "org/b")}, RouterMetrics()
    pages["a"].ttft_s("standard").observe(0.2)
    pages["org/b"].ttft_s("standard").observe(0.3)
    edge.refused("chat", Reason.INVALID_API_KEY)
    pushed: list[MetricsPush] = []

    async def deliver(push: MetricsPush) -> bool:
        pushed.append(push)
        return True

    await MetricsPusher(deliver, edge.registry, "edge", labels={"model": "none"}).push_now()
    assert all(("model", "none") in sample.labels for sample in pushed[0].samples)
    texts = {name: generate_latest(page.registry) for name, page in pages.items()}
    texts["a"] += b'sluice_x_total{outcome="a b{",model="none"} 1.0\n'
    families = {
        family.name: family for family in text_string_to_metric_families(merged(texts).decode())
    }
    ttft = {
        sample.labels["model"]: sample.value
        for sample in families["sluice_ttft_seconds"].samples
        if sample.name == "sluice_ttft_seconds_sum"
    }
    assert ttft == {"a": 0.2, "org/b": 0.3}
    in_flight = families["sluice_in_flight_requests"].samples
    assert [sample.labels for sample in in_flight] == [{"model": "a"}, {"model": "org/b"}]
    assert b'sluice_x_total{outcome="a b{",model="none"} 1.0' in merged(texts)


# The other endpoints.


RESPONSE = {"model": "m", "input": "hello there"}
EMBEDDING = {"model": "m", "input": ["hello", "there"]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/responses", {"input": 3}, "input must be a string or a list"),
        ("/v1/responses", {"input": []}, "at least one object"),
        ("/v1/responses", {"input": ["x"]}, "at least one object"),
        ("/v1/responses", {**RESPONSE, "background": True}, "background is not supported"),
        ("/v1/responses", {**RESPONSE, "previous_response_id": "r"}, "no response is kept"),
        ("/v1/responses", {**RESPONSE, "conversation": "c"}, "nothing is kept"),
        ("/v1/responses", {**RESPONSE, "prompt": {"id": "p"}}, "no prompts are kept"),
        ("/v1/responses", {**RESPONSE, "max_output_tokens": 0}, "max_output_tokens must be"),
        ("/v1/responses", {**RESPONSE, "slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ("/v1/messages", {**CHAT_BODY, "compaction": {"type": "summarize"}}, "for a summary"),
        ("/v1/messages", {**CHAT_BODY, "thread": {"type": "create"}}, "send all messages"),
        ("/v1/messages/count_tokens", {**CHAT_BODY, "mcp_servers": [{}]}, "send their results"),
        ("/v1/embeddings", {}, "input must be a string"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "at most 2048 inputs"),
        ("/v1/embeddings", {"input": [[1, -1]]}, "token ids"),
        ("/v1/embeddings", {**EMBEDDING, "encoding_format": "bytes"}, "float or base64"),
        ("/v1/embeddings", {**EMBEDDING, "request_id": "x"}, "request_id cannot be set"),
        ("/tokenize", {}, "prompt must be a string, got None"),
        ("/tokenize", {"prompt": [1]}, "prompt must be a string"),
        ("/detokenize", {"tokens": [1, True]}, "tokens must be a list of token ids"),
        ("/detokenize", {}, "tokens must be a list of token ids"),
    ],
)
async def test_a_wrong_body_reaches_no_replica(
    path: str, body: dict[str, Any], message: str
) -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        answer = await client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert edge.side.calls == []


async def embed(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """Two vectors, of which the first was there after a while."""
    yield ResponseHead(200, "application/json", replica)
    yield ResponseChunk(b'{"object": "list", "data": []}')
    yield ResponseTail(7, 2, (0.25,))


async def test_embeddings_are_placed_as_prefills_and_timed_as_one_token() -> None:
    edge = Edge(FarSide(a=embed))
    async with edge.client() as client:
        body = {**EMBEDDING, "slo": {"ttft_ms": 60_000}}
        answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200
    (query,) = edge.controller.queries
    assert (query.output_tokens, query.prompt_tokens) == (2, 2)
    assert edge.side.calls[0][1].body == EMBEDDING
    labels = {"class": "standard", "priority": "2"}
    assert edge.sample("sluice_attained_total", **labels) == 1


async def test_a_response_is_placed_by_its_input_instructions_and_limit() -> None:
    edge = Edge(FarSide(a=serve))
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x" * 3000}]}]
    async with edge.client() as client:
        for given in ("x" * 3000, items):
            body = {**RESPONSE, "input": given, "instructions": "y" * 1000}
            answer = await client.post("/v1/responses", json={**body, "max_output_tokens": 9})
            assert answer.status_code == 200
        for method, path in (("GET", "r"), ("DELETE", "r"), ("POST", "r/cancel")):
            gone = await client.request(method, f"/v1/responses/{path}")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    for query in edge.controller.queries:
        assert query.output_tokens == 9
        assert 1000 <= query.prompt_tokens <= 1010
        assert query.prefix


async def test_tokens_are_counted_by_any_replica_without_a_decision_or_an_objective() -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        for path, body in (
            ("/tokenize", {"model": "m", "prompt": "hi"}),
            ("/detokenize", {"model": "m", "tokens": []}),
        ):
            answer = await client.post(path, json=body, headers={"x-slo-class": "nonsense"})
            assert answer.status_code == 200
            assert "x-sluice-admission" not in answer.headers
            assert "x-sluice-class" not in answer.headers
    assert edge.controller.queries == []
    assert edge.sample("sluice_slo_requests_total", **{"class": "none", "priority": "1"}) == 0
    labels = {"class": "none", "outcome": "ok", "endpoint": "tokenize"}
    assert edge.sample("sluice_requests_total", **labels) == 1


async def test_an_adapter_whose_files_differ_between_replicas_is_served_by_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One replica has loaded the files, which were replaced since, and the other one the new."""
    time = VirtualTime()
    bodies = [listing(tuned="1", other="1"), listing("tuned", "other", tuned="2", other="1")]

    class Two(FarSide):
        async def all_models(self) -> list[dict[str, Any]]:
            return [dict(body) for body in bodies]

    catalog = Catalog(Two(), clock=time, dynamic=True)
    with caplog.at_level("INFO"):
        assert [each["id"] for each in (await catalog.models())["data"]] == ["m", "other"]
        assert await catalog.lists("other")
        with pytest.raises(ApiError, match="other files at some replicas") as caught:
            await catalog.lists("tuned")
        assert caught.value.reason.status == 503
        assert not await catalog.lists("unknown")
        bodies[0] = listing("tuned", "other", tuned="2", other="1")
        await time.advance(TTL_S)
        assert await catalog.lists("tuned")
    assert [each.message.partition(" tuned ")[2] for each in caplog.records] == [
        "differ between replicas; not serving it",
        "are the same at all replicas again",
    ]
    assert "digests" not in await catalog.models()


def listing(*adapters: str, **digests: str) -> dict[str, Any]:
    """What a replica lists."""
    entries = [{"id": name, "object": "model"} for name in ("m", *adapters)]
    return {"object": "list", "data": entries, "digests": digests}
