"""A best-effort stream whose memory promised requests take ends with the undisturbed text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.conftest import System, wait_until

BLOCKS = 136
"""KV blocks of 32 tokens: the long answer begins with 63, a promised request takes 95."""

_EVICTIONS = "sluice_best_effort_evictions_total"


def _prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300, 1000) for _ in range(length)]


LONG = {
    "model": "local",
    "prompt": _prompt(1, 2000),
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "slo": {"class": "batch"},
}
PROMISED = [
    {
        "model": "local",
        "prompt": _prompt(10 + n, 3000),
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "slo": {"ttft_ms": 30_000, "tpot_ms": 5_000, "priority": 2},
    }
    for n in range(2)
]


def check_best_effort(serving: System) -> None:
    """The long request is evicted, and its client does not notice."""
    alone, _ = _stream(serving, lambda: None)
    before = serving.value(_EVICTIONS)
    answers: list[httpx.Response] = []
    disturbed, headers = _stream(serving, lambda: answers.extend(_promised(serving)))
    # Replicas push what they counted every second.
    wait_until(lambda: serving.value(_EVICTIONS) > before, "the long request was evicted")
    assert headers["x-sluice-admission"] == "best-effort"
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert float(answer.headers["x-sluice-predicted-ttft-ms"]) > 0
    assert len(answers) == len(PROMISED)
    assert disturbed == alone


def _stream(serving: System, when_begun: Callable[[], None]) -> tuple[str, httpx.Headers]:
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
    url, answers = f"{serving.url}/v1/completions", []
    for body in PROMISED:
        answers.append(httpx.post(url, json=body, timeout=120))
        # The controller hears a moment later that its memory is free.
        wait_until(lambda: serving.live() <= 1, "only the long request is left")
    return answers
