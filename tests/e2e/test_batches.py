"""A batch of requests through the official client, on real Ray Serve behind its proxy, with two
routers that share the folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.conftest import system, wait_until

pytestmark = pytest.mark.ray

LINES = 24


def test_a_batch_runs_behind_the_proxy(tmp_path: Path) -> None:
    fields = {
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 2},
        "router": {"replicas": 2, "batches": {"directory": str(tmp_path)}},
    }
    with system(fields) as serving, OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:
        file = client.files.create(file=("lines.jsonl", _lines()), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(
            lambda: client.batches.retrieve(made.id).status in ("completed", "failed"),
            "the batch ended",
            show=lambda: client.batches.retrieve(made.id),
        )
        ended = client.batches.retrieve(made.id)
        assert ended.status == "completed", ended
        assert ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (LINES, 0)
        assert ended.output_file_id is not None
        output = client.files.content(ended.output_file_id).text
    results = {each["custom_id"]: each for each in map(json.loads, output.splitlines())}
    assert results.keys() == {f"line-{n}" for n in range(LINES)}
    for n in range(LINES):
        response = results[f"line-{n}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 1 + n % 5


def _lines() -> io.BytesIO:
    lines = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "sim", "prompt": f"Number {n}.", "max_tokens": 1 + n % 5},
        }
        for n in range(LINES)
    ]
    return io.BytesIO("\n".join(map(json.dumps, lines)).encode())
