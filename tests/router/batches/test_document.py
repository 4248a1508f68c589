"""What docs/batches.md says is so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import yaml

from sluice.deploy.config import SluiceConfig
from sluice.router.batches.records import Status
from sluice.router.config import BatchesConfig
from tests.documents import ROOT, marked, rows, section
from tests.router.batches.routers import config, serving

DOCUMENT = ROOT / "docs" / "batches.md"


async def test_the_example_runs(tmp_path: Path) -> None:
    (script,) = marked(DOCUMENT, "run: python")
    async with serving(config(tmp_path)) as router:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script.replace("http://127.0.0.1:8000/v1", router.url),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    first, *lines = output.decode().splitlines()
    assert process.returncode == 0
    assert first.startswith("completed BatchRequestCounts(completed=3, failed=0, total=3")
    assert sorted(lines) == [f"question-{number} 200" for number in range(3)]


def test_the_configurations_are_accepted() -> None:
    folder, bucket = (
        SluiceConfig.model_validate(yaml.safe_load(text)).router.batches
        for text in marked(DOCUMENT, "check: config")
    )
    assert folder.directory == bucket.directory == Path("/var/lib/sluice/batches")
    assert (folder.url, bucket.url) == (None, "s3://bucket/sluice")


def test_every_status_is_told() -> None:
    assert set(rows(section(DOCUMENT, "What becomes of a batch"))) == {
        each.value for each in Status
    }


def test_the_limits_are_the_defaults() -> None:
    defaults = BatchesConfig().model_dump()
    told = {
        name: float(cells[0].replace(",", ""))
        for name, cells in rows(section(DOCUMENT, "Limits")).items()
    }
    assert told == {name: defaults[name] for name in told}
    others = {"directory", "url", "service_class", "completion_windows"}
    assert defaults.keys() - told.keys() == others
