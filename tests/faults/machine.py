"""``sluice serve`` ends under load: a process of Ray dies, or it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from sluice.deploy.commands.options import Exit
from sluice.deploy.ray_start import free_port
from tests.e2e.command import ServeCommand
from tests.e2e.conftest import wait_until
from tests.e2e.test_serve_command import runs
from tests.e2e.test_serve_drain import COMPLETION, Stream, expect_refusal
from tests.faults.load import Load
from tests.faults.operators import ADMIN, OperatorTrial
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Setting, Trial
from tests.processes import the_one, title_of

DRAIN_S = 10
"""For how long running requests may go on after SIGTERM, seconds."""

IN_TIME, TOO_LATE = 200, 2_000
"""Tokens of a stream that ends within :data:`DRAIN_S`, and of one that does not."""


class CommandTrial(OperatorTrial):
    """``sluice serve`` as a process of its own."""

    def __init__(self, fields: dict[str, Any], folder: Path) -> None:
        super().__init__(fields, f"http://127.0.0.1:{fields['router']['port']}")
        self.command = ServeCommand(fields, folder, "--drain-seconds", str(DRAIN_S))

    def routers(self) -> int:
        begins = f"ray::ServeReplica:{self.app}:Router"
        found = 0
        for each in self.command.family():
            found += title_of(each).startswith(begins)
        return found


class CommandSetting(Setting):
    """The fleet as the command serves it."""

    @contextmanager
    def open(self) -> Iterator[Trial]:
        fields = {**self.fields, "router": {**self.fields["router"], "port": free_port()}}
        with TemporaryDirectory() as folder:
            trial = CommandTrial(fields, Path(folder))
            try:
                yield trial
            finally:
                trial.command.kill()


COMMAND = CommandSetting({**FLEET.fields, "router": {**FLEET.fields["router"], "admin": ADMIN}})


def raylet_killed(trial: Trial) -> Callable[[], bool]:
    """The process that starts Ray's workers ends."""
    return _killed(trial, "raylet")


def gcs_killed(trial: Trial) -> Callable[[], bool]:
    """The process that knows Ray's actors ends."""
    return _killed(trial, "gcs_server")


def _killed(trial: Trial, name: str) -> Callable[[], bool]:
    assert isinstance(trial, CommandTrial)
    trial.busiest(2)
    command = trial.command
    family = command.family()
    the_one(family, name).kill()
    _ended(command, family)
    assert command.process.returncode not in (None, 0)
    assert f"Error: {name} has ended" in command.log(), command.log()
    command.start_again()
    return lambda: True


def _ended(command: ServeCommand, family: list[psutil.Process]) -> None:
    wait_until(lambda: command.process.poll() is not None, "the command ends", show=command.log)
    wait_until(lambda: not any(map(runs, family)), "every process ends", show=lambda: family)


@contextmanager
def _stopped(trial: Trial, tokens: int) -> Iterator[tuple[ServeCommand, Stream]]:
    assert isinstance(trial, CommandTrial)
    trial.busiest(2)
    command, family = trial.command, trial.command.family()
    with ThreadPoolExecutor(1) as pool:
        asked = {"model": trial.model, "max_tokens": tokens, **COMPLETION}
        stream = Stream(pool, trial.url, "/v1/completions", **asked)
        stream.wait_begun()
        command.process.send_signal(signal.SIGTERM)
        yield command, stream
    _ended(command, family)
    assert command.process.returncode == Exit.OK, command.log()
    command.start_again()


def stopped_in_time(trial: Trial) -> Callable[[], bool]:
    """Running streams end; new requests are refused meanwhile."""
    with _stopped(trial, IN_TIME) as (_, stream):
        expect_refusal(trial.url, trial.model)
        stream.expect_whole()
    return lambda: True


def stopped_too_late(trial: Trial) -> Callable[[], bool]:
    """Streams that are longer than the drain end in an error event."""
    with _stopped(trial, TOO_LATE) as (_, stream):
        stream.expect_error()
    return lambda: True


def stopped_twice(trial: Trial) -> Callable[[], bool]:
    """A second signal ends the drain, and with it the connections."""
    with _stopped(trial, TOO_LATE) as (command, stream):
        wait_until(lambda: "stopping" in command.log(), "it stops", show=command.log)
        command.process.send_signal(signal.SIGTERM)
        stream.expect_cut()
    return lambda: True


_LONG = Load(rate=2.0, output_tokens=(600, 800))

SCENARIOS = (
    *(
        Scenario(
            name,
            COMMAND,
            injure,
            may_fail=True,
            may_refuse=True,
            forgets=True,
            longer_s=60.0,
            quick=False,
        )
        for name, injure in (("raylet killed", raylet_killed), ("GCS killed", gcs_killed))
    ),
    *(
        Scenario(
            name,
            COMMAND,
            injure,
            load,
            may_fail=True,
            may_refuse=True,
            planned=planned,
            forgets=True,
            longer_s=30.0,
            quick=False,
        )
        for name, injure, load, planned in (
            ("SIGTERM, streams end in time", stopped_in_time, Load(), True),
            ("SIGTERM, streams too long to end", stopped_too_late, _LONG, True),
            ("SIGTERM twice", stopped_twice, _LONG, False),
        )
    ),
)
