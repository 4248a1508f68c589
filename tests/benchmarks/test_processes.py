"""What is measured in a process of its own."""

from __future__ import annotations

import os
import signal
import threading

import click
import pytest

from sluice.benchmarks.live.processes import in_own_process
from sluice.deploy.local import stop_signals

_VARIABLE = "SLUICE_TEST_OWN_PROCESS"


def _set(value: str) -> tuple[str | None, int]:
    earlier = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = value
    return earlier, os.getpid()


def _refuse(why: str) -> None:
    raise click.ClickException(why)


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_its_end(parent: int) -> str:
    with stop_signals() as stop:
        os.kill(parent, signal.SIGTERM)
        assert stop.wait(60), "no signal came"
        return "stopped"


def test_no_settings_of_one_are_left_for_the_next() -> None:
    found = [in_own_process(_set, value) for value in "ab"]
    assert [earlier for earlier, _ in found] == [None, None]
    assert len({os.getpid(), *(pid for _, pid in found)}) == 3
    assert _VARIABLE not in os.environ


def test_its_errors_are_errors_here() -> None:
    with pytest.raises(click.ClickException, match="no request ended"):
        in_own_process(_refuse, "no request ended")
    with pytest.raises(click.Abort):
        in_own_process(_kill_itself)


def test_it_is_stopped_with_this_one_and_its_result_is_kept() -> None:
    assert threading.current_thread() is threading.main_thread()
    assert in_own_process(_wait_for_its_end, os.getpid()) == "stopped"
