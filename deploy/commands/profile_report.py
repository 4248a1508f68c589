"""What ``sluice profile`` shows: progress, the fitted model with its errors, and a figure."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.tables import print_table
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.latency.step_errors import KINDS, StepErrors, kind_of

if TYPE_CHECKING:
    from sluice.scheduling.latency.model import StepSample

_FORMATS = (".png", ".pdf", ".svg")
_OTHERS = {
    "start": "the profile used so far",
    "without_context": "family linear without its terms of the context",
}
_COLOURS = dict(zip(KINDS, ("#2a6fbb", "#d1742f", "#3f9457"), strict=True))


@dataclass(frozen=True)
class Measured:
    """An engine's measured steps: ``swept`` are fitted, ``unseen`` evaluate the fit.

    ``key`` names what the engine's times depend on, and ``start`` is the profile that a replica of
    this configuration starts with today.
    """

    model: str
    policy: str
    key: str
    start: LatencyProfile
    swept: list[StepSample]
    unseen: list[StepSample]


@dataclass(frozen=True)
class Fitted:
    """A model fitted to a sweep, with its errors by kind of step."""

    profile: LatencyProfile
    in_sample: dict[str, StepErrors]
    out_of_sample: dict[str, StepErrors]
    others: dict[str, float]
    """Mean error out of sample of the other families, of ``linear`` ``without_context``, and of the
    profile of today (``start``)."""


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error. It yields a function to call with the current activity, the
    amount done and the total; a total of 0 is an unknown one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield report


def print_tables(measured: Measured, fitted: Fitted, kept: Path | None) -> None:
    """The report for people."""
    console = Console()
    model = fitted.profile.model
    dropped = fitted.profile.report.dropped if fitted.profile.report else 0
    say = console.print
    say(f"engine  {measured.model}, policy {measured.policy}", highlight=False)
    named = ", ".join(
        f"{name} = {value:.3g}" for name, value in zip(model.names, model.coefficients, strict=True)
    )
    say(f"model   {model.family}: {named} (seconds)", highlight=False)
    table = Table("steps", "number", "mean error", "median", "9 of 10 below", "bias")
    for title, errors in (("sweep", fitted.in_sample), ("unseen", fitted.out_of_sample)):
        for kind, entry in errors.items():
            table.add_row(f"{title}, {kind}", *_cells(entry))
        table.add_section()
    print_table(table, console)
    report = fitted.profile.report
    if report is not None and report.held_out is not None:
        say(f"mean error on steps of the sweep that were held out: {report.held_out:.1%}")
    say(f"The {dropped} worst steps of the sweep were left out of the fit, not of this table.")
    for name, mape in fitted.others.items():
        what = _OTHERS.get(name, f"family {name}")
        say(f"mean error on unseen steps of {what}: {mape:.1%}", highlight=False)
    if kept is None:
        say("Not kept: a simulated engine knows its own times. --out FILE writes it.")
    else:
        say(f"kept in {kept}", highlight=False, soft_wrap=True)


def _cells(errors: StepErrors) -> tuple[str, ...]:
    return (
        str(errors.steps),
        f"{errors.mape:.1%}",
        f"{errors.median:.1%}",
        f"{errors.p90:.1%}",
        f"{errors.bias:+.1%}",
    )


def print_json(measured: Measured, fitted: Fitted, kept: Path | None) -> None:
    """The same for scripts. Errors are shares, not percent."""
    model = fitted.profile.model

    def errors(entries: dict[str, StepErrors]) -> dict[str, Any]:
        return {kind: entry._asdict() for kind, entry in entries.items()}

    report = {
        "engine": measured.model,
        "policy": measured.policy,
        "family": model.family,
        "coefficients": dict(zip(model.names, model.coefficients, strict=True)),
        "in_sample": errors(fitted.in_sample),
        "out_of_sample": errors(fitted.out_of_sample),
        "out_of_sample_mape_of_others": fitted.others,
        "kept": None if kept is None else str(kept),
    }
    click.echo(json.dumps(report, indent=2))


def check_plot(path: Path) -> None:
    """Refuse a figure that could not be drawn.

    Raises:
        Failure: its format is unknown, or matplotlib is not there.
    """
    if path.suffix.lower() not in _FORMATS:
        raise Failure(Exit.USAGE, f"--plot must end in one of {', '.join(_FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure(Exit.FAILED, "--plot needs matplotlib: pip install 'sluice[bench]'")


def plot(
    path: Path,
    profile: LatencyProfile,
    swept: Sequence[StepSample],
    unseen: Sequence[StepSample],
) -> None:
    """Draw predicted against real step times, one panel for each set of steps.

    Raises:
        Failure: the file cannot be written.
    """
    from matplotlib.figure import Figure

    model = profile.model
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, title, steps in ((left, "fitted on", swept), (right, "unseen", unseen)):
        real = [1e3 * step.seconds for step in steps]
        predicted = [1e3 * model.step_s(step) for step in steps]
        ends = (min(real + predicted), max(real + predicted))
        axes.plot(ends, ends, color="0.5", linewidth=1, label="exact")
        axes.fill_between(
            ends,
            [0.9 * end for end in ends],
            [1.1 * end for end in ends],
            color="0.5",
            alpha=0.15,
            linewidth=0,
            label="within 10 %",
        )
        for kind in KINDS:
            chosen = [index for index, step in enumerate(steps) if kind_of(step) == kind]
            axes.scatter(
                [real[index] for index in chosen],
                [predicted[index] for index in chosen],
                s=14,
                alpha=0.6,
                color=_COLOURS[kind],
                edgecolors="none",
                label=f"{kind} ({len(chosen)})",
            )
        axes.set(xscale="log", yscale="log", xlabel="real step time, ms")
        axes.set_title(f"Steps {title} ({len(steps)})", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
    left.set_ylabel("predicted step time, ms")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise Failure(Exit.FAILED, f"cannot write {path}: {error.strerror}") from error
