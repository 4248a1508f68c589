"""Every field of every request that vLLM knows: a null is the default, and a bad value is named."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import SPEECH, Endpoint, RequestBody
from sluice.replica.vllm.engine import _validated
from sluice.replica.vllm.serving import _PLACES, Serving
from sluice.router.config import RouterConfig
from sluice.router.request.arrival import Arrival
from sluice.router.request.call import CallReader
from tests.stock.rows import BASES

pytestmark = pytest.mark.vllm

SAID = BASES["/v1/chat/completions"]["messages"]
BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat": BASES["/v1/chat/completions"],
    "completions": BASES["/v1/completions"],
    "responses": BASES["/v1/responses"],
    "messages": BASES["/v1/messages"],
    "count_tokens": BASES["/v1/messages/count_tokens"],
    "embeddings": BASES["/v1/embeddings"],
    "classify": BASES["/classify"],
    "pooling": BASES["/pooling"],
    "score": BASES["/score"],
    "rerank": BASES["/rerank"],
    "tokenize": BASES["/tokenize"],
    "detokenize": BASES["/detokenize"],
}
WRONG: tuple[Any, ...] = ("wrong", {"wrong": {}}, [{"wrong": {}}], -1.5)


def request_type(endpoint: Endpoint) -> Any:
    _, _, module, name = _PLACES[endpoint]
    return getattr(import_module(module), name)


def serving(endpoint: Endpoint) -> Serving:
    return Serving(TypeAdapter(request_type(endpoint)), None, None, True)  # type: ignore[arg-type]


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The models that a type of request is, or may be."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


def fields(endpoint: Endpoint) -> dict[str, bool]:
    """Whether each field of a request may be null."""
    found: dict[str, bool] = {}
    for model in models_in(request_type(endpoint)):
        for name, field in model.model_fields.items():
            may_be_null = type(None) in get_args(field.annotation)
            found[field.alias or name] = found.get(name, False) or may_be_null
    return found


def test_all_endpoints_of_json_are_here() -> None:
    assert set(BODIES) | SPEECH == set(get_args(Endpoint))


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_null_is_the_default(endpoint: Endpoint) -> None:
    reader = CallReader(RouterConfig())

    def parsed(body: dict[str, Any]) -> Any:
        arrival = Arrival("r", 0.0)
        call = reader.make(RequestBody.of(body), (), endpoint, arrival)
        return _validated(dict(call.body), serving(endpoint)).model_dump(exclude={"request_id"})

    body = BODIES[endpoint]
    without = parsed(body)
    nullable = [name for name, may_be_null in fields(endpoint).items() if may_be_null]
    assert nullable
    for name in nullable:
        if name not in body:
            assert parsed({**body, name: None}) == without, name


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_wrong_value_is_named(endpoint: Endpoint) -> None:
    refused = 0
    for name in fields(endpoint):
        for value in WRONG:
            try:
                _validated({**BODIES[endpoint], name: value}, serving(endpoint))
            except RequestError as error:
                refused += 1
                assert error.param is not None, (name, value, str(error))
                assert error.param.split(".")[0] == name, (name, value, error.param, str(error))
    assert refused
