"""A best-effort stream on real Ray and vLLM: promised requests take its memory, and the client sees
one uninterrupted stream with the text of an undisturbed run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# 21 blocks of 32 tokens can be used: the long answer begins with 7, a promised request takes 15.
FIELDS: dict[str, Any] = {
    "controller": PATIENT,
    "engine": {
        "grammar_check_s": 0,
        "vllm_args": {
            "max-model-len": 600,
            "max-num-batched-tokens": 256,
            "num-gpu-blocks-override": 22,
            "block-size": 32,
            # Tokens that are computed again come out of other batches: in 16 bits the two best of
            # a random model's tokens are too often as good as equal.
            "dtype": "float32",
        },
    },
    "replica": {"count": 1},
    "router": ASKING,
}


_EVICTIONS = "sluice_best_effort_evictions_total"


def _prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300, 1000) for _ in range(length)]


LONG = {
    "model": "local",
    "prompt": _prompt(1, 200),
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "slo": {"class": "batch"},
}
PROMISED = [
    {
        "model": "local",
        "prompt": _prompt(10 + n, 450),
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "slo": {"ttft_ms": 30_000, "tpot_ms": 5_000, "priority": 2},
    }
    for n in range(2)
]


def test_a_best_effort_stream_survives_promised_work(tmp_path: Path) -> None:
    engine = {**FIELDS["engine"], "latency_profile": str(known_profile(tmp_path))}
    with system({**FIELDS, "engine": engine}) as serving:
        alone, _ = _stream(serving, lambda: None)
        before = _evictions(serving)
        answers: list[httpx.Response] = []
        disturbed, headers = _stream(serving, lambda: answers.extend(_promised(serving)))
        # Replicas push what they counted every second.
        wait_until(lambda: _evictions(serving) > before, "the long request was evicted")
    assert headers["x-sluice-admission"] == "best-effort"
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert float(answer.headers["x-sluice-predicted-ttft-ms"]) > 0
    assert len(answers) == len(PROMISED)
    assert disturbed == alone


def _stream(serving: System, when_begun: Callable[[], None]) -> tuple[str, httpx.Headers]:
    """The text of the long answer and its headers; ``when_begun`` is called after ten chunks, while
    the stream is open."""
    text, chunks, done = "", 0, False
    url = f"{serving.url}/v1/completions"
    with httpx.stream("POST", url, json=LONG, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            chunks += 1
            if chunks == 10:
                when_begun()
    assert done
    return text, answer.headers


def _promised(serving: System) -> list[httpx.Response]:
    """Answers of the promised requests, one after the other: the memory holds one at a time."""
    url, answers = f"{serving.url}/v1/completions", []
    for body in PROMISED:
        answers.append(httpx.post(url, json=body, timeout=120))
        # The controller hears a moment later that its memory is free.
        wait_until(lambda: _requests(serving) <= 1, "only the long request is left")
    return answers


def _requests(serving: System) -> int:
    """At the replicas, as the controller knows."""
    return sum(each["waiting"] + each["running"] for each in serving.snapshot()["replicas"])


def _evictions(serving: System) -> float:
    """What the metrics page says of the whole fleet."""
    page = httpx.get(f"{serving.url}/metrics", timeout=120).text
    lines = [line for line in page.splitlines() if line.startswith(_EVICTIONS)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
