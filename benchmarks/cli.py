"""``sluice bench``: measurements and experiments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sluice.benchmarks.experiments import EXPERIMENTS
from sluice.benchmarks.experiments.grid import Experiment, Plan, Row, Scale, measured
from sluice.benchmarks.live.gateway.command import gateway
from sluice.benchmarks.live.overload import overload
from sluice.benchmarks.live.preemption.command import preemption
from sluice.benchmarks.live.preemption.whole_stack import preemption_replay
from sluice.benchmarks.live.promises.command import with_real
from sluice.benchmarks.live.replay.command import replay
from sluice.benchmarks.live.soak.command import soak
from sluice.benchmarks.live.speculation.command import speculation
from sluice.benchmarks.micro import planning
from sluice.benchmarks.micro.decision import decision
from sluice.deploy.tables import print_table
from sluice.simulation.estimate import METHOD
from sluice.simulation.planning.plots import Report, ReportError, require_matplotlib
from sluice.simulation.workloads.traces import TraceError

MOST_SEEDS = 1_000
MOST_JOBS = 256


@click.group(name="bench", context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure policies, and repeat the papers' experiments in the simulator."""


@bench.command(name="list")
def list_experiments() -> None:
    """List the experiments with the question that each answers.

    \b
    Example:
      sluice bench list
    """
    table = Table("experiment", "source", "question")
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.source, experiment.question)
    print_table(table)


bench.add_command(planning.planning)
bench.add_command(decision)
bench.add_command(gateway)
bench.add_command(overload)
bench.add_command(preemption)
bench.add_command(preemption_replay)
bench.add_command(replay)
bench.add_command(soak)
bench.add_command(speculation)


def report_of(
    experiment: Experiment, plan: Plan, jobs: int, progress: Progress, command: str
) -> Report:
    """Run an experiment."""
    cells = experiment.cells(plan)
    task = progress.add_task(experiment.name, total=len(cells) * len(plan.seeds))
    rows: list[Row] = []
    for row in measured(cells, plan.seeds, jobs):
        rows.append(row)
        progress.advance(task)
    tables, charts = experiment.findings(rows)
    return Report(
        experiment.name,
        experiment.source,
        experiment.question,
        experiment.setting,
        METHOD,
        command,
        tables,
        charts,
        rows,
    )


def _run(
    experiment: Experiment,
    seeds: int,
    first_seed: int,
    scale: Scale,
    traces: Path | None,
    out: Path | None,
    as_json: bool,
    plots: bool,
    jobs: int,
) -> None:
    plan = Plan(scale, tuple(range(first_seed, first_seed + seeds)), traces)
    command = f"sluice bench {experiment.name} --scale {scale} --seeds {seeds}"
    command += f" --first-seed {first_seed}" + (" --traces DIR" if traces is not None else "")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        if out is not None and plots:
            require_matplotlib()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            report = report_of(experiment, plan, jobs, progress, command)
        written = report.write(out, plots) if out is not None else []
    except (ReportError, TraceError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(report.as_json())
        return
    report.show()
    for path in written:
        click.echo(f"wrote {path}", err=True)


def _command(experiment: Experiment) -> click.Command:
    def callback(**options: Any) -> None:
        _run(experiment, **options)

    folder = click.Path(file_okay=False, path_type=Path)
    existing = click.Path(file_okay=False, exists=True, path_type=Path)
    options: list[click.Parameter] = [
        click.Option(
            ["--seeds"],
            default=experiment.seeds,
            show_default=True,
            type=click.IntRange(1, MOST_SEEDS),
            help="How often each cell runs.",
        ),
        click.Option(
            ["--first-seed"],
            default=1_000,
            show_default=True,
            type=click.IntRange(0, 2**31),
            help="Seeds count up from here.",
        ),
        click.Option(
            ["--scale"],
            default="normal",
            show_default=True,
            type=click.Choice(get_args(Scale)),
            help="quick: seconds, a smoke test; normal: minutes; full: longer.",
        ),
        click.Option(["--traces"], type=existing, help="Folder of recorded traces to add."),
        click.Option(["--out"], type=folder, help="Folder for JSON, Markdown and plots."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of tables."),
        click.Option(["--plots/--no-plots"], default=True, help="Draw plots into --out."),
        click.Option(
            ["--jobs"],
            default=min(os.cpu_count() or 1, MOST_JOBS),
            show_default="processors",
            type=click.IntRange(1, MOST_JOBS),
            help="Processes.",
        ),
    ]
    words = [experiment.question, f"Source: {experiment.source}."]
    words += [f"{what}: {text}." for what, text in experiment.setting.items()]
    words += [f"\b\nExample:\n  sluice bench {experiment.name} --scale quick"]
    return click.Command(
        experiment.name,
        callback=callback,
        params=options,
        help="\n\n".join(words),
        short_help=experiment.question,
    )


for _experiment in EXPERIMENTS.values():
    bench.add_command(_command(_experiment))
with_real(bench.commands["promises"])
