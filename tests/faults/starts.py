"""A part of a second ``sluice serve`` dies or hangs at its start: nothing is left of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e.test_start_faults import start
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Trial


def part_killed(trial: Trial, part: str, moment: str) -> Callable[[], bool]:
    """``part`` ends when ``moment`` is there."""
    trial.busiest(2)
    with TemporaryDirectory() as folder, start(Path(folder)) as it:
        it.end_by_death(part, moment)
    return lambda: True


def part_frozen(trial: Trial, part: str, moment: str) -> Callable[[], bool]:
    """``part`` stands still when ``moment`` is there, and then SIGTERM comes."""
    trial.busiest(2)
    with TemporaryDirectory() as folder, start(Path(folder)) as it:
        it.end_by_signal(part, moment, signal.SIGTERM)
    return lambda: True


SCENARIOS = tuple(
    Scenario(
        f"start: {part} {what}",
        FLEET,
        partial(injure, part=part, moment=moment),
        planned=True,
        quick=False,
    )
    for part, moment in (
        ("driver", "driver"),
        ("gcs_server", "Serve controller"),
        ("raylet", "replica"),
        ("Serve controller", "Serve controller"),
        ("controller", "controller"),
        ("observer", "observer"),
        ("replica", "replica"),
        ("router", "router"),
    )
    for what, injure in (("killed", part_killed), ("frozen, SIGTERM", part_frozen))
)
