"""What the commands share: their options, and how they show what they found."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from sluice.deploy.tables import print_table

# Calls of one function in several processes.

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def in_processes(
    function: Callable[[T], R], jobs: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Apply ``function`` to values in ``jobs`` processes, and yield in order. What has not begun
    when the block is left never begins."""
    if jobs == 1:
        yield partial(map, function)
        return
    # Forked processes would inherit threads; new ones load the compiled loops from their cache.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            yield partial(pool.map, function)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Command], Command]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
"""The option ``--json``; see :func:`show`."""


class NumberRange(click.FloatRange):
    """A float within bounds; click's own lets nan pass, as it is below and above nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number of an option's text."""
        number = float(super().convert(value, param, ctx))
        if isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def number_option(
    *names: str, default: Any, least: Any, most: Any, words: str = "", **more: Any
) -> Option[Any]:
    """An option for a number from ``least`` to ``most``, whole if these and the default are."""
    sample = default[0] if isinstance(default, tuple) else default
    whole = isinstance(least, int) and isinstance(sample, int | None)
    kind: Any = click.IntRange(least, most) if whole else NumberRange(least, most)
    more = {"show_default": default is not None, **more}
    return click.option(*names, default=default, type=kind, help=words or None, **more)


def choices_option(*names: str, of: Iterable[str], words: str) -> Option[Any]:
    """A repeatable option that takes names ``of`` these; ``words`` are its help."""
    return click.option(*names, multiple=True, type=click.Choice(sorted(of)), help=words)


def with_real(
    command: click.Command, measure: Callable[..., None], options: Sequence[Option[Any]]
) -> None:
    """Let the command of a simulated experiment run ``measure`` on real engines. ``options``:
    ``--real``, and what else ``measure`` takes beside ``seeds`` and ``as_json``."""
    simulated = command.callback
    assert simulated is not None

    def callback(real: bool, **given: Any) -> None:
        own = {name: given.pop(name) for name in names - {"real"}}
        if real:
            seeds = range(given["first_seed"], given["first_seed"] + given["seeds"])
            measure(**own, seeds=seeds, as_json=given["as_json"])
        else:
            simulated(**given)

    known = len(command.params)
    for option in options:
        option(command)
    names = {param.name for param in command.params[known:]}
    command.callback = callback


folder = partial(click.Path, file_okay=False, path_type=Path)
"""The type of an option that takes a folder."""


seed = number_option("--seed", default=1, least=0, most=2**31, words="Of everything that is drawn.")
"""The option ``--seed``."""


def show(found: Any, tables: Iterable[Table], json_wanted: bool, *lines: str) -> None:
    """Print ``found`` as JSON, or else ``lines`` and ``tables``, which are made only then."""
    if json_wanted:
        click.echo(json.dumps(found, indent=2))
        return
    for line in lines:
        click.echo(line)
    for table in tables:
        print_table(table)
