"""A process of Ray dies on the machine where ``sluice serve`` runs: all of the application ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from sluice.deploy.ray_settings import free_port
from tests.e2e.command import ServeCommand
from tests.e2e.conftest import wait_until
from tests.faults.operators import ADMIN, OperatorTrial
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Setting, Trial
from tests.processes import the_one, title_of


class CommandTrial(OperatorTrial):
    """``sluice serve`` as a process of its own."""

    def __init__(self, fields: dict[str, Any], folder: Path) -> None:
        super().__init__(fields, f"http://127.0.0.1:{fields['router']['port']}")
        self.command = ServeCommand(fields, folder)

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
    """The command says what has happened and fails, and none of its processes is left. Then it is
    started again."""
    assert isinstance(trial, CommandTrial)
    trial.busiest(2)
    command = trial.command
    family = command.family()
    the_one(family, name).kill()
    wait_until(lambda: command.process.poll() is not None, "the command ends", show=command.log)
    assert command.process.returncode not in (None, 0)
    assert f"Ray's process {name} has ended" in command.log(), command.log()
    wait_until(lambda: not any(map(_is_alive, family)), "every process ends", show=lambda: family)
    command.start_again()
    return lambda: True


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


SCENARIOS = tuple(
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
)
