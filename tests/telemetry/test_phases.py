from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.telemetry.phases import FILE_VARIABLE, Phases, phase, phase_detail


def words(line: str) -> str:
    """A line without its times."""
    return line.partition(" s  ")[2].rpartition(",")[0]


def test_phases_of_all_processes_are_shown_once_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "phases"
    found = Phases(path, zero_s=0.0)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with phase("outer"):
        code = "from sluice.telemetry.phases import phase\nwith phase('other'): pass"
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
        assert [words(str(ended)) for ended in found.news()] == ["other"]
        assert (found.unfinished(), found.running()) == ("outer", "outer")
        phase_detail("outer", "1 of 2")
        assert (found.news(), found.running(), found.unfinished()) == ([], "outer 1 of 2", "outer")
    assert [words(str(ended)) for ended in found.news()] == ["outer"]
    phase_detail("outer", "2 of 2")  # of a thread that was late
    assert (found.news(), found.running(), found.unfinished()) == ([], "", "")
    found.close()


def test_a_phase_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "phases"
    found = Phases(path, zero_s=0.0)
    monkeypatch.setenv(FILE_VARIABLE, str(path))

    @phase("inner")
    def fail() -> None:
        raise ValueError

    with phase("outer"), pytest.raises(ValueError), phase("middle"):
        fail()
    assert [words(str(ended)) for ended in found.news()] == [
        "inner failed",
        "middle failed",
        "outer",
    ]
    assert found.unfinished() == "inner; middle"
    assert (found.running(), found.failed_in()) == ("", {os.getpid()})
    found.close()


def test_a_phase_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    with phase("alone"):
        pass
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "gone" / "phases"))
    with phase("after the end of the folder"):
        pass
