"""Errors have the shape and the types of the API that is spoken, whoever refuses and wherever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import SecretStr

from sluice.protocol.requests import ANTHROPIC
from sluice.router.config import RouterConfig
from sluice.router.errors import RULES, ApiError, Reason
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.serve.contract import ReplicaFailedError
from tests.router.far_side import (
    CHAT_BODY,
    COMPLETION_BODY,
    Edge,
    FarController,
    FarSide,
    answer,
    fail,
    serve,
)

KEYS = RouterConfig(api_keys=(SecretStr("first-key"),))
SMALL = RouterConfig(max_body_bytes=1024)
MESSAGE = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    507: "api_error",
}
"""Anthropic's, and what is nearest to them."""


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_one_shape_for_each_api(reason: Reason) -> None:
    error = ApiError(reason, "It is so.", "field", retry_after_s=1.5)
    status = RULES[reason].status
    anthropic = json.loads(bytes(error.response("messages").body))
    assert anthropic == {
        "type": "error",
        "error": {
            "type": TYPES[status],
            "message": "It is so.",
            "code": reason.value,
            "retry_after_ms": 1500,
        },
    }
    kinds = {403: "permission_error", 429: "rate_limit_error"}
    other = "server_error" if status >= 500 else "invalid_request_error"
    for endpoint in (*sorted(set(INFERENCE_PATHS.values()) - ANTHROPIC), None):
        assert json.loads(bytes(error.response(endpoint).body)) == {
            "error": {
                "message": "It is so.",
                "type": kinds.get(status, other),
                "param": "field",
                "code": reason.value,
                "retry_after_ms": 1500,
            }
        }


@pytest.mark.parametrize(
    ("method", "path", "body", "config", "status"),
    [
        ("POST", "/v1/messages", MESSAGE, KEYS, 401),
        ("POST", "/v1/messages/count_tokens", MESSAGE, KEYS, 401),
        ("POST", "/v1/messages/batches", MESSAGE, KEYS, 401),
        ("POST", "/v1/messages/batches", MESSAGE, RouterConfig(), 404),
        ("GET", "/v1/messages", None, RouterConfig(), 405),
        ("GET", "/v1/messages/count_tokens", None, RouterConfig(), 405),
        ("POST", "/v1/messages", {**MESSAGE, "system": "x" * 2_000}, SMALL, 413),
        ("POST", "/v1/messages", {**MESSAGE, "max_tokens": 0}, RouterConfig(), 400),
        ("POST", "/v1/messages", {**MESSAGE, "model": "x"}, RouterConfig(), 404),
        ("POST", "/v1/messages", MESSAGE, RouterConfig(), 503),
    ],
)
async def test_anthropics_errors(
    method: str, path: str, body: Any, config: RouterConfig, status: int
) -> None:
    lost = ReplicaFailedError(Reason.NO_REPLICA, "None runs.")
    edge = Edge(FarSide(a=fail(lost)), config=config)
    async with edge.client() as client:
        refused = await client.request(method, path, json=body)
    assert refused.status_code == status
    error = refused.json()
    assert error.keys() == {"type", "error"} and error["type"] == "error"
    assert error["error"]["type"] == TYPES[status]


async def test_a_stream_of_messages_ends_with_anthropics_error() -> None:
    lost = ReplicaFailedError(Reason.REPLICA_FAILED, "It died.", dead=True)
    async with Edge(FarSide(a=fail(lost, after=1))).client() as client:
        broken = await client.post("/v1/messages", json={**MESSAGE, "stream": True})
    name, data = broken.text.rstrip().splitlines()[-2:]
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


async def test_responses_are_not_kept_by_any_method() -> None:
    async with Edge(FarSide(a=serve)).client() as client:
        for method, path in (("GET", "r"), ("DELETE", "r"), ("POST", "r/cancel")):
            unknown = await client.request(method, f"/v1/responses/{path}")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("name", ["api-key", "x-api-key"])
async def test_keys_in_the_headers_of_other_clients(name: str) -> None:
    async with Edge(FarSide(a=serve), config=KEYS).client() as client:
        for key, status in (("first-key", 200), ("other-key", 401)):
            headers = {name: key}
            given = await client.post("/v1/completions", json=COMPLETION_BODY, headers=headers)
            assert given.status_code == status


async def test_probes_need_no_key_and_the_version_does() -> None:
    async with Edge(FarSide(a=serve), config=KEYS).client() as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).json() == {"status": "ok"}
        assert (await client.get("/version")).status_code == 401
        version = await client.get("/version", headers={"api-key": "first-key"})
        assert version.json().keys() == {"version"}


class Embedder(FarSide):
    """Replicas that list what they offer."""

    offered = ("embeddings", "tokenize")

    async def models(self) -> dict[str, object]:
        return {**await super().models(), "endpoints": [*self.offered]}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT_BODY), ("/v1/messages", MESSAGE)]
)
async def test_what_a_model_does_not_offer_is_refused_before_a_decision(
    path: str, body: dict[str, Any]
) -> None:
    edge = Edge(side := Embedder(a=serve))
    async with edge.client() as client:
        for _ in range(2):
            refused = await client.post(path, json=body)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "endpoint_not_offered"
            assert "embeddings, tokenize" in refused.json()["error"]["message"]
            assert not [name for name in refused.headers if name.startswith("x-sluice-adm")]
        assert (edge.controller.queries, side.calls) == ([], [])


async def test_an_engines_refusal_promises_nothing() -> None:
    edge = Edge(FarSide(a=answer(400, b'{"error": {}}')), FarController("a"))
    async with edge.client() as client:
        refused = await client.post("/v1/completions", json=COMPLETION_BODY)
    assert refused.status_code == 400
    assert not {"x-sluice-admission", "x-sluice-promised-ttft-ms"} & set(refused.headers)
