"""The disk with the batches is full while one of them runs. Needs root, to mount a small disk."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import OpenAI
from openai.types import Batch

from sluice.benchmarks.live.client import AnswerCheck, simulated
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.replicas import FLEET
from tests.faults.scenario import RECOVERY_S, Scenario, Setting, Trial

LINES = 1500
_DISK = "4m"
"""The end of a batch needs its results twice, in the state and in a file."""
_CHUNK = 4096


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder that is a disk of its own. Raises OSError, CalledProcessError."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "sluice", folder],
            check=True,
            capture_output=True,
        )
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@cache
def can_mount() -> bool:
    """Whether a disk can be mounted here."""
    try:
        with small_disk():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class DiskSetting(Setting):
    """The fleet with its batches on a small disk."""

    @contextmanager
    def open(self) -> Iterator[Trial]:
        with small_disk() as folder:
            # Batches would wait for this much space and never meet a full disk.
            batches = {"directory": str(folder / "batches"), "min_free_bytes": 0}
            fields = {**self.fields, "router": {**self.fields["router"], "batches": batches}}
            with Setting(fields).open() as trial:
                yield trial


def disk_full(trial: Trial) -> Callable[[], bool]:
    """A full disk delays a batch; with space again each of its lines has one result."""
    folder = trial.config.router.batches.directory
    assert folder is not None
    bodies = {
        str(n): {"model": trial.model, "prompt": f"line {n}", "max_tokens": 1 + n % 20}
        for n in range(LINES)
    }
    client = OpenAI(base_url=f"{trial.url}/v1", api_key="none")
    trial.undo.callback(client.close)
    batch = _submit(client, bodies)

    def answered() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    wait_until(lambda: answered() > 0, "the batch has begun")
    filler = folder / "filler"
    trial.undo.callback(filler.unlink, missing_ok=True)
    wait_until(lambda: _fill(filler) and _put_off(trial), "the disk is full", every_s=0.1)
    had = answered()
    assert 0 < had < LINES, f"{had} lines of {LINES} were answered: not in mid-batch"
    filler.unlink()

    def completed() -> bool:
        found = client.batches.retrieve(batch.id)
        assert found.status in ("in_progress", "finalizing", "completed"), found
        return found.status == "completed"

    wait_until(completed, "the batch is completed", RECOVERY_S, every_s=0.2)
    _check(client, batch, bodies)
    return lambda: True


def _submit(client: OpenAI, bodies: dict[str, dict[str, Any]]) -> Batch:
    where = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": name, **where, "body": body} for name, body in bodies.items()]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", text), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def _fill(path: Path) -> bool:
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(_CHUNK))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return True


def _put_off(trial: Trial) -> bool:
    return trial.metrics().get("sluice_batches_put_off_total", 0) > 0


def _check(client: OpenAI, batch: Batch, bodies: dict[str, dict[str, Any]]) -> None:
    ended = client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None and ended.error_file_id is None, ended
    output = client.files.content(ended.output_file_id).content
    results = [json.loads(line) for line in output.splitlines()]
    assert sorted(each["custom_id"] for each in results) == sorted(bodies)
    for each in results:
        assert each["response"]["status_code"] == 200, each
        expected = simulated("completions", bodies[each["custom_id"]])
        AnswerCheck(expected).whole(json.dumps(each["response"]["body"]).encode())


DISK = DiskSetting({**FLEET.fields, "name": "disk-faults"})

SCENARIOS = (
    Scenario(
        "disk full in mid-batch",
        DISK,
        disk_full,
        Load(rate=2.0),
        longer_s=40.0,
        quick=False,
        missing=lambda: "" if can_mount() else "no disk can be mounted here, which needs root",
    ),
)
