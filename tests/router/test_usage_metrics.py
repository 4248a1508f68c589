"""The tokens and times that the edge counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.router.config import RouterConfig
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.scheduling.request.job import RouteDecision, Tier
from tests.router.far_side import (
    CHAT_BODY,
    WORDS,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    event,
    fail,
)

CLASS = {"class": "standard"}
OPERATION = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "sluice",
    "gen_ai_request_model": "m",
}
KEY = "a-key-of-acme-123"
KEYS = {"api_keys": [{"key": KEY, "name": "acme"}]}
TAIL = ResponseTail(5, len(WORDS), queued_s=0.5, cached_tokens=4)


async def timed(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """Three tokens a second apart; plain, they left the engine a second apart."""
    if request.body.get("stream"):
        yield ResponseHead(200, "text/event-stream", replica)
        for word in WORDS:
            yield ResponseChunk(event(word, request.request_id), 1)
            await side.let_go()
            side.clock.now_s += 1  # type: ignore[attr-defined]
        yield TAIL
        return
    yield ResponseHead(200, "application/json", replica)
    yield ResponseChunk(json.dumps({"object": "chat.completion"}).encode())
    yield TAIL._replace(token_offsets_s=(1.0, 2.0, 3.0))


def edge(*decisions: RouteDecision, config: Any = KEYS, **behaviours: Any) -> Edge:
    side, clock = FarSide(**behaviours), Clock()
    side.clock = clock  # type: ignore[attr-defined]
    controller = FarController(*decisions) if decisions else None
    return Edge(side, controller, RouterConfig.model_validate(config), clock)


async def ask(router: Edge, path: str = "/v1/chat/completions", **body: Any) -> None:
    async with router.client() as client:
        await client.post(
            path, json={**CHAT_BODY, **body}, headers={"authorization": f"Bearer {KEY}"}
        )


def tokens(router: Edge) -> dict[str, float]:
    """By type; those of the class and of the client are the same."""
    types = ("prompt", "cached", "generated")
    found = {each: router.sample("sluice_tokens_total", **CLASS, type=each) for each in types}
    for each, count in found.items():
        assert router.sample("sluice_client_tokens_total", client="acme", type=each) == count
    return found


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_and_times_of_a_served_request(stream: bool) -> None:
    router = edge(a=timed)
    await ask(router, stream=stream)
    assert tokens(router) == {"prompt": 5, "cached": 4, "generated": 3}
    assert router.sample("sluice_queue_seconds_sum", **CLASS) == 0.5
    assert router.sample("sluice_e2e_seconds_count", **CLASS) == 1
    took_s = router.sample("gen_ai_server_request_duration_seconds_sum", **OPERATION, error_type="")
    assert took_s == router.sample("sluice_e2e_seconds_sum", **CLASS) == (3 if stream else 0)
    for name, count in (("input", 5), ("output", 3)):
        labels = {**OPERATION, "gen_ai_token_type": name}
        assert router.sample("gen_ai_client_token_usage_sum", **labels) == count
    ttft_s = router.sample("gen_ai_server_time_to_first_token_seconds_sum", **OPERATION)
    assert ttft_s == router.sample("sluice_ttft_seconds_sum", **CLASS)
    assert router.sample("gen_ai_server_time_per_output_token_seconds_sum", **OPERATION) == 1
    # Of a plain response nobody saw the gaps.
    assert router.sample("sluice_inter_token_seconds_count", **CLASS) == (2 if stream else 0)
    assert router.sample("sluice_inter_token_seconds_sum", **CLASS) == (2 if stream else 0)


async def test_of_a_stream_that_broke_off_the_tokens_that_were_sent_count() -> None:
    router = edge(a=fail(ReplicaFailedError(Reason.INTERNAL, "It broke.", retry=False), after=2))
    await ask(router, stream=True)
    assert tokens(router) == {"prompt": 0, "cached": 0, "generated": 2}
    duration = "gen_ai_server_request_duration_seconds_count"
    assert router.sample(duration, **OPERATION, error_type="failed") == 1
    assert router.sample("sluice_e2e_seconds_count", **CLASS) == 0
    assert router.sample("gen_ai_server_time_to_first_token_seconds_count", **OPERATION) == 0


async def test_a_vector_is_no_generated_token() -> None:
    async def embed(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(b"{}")
        yield ResponseTail(5, 1, (0.1,))

    router = edge(a=embed)
    await ask(router, "/v1/embeddings", messages=None, input="hello")
    assert tokens(router) == {"prompt": 5, "cached": 0, "generated": 0}
    embeddings = {**OPERATION, "gen_ai_operation_name": "embeddings"}
    duration = "gen_ai_server_request_duration_seconds_count"
    assert router.sample(duration, **embeddings, error_type="") == 1


async def test_the_cache_and_the_queue_are_those_of_the_replica_that_computes_the_prompt() -> None:
    async def prefill(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", replica)
        yield ResponseTail(5, 0, queued_s=0.25, kv_handle=KVHandle("p", {}, 5), cached_tokens=1)

    pair = RouteDecision("d", "placed", Tier.GUARANTEED, 0.5, role="decode", prefill_id="p")
    router = edge(pair, p=prefill, d=timed)
    router.side.roles = ("mixed", "decode", "prefill")
    router = Edge(router.side, router.controller, router.config, router.side.clock)  # type: ignore[attr-defined]
    await ask(router)
    assert tokens(router) == {"prompt": 5, "cached": 1, "generated": 3}
    assert router.sample("sluice_queue_seconds_sum", **CLASS) == 0.25


async def test_endpoints_that_no_engine_schedules_use_no_tokens() -> None:
    router = edge(a=timed)
    await ask(router, "/tokenize", messages=None, prompt="hello")
    ended = {"class": "none", "outcome": "ok", "endpoint": "tokenize"}
    assert router.sample("sluice_requests_total", **ended) == 1
    names = {
        sample.name for family in router.metrics.registry.collect() for sample in family.samples
    }
    assert not {name for name in names if "token" in name and not name.endswith("_created")}
