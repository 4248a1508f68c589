"""``sluice bench``: measurements and experiments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.progress import track

from sluice.benchmarks.experiments import EXPERIMENTS
from sluice.benchmarks.experiments.grid import Experiment, Plan, Scale, measured
from sluice.benchmarks.live import agents, promises, quotes
from sluice.benchmarks.live.batch import batch
from sluice.benchmarks.live.gateway import gateway
from sluice.benchmarks.live.gpu import gpu
from sluice.benchmarks.live.peers import peers
from sluice.benchmarks.live.usage import usage
from sluice.benchmarks.micro.causes import causes
from sluice.benchmarks.micro.decision import decision
from sluice.benchmarks.micro.planning import planning
from sluice.benchmarks.micro.replay import replay
from sluice.benchmarks.micro.walk import walk
from sluice.benchmarks.options import as_json, folder, number_option, with_real
from sluice.benchmarks.report import METHOD, Report
from sluice.deploy.tables import print_list
from sluice.simulation.traces import TraceError

MAX_JOBS = 256


@click.group(name="bench", context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure this machine and other systems, and run experiments.

    `sluice bench list` shows the experiments, which run in the simulator, and the other commands.
    """


@bench.command(name="list")
def list_experiments() -> None:
    """List the experiments and the other commands.

    \b
    Example:
      sluice bench list
    """
    rows = [(each.name, each.source, each.question) for each in EXPERIMENTS.values()]
    rows += [
        (each.name or "", "", each.get_short_help_str(100))
        for each in (replay, causes, walk, usage, batch)
    ]
    print_list(("command", "source", "question"), rows)


for _command in (planning, decision, replay, causes, walk, gateway, peers, gpu, usage, batch):
    bench.add_command(_command)
replay.hidden = causes.hidden = walk.hidden = usage.hidden = batch.hidden = True


def report_of(experiment: Experiment, plan: Plan, jobs: int, command: str) -> Report:
    """Run an experiment, with its progress on standard error."""
    cells = experiment.cells(plan)
    found, total = measured(cells, plan.seeds, jobs), len(cells) * len(plan.seeds)
    console = Console(stderr=True)
    rows = list(track(found, experiment.name, total, console=console, transient=True))
    said = experiment.name, experiment.source, experiment.question, experiment.setting
    return Report(*said, METHOD, command, experiment.findings(rows), rows)


def command_of(experiment: Experiment) -> click.Command:
    """The command that runs an experiment."""
    words = [experiment.question, f"Source: {experiment.source}.", experiment.setting]
    words += [f"\b\nExample:\n  sluice bench {experiment.name} --scale quick"]
    processors = {"default": min(os.cpu_count() or 1, MAX_JOBS), "show_default": "processors"}

    @click.command(experiment.name, help="\n\n".join(words), hidden=True)
    @number_option(
        "--seeds", default=experiment.seeds, least=1, most=1_000, words="How often each cell runs."
    )
    @number_option(
        "--first-seed", default=1_000, least=0, most=2**31, words="Seeds count up from here."
    )
    @click.option(
        "--scale",
        default="normal",
        show_default=True,
        type=click.Choice(get_args(Scale)),
        help="quick: seconds, a smoke test; normal: minutes; full: longer, for routers.",
    )
    @click.option("--traces", type=folder(exists=True), help="Folder of recorded traces to add.")
    @as_json
    @number_option("--jobs", least=1, most=MAX_JOBS, words="Processes.", **processors)
    def command(
        seeds: int,
        first_seed: int,
        scale: Scale,
        traces: Path | None,
        as_json: bool,
        jobs: int,
    ) -> None:
        plan = Plan(scale, tuple(range(first_seed, first_seed + seeds)), traces)
        repeats = f"sluice bench {experiment.name} --scale {scale} --seeds {seeds}"
        repeats += f" --first-seed {first_seed}" + (" --traces DIR" if traces is not None else "")
        try:
            report = report_of(experiment, plan, jobs, repeats)
        except TraceError as error:
            raise click.ClickException(str(error)) from error
        click.echo(report.as_json()) if as_json else report.show()

    return command


for _experiment in EXPERIMENTS.values():
    bench.add_command(command_of(_experiment))
with_real(bench.commands["promises"], promises.measure, promises.OPTIONS)
with_real(bench.commands["agents"], agents.measure, agents.OPTIONS)
with_real(bench.commands["quotes"], quotes.measure, quotes.OPTIONS)
