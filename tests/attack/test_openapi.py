"""The API keeps to its OpenAPI document, whatever is sent: schemathesis, with every check that can
be made of one answer. It is imported where it is used, by the process that runs these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from pydantic import SecretStr
from starlette.routing import Route

from sluice.router.config import BatchesConfig, RouterConfig
from sluice.router.ingress.access import LIVE_PATH
from sluice.router.openapi import PATH, document
from sluice.router.tenancy.auth import ApiKey
from tests.router.far_side import Edge, FarSide, serve

KEY = "user-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
CONFIG = RouterConfig(
    api_keys=(ApiKey(key=SecretStr(KEY), name="acme"),),
    batches=BatchesConfig(directory=Path("/nowhere")),
)
DOCUMENT = document(CONFIG)
OPERATIONS = [
    (path, method)
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
    if path != "/metrics"  # opened by another key
]
EXAMPLES = 8
NAMES = {"file_id": "f", "batch_id": "b", "model_id": "m"}


class Asked:
    """One router, asked again and again on one event loop."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        batches = BatchesConfig(directory=folder)
        self.edge = Edge(FarSide(a=serve), config=CONFIG.model_copy(update={"batches": batches}))
        self._runner = runner

    def ask(self, case: Any, headers: dict[str, str] = HEADERS) -> httpx.Response:
        """The answer to exactly the bytes that schemathesis would send."""
        kwargs = case.as_transport_kwargs(base_url="http://localhost")
        made = requests.Request(
            **{name: value for name, value in kwargs.items() if name != "allow_redirects"}
        ).prepare()
        content = made.body.encode() if isinstance(made.body, str) else made.body
        return self._runner.run(
            self._ask(made.method, made.url, {**dict(made.headers), **headers}, content)
        )

    async def _ask(self, method: Any, url: Any, headers: Any, content: Any) -> httpx.Response:
        async with self.edge.client() as client:
            return await client.request(method, url, headers=headers, content=content)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    with asyncio.Runner() as runner:
        yield Asked(runner, tmp_path)


@cache
def schema() -> Any:
    """Of schemathesis. Keys are sent and not played with: what goes without them is known of each
    path below."""
    import schemathesis

    return schemathesis.openapi.from_dict({**DOCUMENT, "security": []})


def checks_of(mode: str) -> list[Callable[..., Any]]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.positive_data_acceptance if mode == "positive" else checks.negative_data_rejection,
    ]


def served(case: Any) -> Any:
    """With the model that is served, or hardly anything would get past its name. And with integers
    as integers: to a schema 1.0 is one, and the API takes none with a point."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "m"
    case.body = without_points(case.body)
    if isinstance(case.body, dict) and isinstance(case.body.get("slo"), dict):
        put_in_order(case.body["slo"])
    if isinstance(case.body, dict) and case.body.get("max_tokens") == 0:
        case.body["max_tokens"] = 1  # 0 goes with echo only
    return case


def put_in_order(slo: dict[str, Any]) -> None:
    """What the document says in words only: the last stage ends with the request and no other one
    does, one at most ends with the reasoning, and beside stages there is no other TTFT or TPOT."""
    stages = slo.get("stages")
    if not stages:
        return
    slo.pop("ttft_ms", None)
    slo.pop("tpot_ms", None)
    for place, stage in enumerate(stages[:-1]):
        if stage["until"] == "end" or (place and stage["until"] == "reasoning_end"):
            stage["until"] = {"tokens": 1 + place}
    stages[-1]["until"] = "end"


def without_points(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_points(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_points(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


MODES = [
    (path, method, mode)
    for path, method in OPERATIONS
    for mode in ("positive", "negative")
    # Any text is a path, so what takes nothing else cannot be asked wrongly.
    if mode == "positive"
    or "requestBody" in DOCUMENT["paths"][path][method]
    or any(each["in"] != "path" for each in DOCUMENT["paths"][path][method]["parameters"])
]


@pytest.mark.parametrize(("path", "method", "mode"), MODES)
def test_the_document_holds(asked: Asked, path: str, method: str, mode: str) -> None:
    from schemathesis import GenerationMode

    operation = schema()[path][method.upper()]
    cases = operation.as_strategy(generation_mode=GenerationMode(mode))
    if mode == "positive":
        cases = cases.map(served)
    seen: set[int] = set()

    few = EXAMPLES if mode == "positive" else EXAMPLES // 2  # all wrong ones are refused alike

    @settings(max_examples=few, suppress_health_check=list(HealthCheck), database=None)
    @given(cases)
    def holds(case: Any) -> None:
        answer = asked.ask(case)
        seen.add(answer.status_code)
        case.validate_response(answer, checks=checks_of(mode))

    holds()
    # Some of what keeps to the document is served, but for the names of what is not there.
    ids = any(each["in"] == "path" for each in operation.definition.raw["parameters"])
    if mode == "positive" and not ids and path != "/v1/batches":
        assert 200 in seen
    assert max(seen) < 500


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_needs_a_key_says_so(asked: Asked, path: str, method: str) -> None:
    operation = DOCUMENT["paths"][path][method]
    secured = operation.get("security", DOCUMENT["security"])
    case = schema()[path][method.upper()].Case(path_parameters=NAMES)
    assert asked.ask(case, {}).status_code == (401 if secured else 200)
    assert asked.ask(case).status_code != 401


def test_every_route_is_in_the_document_and_no_other(asked: Asked) -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in asked.edge.api.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    routes.remove((LIVE_PATH, "get"))  # for balancers alone
    # Nothing is kept there to be read; it is answered to say so.
    routes -= {("/v1/responses/{rest}", method) for method in ("get", "post", "delete")}
    assert {(path, method) for path in DOCUMENT["paths"] for method in DOCUMENT["paths"][path]} == (
        routes
    )


def test_without_keys_and_batches_the_document_has_none() -> None:
    told = document(RouterConfig())
    assert told["security"] == []
    assert not [path for path in told["paths"] if "batches" in path or "files" in path]


async def test_the_document_is_served() -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        answer = await client.get(PATH)
    assert answer.json() == document(RouterConfig())


async def test_a_model_may_be_null_where_it_may_be_left_out() -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        for path, field, value in (("/tokenize", "prompt", "x"), ("/detokenize", "tokens", [1])):
            answer = await client.post(path, json={"model": None, field: value})
            assert answer.status_code == 200
            body = document(RouterConfig())["paths"][path]["post"]["requestBody"]
            schema = body["content"]["application/json"]["schema"]
            assert {"type": "null"} in schema["properties"]["model"]["anyOf"]
