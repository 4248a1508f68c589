from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.commands import admin
from sluice.deploy.commands.options import Exit
from sluice.deploy.local import LocalRun, local_runs, noted

KEPT = LocalRun(address="http://127.0.0.1:8123", key="a-key")
KILLED = """
import os, signal
from sluice.deploy.local import LocalRun, noted
with noted(LocalRun(address="http://127.0.0.1:8124", key="old")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "sluice"


def test_a_run_is_found_while_it_lasts_by_its_user_only(state: Path) -> None:
    assert local_runs() == []
    with noted(KEPT):
        assert local_runs() == [KEPT]
        (note,) = state.iterdir()
        assert note.stat().st_mode & 0o777 == 0o600
        assert state.stat().st_mode & 0o777 == 0o700
        note.chmod(0o644)  # somebody else may have written or read it
        assert local_runs() == []
    assert list(state.iterdir()) == []


def test_the_note_of_a_killed_run_is_removed(state: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False, env=dict(os.environ))
    assert len(list(state.iterdir())) == 1
    assert local_runs() == []
    assert list(state.iterdir()) == []


def test_a_note_that_says_something_else_is_left_out(state: Path) -> None:
    with noted(KEPT):
        (note,) = state.iterdir()
        note.write_text(json.dumps({"address": 8123}))
        assert local_runs() == []


def test_a_folder_that_cannot_be_written_keeps_nothing_from_being_served(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no-such-folder")
    with noted(KEPT):
        assert local_runs() == []


class Asked:
    """In place of a server: what it is asked with."""

    given: tuple[str, str | None] = ("", None)

    def __init__(self, address: str, key: str | None) -> None:
        type(self).given = (address, key)
        self.address = address

    def ask(self, *_: object) -> object:
        return {}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], (KEPT.address, "a-key")),
        (["--address", "http://localhost:8123"], ("http://localhost:8123", "a-key")),
        (["--key", "mine"], (KEPT.address, "mine")),
        (["--address", "http://elsewhere:8123"], ("http://elsewhere:8123", None)),
    ],
)
def test_commands_find_the_address_and_the_key_of_this_users_run_only(
    words: list[str], given: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "JsonServer", Asked)
    for name in ("SLUICE_ADDRESS", "SLUICE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with noted(KEPT):
        CliRunner().invoke(main, ["status", *words])
    assert Asked.given == given


def test_of_several_runs_the_user_has_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    other = LocalRun(address="http://127.0.0.1:8125", key=None)
    monkeypatch.setattr(admin, "local_runs", lambda: [KEPT, other])
    monkeypatch.delenv("SLUICE_ADDRESS", raising=False)
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == Exit.USAGE
    assert KEPT.address in result.output and other.address in result.output
