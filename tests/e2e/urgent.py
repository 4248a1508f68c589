"""An urgent request behind long prefills, judged by order and tokens in the engine's batch log."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tests.e2e.conftest import System, wait_until

BATCH_TOKENS = 512
"""Of the engine."""

_LONG = 5
_LONG_TEXT = "the of and to in a is that for it as was with be by on not he this are " * 75
Batch = dict[str, Any]


def check_urgent(serving: System, log: Path) -> None:
    """By the log: it passes most of the prefill work before it, and leads its first batch."""
    urgent, long = _run_load(serving)
    logs = [path.read_text().splitlines() for path in log.glob("*.jsonl")]
    (lines,) = [lines for lines in logs if any(urgent in line for line in lines)]
    batches: list[Batch] = [json.loads(line) for line in lines]
    first = next(n for n, batch in enumerate(batches) if urgent in _tokens(batch))
    long_before = _sum_tokens(batches[:first], long)
    long_after = _sum_tokens(batches[first:], long)
    assert all(sum(_tokens(batch).values()) <= BATCH_TOKENS for batch in batches)
    # First come, first served would have it wait until less than a batch of them is left.
    assert long_after > long_before, "it passed most of the prefill work that came before it"
    assert batches[first]["plan"][0][0] == urgent, "and leads the first batch that it is in"


def _run_load(serving: System) -> tuple[str, set[str]]:
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
        answer = serving.post(body)
        assert answer.status_code == 200, answer.text
        ids.add(answer.headers["x-sluice-request-id"])

    ids: set[str] = set()
    threads = [threading.Thread(target=send_long, args=(n,)) for n in range(_LONG)]
    for thread in threads:
        thread.start()
    wait_until(lambda: serving.live() == _LONG, "all long prefills are in the engine")
    answer = serving.post(urgent_body)
    for thread in threads:
        thread.join()
    assert answer.status_code == 200, answer.text
    return answer.headers["x-sluice-request-id"], ids


def _tokens(batch: Batch) -> dict[str, int]:
    return {name: tokens for name, tokens, _ in batch["ran"]}


def _sum_tokens(batches: list[Batch], ids: set[str]) -> int:
    return sum(
        tokens for batch in batches for name, tokens in _tokens(batch).items() if name in ids
    )
