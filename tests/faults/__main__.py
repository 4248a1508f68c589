"""Runs scenarios at length and prints the table. Exit status 1 if anything stated does not hold."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import pytest
from rich.console import Console

from sluice.deploy import ray_start
from sluice.replica.private_dir import make_private_dir

if TYPE_CHECKING:
    from tests.faults.scenario import Row, Scenario, Setting

_ROOT = Path(__file__).parents[2]


@click.command(name="faults")
@click.option("--scenario", "names", multiple=True, help="Run only these.  [default: all]")
@click.option("--list", "listed", is_flag=True, help="List the scenarios and end.")
@click.option("--quick", is_flag=True, help="Loads of a few seconds, as in the tests.")
@click.option("--repeat", type=click.IntRange(1), default=1, help="Run each so many times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def faults(names: tuple[str, ...], listed: bool, quick: bool, repeat: int, as_json: bool) -> None:
    """Break parts of a running system under load, and say what became of each request."""
    signal.signal(signal.SIGTERM, _end)
    folder = make_private_dir()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Ray reads its environment on import.
    # As in the tests: nodes have addresses that others reach, and workers import the tests.
    os.environ.update(
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1", PYTHONSAFEPATH="", PYTHONPATH=str(_ROOT)
    )
    ray_start.apply(folder)
    from tests.faults.catalogue import SCENARIOS
    from tests.faults.table import machine, table

    known = {each.name: each for each in SCENARIOS}
    if listed:
        click.echo("\n".join(known))
        return
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise click.UsageError(f"no such scenario: {', '.join(unknown)}; see --list")
    chosen = [known[name] for name in names or known]
    for each in list(chosen):
        if why := each.missing():
            click.echo(f"left out: {each.name}: {why}", err=True)
            chosen.remove(each)
    rows, bad = _run(chosen, quick, repeat)
    if as_json:
        plain = [dataclasses.asdict(row) for row in rows]
        click.echo(json.dumps({"machine": machine(), "rows": plain}, indent=2))
    else:
        console = Console()
        console.print(table(rows))
        console.print(machine())
    bad += [f"{row.name}: {problem}" for row in rows for problem in row.problems]
    click.echo("".join(f"{line}\n" for line in bad), err=True, nl=False)
    raise SystemExit(bool(bad))


def _end(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _run(scenarios: list[Scenario], quick: bool, repeat: int) -> tuple[list[Row], list[str]]:
    from tests.faults.scenario import FULL, QUICK, run

    say = Console(stderr=True).print
    rows: dict[str, list[Row]] = {each.name: [] for each in scenarios}
    broken = []
    # Ray's own messages must not stand between the lines of the JSON.
    with redirect_stdout(sys.stderr):
        for setting in settings_of(scenarios):
            with setting.open() as trial:
                try:
                    for each in (each for each in scenarios for _ in range(repeat)):
                        if each.setting is setting:
                            rows[each.name].append(run(trial, each, QUICK if quick else FULL))
                            say(rows[each.name][-1])
                except (pytest.fail.Exception, AssertionError) as error:
                    broken.append(f"{each.name}: {type(error).__name__} {error}")
                    say(broken[-1])
    return [row for each in scenarios for row in rows[each.name]], broken


def settings_of(scenarios: Sequence[Scenario]) -> list[Setting]:
    """Each setting once, in the order of its first scenario."""
    return list({id(each.setting): each.setting for each in scenarios}.values())


if __name__ == "__main__":
    faults()
