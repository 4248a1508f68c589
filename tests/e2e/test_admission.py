"""What is promised on the wire is what the engines do: two real vLLM replicas behind the router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import System, system, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

_SLOW_S = 60.0


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    fields = {
        "engine": {"vllm_args": {"max-model-len": 1024}},
        "router": {
            "default_class": "easy",
            "classes": {
                "easy": {"ttft_ms": 1_000 * _SLOW_S, "tpot_ms": 1_000, "priority": 2},
                # No engine can hold these two.
                "hopeless": {"ttft_ms": 0.01},
                "strict": {"ttft_ms": 0.01, "when_unattainable": "reject"},
                "batch": {},
            },
        },
    }
    with system(fields) as started:
        yield started


def send(serving: System, service_class: str, **fields: Any) -> httpx.Response:
    body = {"model": "local", "prompt": "one two three", "max_tokens": 4, **fields}
    return httpx.post(
        f"{serving.url}/v1/completions",
        json=body,
        headers={"x-slo-class": service_class},
        timeout=120,
    )


def test_a_promise_is_said_with_its_time_and_kept(serving: System) -> None:
    wait_until(
        lambda: send(serving, "easy").headers["x-sluice-admission"] == "guaranteed",
        "both engines are known, and something can be promised",
    )
    for _ in range(5):
        answer = send(serving, "easy")
        assert answer.status_code == 200
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert 0 < float(answer.headers["x-sluice-predicted-ttft-ms"]) < 1_000 * _SLOW_S
    page = httpx.get(f"{serving.url}/metrics", timeout=30).text
    assert 'sluice_promises_total{class="easy",outcome="missed"}' not in page


def test_what_cannot_be_promised_is_best_effort_or_refused_as_its_class_says(
    serving: System,
) -> None:
    for service_class in ("hopeless", "batch"):
        answer = send(serving, service_class)
        assert answer.status_code == 200
        assert answer.headers["x-sluice-admission"] == "best-effort"
        assert "x-sluice-predicted-ttft-ms" not in answer.headers
    refused = send(serving, "strict")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "slo_unattainable"
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(
            model="local", prompt="one", max_tokens=1, extra_headers={"x-slo-class": "strict"}
        )
