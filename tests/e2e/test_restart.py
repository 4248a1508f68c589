from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from sluice.benchmarks.live.client import AnswerCheck, simulated
from sluice.deploy.ray_start import free_port
from sluice.router.batches.store import NAME
from tests.e2e.command import ServeCommand
from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]

LINES = 96
SLOW_STEP_S = 0.5
"""The first engine would need a minute for a batch, at eight lines at once and ten steps each."""

WAIT_S = 180.0


@contextmanager
def served(fields: dict[str, Any], folder: Path) -> Iterator[OpenAI]:
    """``sluice serve`` with a client of it, until the block ends; then all of it is killed."""
    command = ServeCommand(fields, folder)
    try:
        url = f"http://127.0.0.1:{fields['router']['port']}/v1"
        with OpenAI(base_url=url, api_key="none") as client:
            yield client
    finally:
        command.kill()


def test_batches_and_files_survive_a_restart_of_everything(tmp_path: Path) -> None:
    directory = tmp_path / "batches"
    fields = {
        "engine": {"kind": "simulated", "model": "sim", "simulated": {"step_s": SLOW_STEP_S}},
        "replica": {"count": 1},
        "router": {
            "port": free_port(),
            "replicas": 2,
            # Of three batches two run, one at each router, and one waits.
            "batches": {
                "directory": str(directory),
                "max_running": 1,
                "max_lines_in_flight": 8,
            },
        },
    }
    bodies = {
        name: [_body(f"{name}, number {n}.", 1 + n % 20) for n in range(LINES)] for name in "ABC"
    }
    inputs = {name: _lines(bodies[name]) for name in bodies}
    short = [_body("Before.", 1)]

    with served(fields, tmp_path) as client:
        ended = _submit(client, _lines(short))
        ended = _completed(client, ended)
        before = _output(client, ended)
        made = {name: _submit(client, inputs[name]) for name in inputs}

        def midway() -> bool:
            none, some, most = sorted(_answered(client, batch) for batch in made.values())
            return none == 0 and some > 0 and most < LINES

        wait_until(midway, "two are midway", WAIT_S, lambda: client.batches.list().data)

    written = {name: _written(directory, batch) for name, batch in made.items()}
    begun = [len(entries) for entries in written.values() if entries]
    assert len(begun) == 2 and max(begun) < LINES
    fields["engine"] = {"kind": "simulated", "model": "sim"}

    with served(fields, tmp_path) as client:
        assert _of(client, ended) == ended
        assert _output(client, ended) == before
        _check(before, short)
        for name, batch in made.items():
            done = _completed(client, batch)
            assert _answered(client, batch) == LINES
            assert done.error_file_id is None
            output = _output(client, done)
            assert output.startswith(b"".join(written[name])), "what was answered is not run again"
            _check(output, bodies[name])
            assert client.files.content(batch.input_file_id).content == inputs[name]
        assert len(client.files.list().data) == 2 * (len(made) + 1)


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": "sim", "prompt": prompt, "max_tokens": tokens}


def _lines(bodies: list[dict[str, Any]]) -> bytes:
    where = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(n), **where, "body": body} for n, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, lines)).encode()


def _submit(client: OpenAI, lines: bytes) -> Batch:
    file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def _of(client: OpenAI, batch: Batch) -> Batch:
    return client.batches.retrieve(batch.id)


def _completed(client: OpenAI, batch: Batch) -> Batch:
    ends = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: _of(client, batch).status in ends, f"{batch.id} ended", WAIT_S)
    ended = _of(client, batch)
    assert ended.status == "completed", ended
    return ended


def _answered(client: OpenAI, batch: Batch) -> int:
    counts = _of(client, batch).request_counts
    assert counts is not None and counts.failed == 0
    return counts.completed


def _output(client: OpenAI, batch: Batch) -> bytes:
    assert batch.output_file_id is not None
    return client.files.content(batch.output_file_id).content


def _written(directory: Path, batch: Batch) -> list[bytes]:
    with closing(sqlite3.connect(directory / NAME)) as state:
        query = "SELECT entry FROM results WHERE batch_id = ? ORDER BY n"
        return [entry for (entry,) in state.execute(query, (batch.id,))]


def _check(output: bytes, bodies: list[dict[str, Any]]) -> None:
    results = [json.loads(line) for line in output.splitlines()]
    assert sorted(int(each["custom_id"]) for each in results) == list(range(len(bodies)))
    for each in results:
        assert each["response"]["status_code"] == 200, each
        expected = simulated("completions", bodies[int(each["custom_id"])])
        AnswerCheck(expected).whole(json.dumps(each["response"]["body"]).encode())
