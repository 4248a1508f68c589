"""The page of metrics with vLLM's names."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.router import api
from sluice.router.metrics.page import merged
from sluice.router.metrics.vllm_names import NAMES, with_vllm_names
from tests.metrics_catalogue import catalogue
from tests.router.far_side import CHAT_BODY, Edge, FarSide, serve

PAGE = b"""\
# HELP sluice_replica_waiting_requests Waiting.
# TYPE sluice_replica_waiting_requests gauge
sluice_replica_waiting_requests{replica="a",role="mixed"} 3.0
sluice_replica_waiting_requests{replica="b",role="mixed"} 4.0
# HELP sluice_tokens_total Tokens.
# TYPE sluice_tokens_total counter
sluice_tokens_total{class="chat",type="prompt"} 100.0
sluice_tokens_total{class="chat",type="cached"} 40.0
"""


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """By name, model and replica or class."""
    return {
        (each.name, each.labels["model_name"], each.labels.get("replica", each.labels.get("class")))
        : each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if "le" not in each.labels
    }  # fmt: skip


def test_series_get_vllms_names_and_labels() -> None:
    one = samples(with_vllm_names(PAGE, "m").decode())
    assert one == {
        ("vllm:num_requests_waiting", "m", "a"): 3,
        ("vllm:num_requests_waiting", "m", "b"): 4,
        ("vllm:prompt_tokens_total", "m", "chat"): 100,
        ("vllm:prefix_cache_queries_total", "m", "chat"): 100,
        ("vllm:prefix_cache_hits_total", "m", "chat"): 40,
    }
    two = samples(with_vllm_names(merged({"m": PAGE, "n": PAGE}), "m").decode())
    assert two == one | {(name, "n", where): value for (name, _, where), value in one.items()}


async def test_the_router_serves_them_and_refuses_other_names() -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=CHAT_BODY)
        found = await client.get("/metrics?names=vllm")
        assert found.headers["content-type"].startswith("text/plain")
        assert samples(found.text)["vllm:request_success_total", "m", "standard"] == 1
        assert samples(found.text)["vllm:time_to_first_token_seconds_count", "m", "standard"] == 1
        assert "sluice_requests_total" not in found.text
        assert (await client.get("/metrics?names=sluice")).text.startswith("# HELP sluice")
        wrong = await client.get("/metrics?names=other")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "names")


async def test_all_that_wait_for_a_page_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []

    def counted(page: bytes, model: str) -> bytes:
        pages.append(page)
        return with_vllm_names(page, model)

    monkeypatch.setattr(api, "with_vllm_names", counted)
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=CHAT_BODY)
        asked = [client.get("/metrics?names=vllm") for _ in range(8)]
        found = {answer.text for answer in await asyncio.gather(*asked)}
    assert len(found) == len(pages) == 1
    assert "vllm:request_success_total" in found.pop()


def test_each_name_is_one_of_ours() -> None:
    known = {name.removesuffix("_total") for name in catalogue()}
    assert {ours for _, ours, _ in NAMES} <= known


def test_each_name_is_one_of_vllms() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).with_name("v1") / "metrics" / "loggers.py"
    text = source.read_text(encoding="utf-8")
    assert [name for name, _, _ in NAMES if f'"{name}"' not in text] == []
