"""Logs of records in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.telemetry import records
from sluice.telemetry.records import RecordLog


@pytest.mark.parametrize(("limit", "value"), [("MAX_RECORDS", 3), ("MAX_RECORD_BYTES", 27)])
def test_a_log_ends_at_the_first_of_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(records, limit, value)
    log = RecordLog(tmp_path / "new" / "log")
    for number in range(9):
        log.write({"number": number})
    lines = (tmp_path / "new" / "log").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
