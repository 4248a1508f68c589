from __future__ import annotations

import os
import pty
import pwd
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from sluice.deploy.config import SluiceConfig, parse_config
from sluice.deploy.progress import Progress
from sluice.deploy.supervisor import Supervised
from sluice.telemetry.phases import Ended, Phases

LOAD = Ended("engine: load the model", "", 9.0, 2.5)


def config(cache: Path, model: str = "m") -> SluiceConfig:
    return parse_config({"engine": {"kind": "simulated", "model": model, "cache_dir": str(cache)}})


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard error is a terminal in the block; a function reads what it has shown."""
    ours, its = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(its, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)

        def read() -> str:
            file.flush()
            shown = b""
            while select.select([ours], [], [], 0.2)[0]:  # it comes in parts
                shown += os.read(ours, 1 << 16)
            return shown.decode()

        yield read
    os.close(ours)


def start(progress: Progress, ready_s: float) -> None:
    progress.line("starting Ray")
    progress.show(1.0, "Ray: start")
    progress.phase(LOAD)
    progress.ready(ready_s)


def test_each_phase_is_a_line_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(Progress(config(tmp_path)), 14.2)
    assert capsys.readouterr().err.splitlines() == [
        "sluice: starting Ray",
        "sluice:   9.0 s  engine: load the model, 2.5 s",
        "sluice: started in 14 s",
    ]
    start(Progress(config(tmp_path)), 20.0)
    assert capsys.readouterr().err.endswith("started in 20 s, last start 14 s\n")
    start(Progress(config(tmp_path, model="other")), 3.0)
    assert capsys.readouterr().err.endswith("started in 3 s\n"), "the last start had another model"


def test_a_terminal_has_one_line_with_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(Progress(config(tmp_path)), 10.0)
    with terminal(monkeypatch) as read:
        progress = Progress(config(tmp_path))
        progress.show(5.0, "engine: load the model; " + "x" * 500)
        shown = read()
        assert "[##########..........] 5 of about 10 s  engine: load the model" in shown
        assert "\n" not in shown and len(shown) < 200
        progress.phase(LOAD)
        progress.doing("starting: replica 0/1")
        progress.show(30.0, "")
        assert read().endswith(f"[{'#' * 20}] 30 of about 10 s  starting: replica 0/1")
        progress.ready(31.0)
        assert re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", read()).splitlines() == [
            "sluice: started in 31 s, last start 10 s",
            "sluice: longest: engine: load the model 2.5 s",
        ]
        progress.phase(LOAD)  # of a further replica
        assert "engine: load the model, 2.5 s" in read()


def test_a_narrow_terminal_has_the_time_without_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(Progress(config(tmp_path)), 10.0)
    monkeypatch.setenv("COLUMNS", "20")
    with terminal(monkeypatch) as read:
        Progress(config(tmp_path)).show(5.0, "Ray: start")
        assert read() == "\r\x1b[K5 of about 10 s  Ra"


def test_a_line_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("files: [/tmp]/x", "install sluice-serve[otel] :warning:"):
        Progress(config(tmp_path)).line(text)
        assert capsys.readouterr().err == f"sluice: {text}\n"


@pytest.mark.parametrize("text", ["", "{", "[]", '["m", null]', '["m", "x"]', "3"])
def test_a_damaged_note_of_the_last_start_is_none(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last_start.json").write_text(text)
    start(Progress(config(tmp_path)), 1.0)
    assert capsys.readouterr().err.endswith("started in 1 s\n")


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    start(Progress(config(tmp_path / "file" / "cache")), 1.0)


def test_without_a_home_there_is_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    start(Progress(config(Path("~/cache"))), 1.0)
    assert capsys.readouterr().err.endswith("started in 1 s\n")
    assert list(tmp_path.iterdir()) == []


def test_of_a_long_log_of_a_failed_start_the_end_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "long.err").write_bytes(b"x" * (5 << 20) + b"why")
    (logs / "short.err").write_text("short")
    supervised = Supervised.__new__(Supervised)
    supervised._local_dir = tmp_path
    supervised._phases = Phases(tmp_path / "phases", 0.0)
    kept = supervised._keep_logs()
    assert kept is not None
    end = (kept / "long.err").read_bytes()
    assert len(end) == 4 << 20 and end.endswith(b"xwhy")
    assert (kept / "short.err").read_text() == "short"
