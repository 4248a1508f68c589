"""One objective from the wire to the engine's next batch: an urgent request behind long prefills.

Judged by the engine's own log of batches, by order and tokens, so the machine's speed is no part of
it.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import PATIENT, System, system, wait_until
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

_LONG = 5
_LONG_TEXT = "the of and to in a is that for it as was with be by on not he this are " * 75
_BATCH_TOKENS = 512

Batch = dict[str, Any]


def test_an_urgent_request_passes_long_prefills(tmp_path: Path) -> None:
    fields = {
        "engine": {
            "policy": "slidebatching",
            "batch_log": str(tmp_path / "batches"),
            "latency_profile": str(known_profile(tmp_path)),
            "grammar_check_s": 0,
            "vllm_args": {"max-model-len": 4096, "max-num-batched-tokens": _BATCH_TOKENS},
        },
        "replica": {"count": 1},
        # One tier for all: the order is the local policy's.
        "controller": {**PATIENT, "admission": "none"},
    }
    with system(fields) as serving:
        urgent = _run_load(serving)
    batches = _batches(tmp_path / "batches")
    first = next(n for n, batch in enumerate(batches) if urgent in _tokens(batch))
    before, after = batches[:first], batches[first:]
    long_before = _prefill_tokens(before, urgent)
    long_after = _prefill_tokens(after, urgent)
    assert all(sum(_tokens(batch).values()) <= _BATCH_TOKENS for batch in batches)
    # First come, first served would have it wait until less than a batch of them is left.
    assert long_after > long_before, "it passed most of the prefill work that came before it"
    assert batches[first]["plan"][0][0] == urgent, "and leads the first batch that it is in"


def _run_load(serving: System) -> str:
    """Send long prefills without an objective, then an urgent request; its id."""
    long_body = {"model": "local", "max_tokens": 1, "slo": {"class": "batch"}}
    urgent_body = {
        "model": "local",
        "prompt": "one two three",
        "max_tokens": 2,
        "slo": {"ttft_ms": 1000, "tpot_ms": 200, "priority": 10},
    }

    def send_long(number: int) -> None:
        # Each starts differently, so that none finds another's prefix in the cache.
        body = {**long_body, "prompt": f"{number} {_LONG_TEXT}"}
        answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    threads = [threading.Thread(target=send_long, args=(n,)) for n in range(_LONG)]
    for thread in threads:
        thread.start()
    wait_until(lambda: serving.live() == _LONG, "all long prefills are in the engine")
    answer = httpx.post(f"{serving.url}/v1/completions", json=urgent_body, timeout=120)
    for thread in threads:
        thread.join()
    assert answer.status_code == 200, answer.text
    return answer.headers["x-sluice-request-id"]


def _batches(directory: Path) -> list[Batch]:
    """The logged batches from the first of the load on, without those of the start."""
    (path,) = directory.glob("*.jsonl")
    batches: list[Batch] = [json.loads(line) for line in path.read_text().splitlines()]
    long = [n for n, batch in enumerate(batches) if batch["live"] >= 1 and _is_load(batch)]
    return batches[long[0] :]


def _is_load(batch: Batch) -> bool:
    return any(not name.startswith(("profile-", "warm-up-")) for name in _tokens(batch))


def _tokens(batch: Batch) -> dict[str, int]:
    return {name: tokens for name, tokens, _ in batch["ran"]}


def _prefill_tokens(batches: list[Batch], urgent: str) -> int:
    """Tokens of the long prompts that these batches ran."""
    return sum(
        tokens for batch in batches for name, tokens in _tokens(batch).items() if name != urgent
    )
