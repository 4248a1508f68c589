"""``sluice profile``: how long the steps of an engine take on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure, load
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import SluiceConfig
from sluice.deploy.tables import print_table
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.latency.model import FAMILIES
from sluice.scheduling.latency.profile import (
    KINDS,
    LatencyProfile,
    StepErrors,
    best_fit,
    errors_by_kind,
    fit,
    fit_without_context,
    kind_of,
    step_errors,
)

if TYPE_CHECKING:
    from sluice.replica.config import EngineConfig
    from sluice.replica.engine import Engine, EngineInfo
    from sluice.replica.profiling import Load
    from sluice.scheduling.latency.model import StepSample


# What ``sluice profile`` shows: progress, the fitted model with its errors, and a figure.

_FORMATS = (".png", ".pdf", ".svg")
_OTHERS = {
    "start": "the profile used so far",
    "without_context": "family linear without its terms of the context",
}
_COLOURS = dict(zip(KINDS, ("#2a6fbb", "#d1742f", "#3f9457"), strict=True))


@dataclass(frozen=True)
class Measured:
    """An engine's measured steps: ``swept`` are fitted, ``unseen`` evaluate the fit. ``key`` names
    what the times depend on; ``start``: the profile that such a replica starts with today."""

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
    """A progress bar on standard error: call what it yields with the activity, the amount done and
    the total, 0 if that is unknown."""
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
            shares = (f"{share:.1%}" for share in (entry.mape, entry.median, entry.p90))
            table.add_row(f"{title}, {kind}", str(entry.steps), *shares, f"{entry.bias:+.1%}")
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
    """Raises Failure: a figure of this format cannot be drawn, or not without matplotlib."""
    if path.suffix.lower() not in _FORMATS:
        raise Failure(Exit.USAGE, f"--plot must end in one of {', '.join(_FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure(Exit.FAILED, "--plot needs matplotlib: pip install 'sluice-serve[bench]'")


def draw(
    path: Path, profile: LatencyProfile, swept: Sequence[StepSample], unseen: Sequence[StepSample]
) -> None:
    """Draw predicted against real step times, a panel for each set of steps. Raises Failure."""
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


# The engine's process imports this program first, compiled policies and all, and then vLLM.
survive_module_scan()

_NAME = "profile"
_REQUESTS = 1024
"""Capacity for the engine's live requests; a load of the sweep has fewer."""


@click.command()
@click.option("--config", "path", type=CONFIG_FILE, help="YAML configuration of the engine.")
@click.option("--model", help="Path or hub id of the model.")
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="The engine.")
@click.option("--policy", help="Local batch policy under which it is measured.")
@click.option("--served", help="Which of several configured models, by the name requests use.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    help="Repetitions of the sweep. More of them average more noise away.",
)
@click.option(
    "--family",
    type=click.Choice(list(FAMILIES)),
    help="Form of the model. Default: linear or prefill_decode, whichever predicts steps better "
    "that are held out from its fit.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the profile here. Default: where replicas look for one (vLLM only).",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a figure of predicted against real times here, PNG, PDF or SVG by its name.",
)
@json_option
def profile(
    path: Path | None,
    model: str | None,
    engine: str | None,
    policy: str | None,
    served: str | None,
    rounds: int,
    family: str | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure an engine's step times here, and keep the fitted model.

    Starts the configured engine once, without Ray, and runs a sweep: prefills of several lengths,
    alone and on a context, decode batches of several sizes, and both at once. The model is fitted
    to these steps. Then it is tried on random loads that the fit has not seen. Nothing else should
    run on the device meanwhile.

    With vLLM the profile is kept where replicas with the same model, arguments and hardware look
    for one when they start. With --out it is written to a file for `engine.latency_profile`.

    \b
    Examples:
      sluice profile --model Qwen/Qwen3-8B --plot profile.png
      sluice profile --config sluice.yaml --rounds 5 --out h100.json
      sluice profile --engine simulated --rounds 1 --json
    """
    flags = {"model": model, "kind": engine, "policy": policy}
    given = {name: value for name, value in flags.items() if value is not None}
    config = _chosen(load(path, {"engine": given}), served)
    _check_place(out)
    if plot is not None:
        _check_place(plot)
        check_plot(plot)
    with progress() as report:
        measured = _measure(config, rounds, report)
    try:
        fitted = fit_sweep(measured, family)
    except ValueError as error:
        raise Failure(Exit.FAILED, f"{error}; try more --rounds or another --family") from error
    kept = _keep(config, fitted.profile, out)
    if plot is not None:
        draw(plot, fitted.profile, measured.swept, measured.unseen)
    if as_json:
        print_json(measured, fitted, kept)
    else:
        print_tables(measured, fitted, kept)


async def measure(
    config: EngineConfig, rounds: int, report: Callable[[str, int, int], None]
) -> Measured:
    """Start the engine, sweep it, try it, and stop it. Raises SweepError, EngineDeadError: the
    sweep did not end; ValueError, OSError, RuntimeError: the engine did not start."""
    from sluice.replica.profiling import Sweep, grid, random_loads

    named = config.latency_profile
    start = None
    if named is not None:
        start = LatencyProfile.from_json(named.expanduser().read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as directory:
        log = Path(directory)
        settings = {"latency_profile": None, "batch_log": log}
        engine = _engine(config.model_copy(update=settings))
        report("starting the engine", 0, 0)
        try:
            info: EngineInfo = await engine.start()
            sweep = Sweep(engine, info, log / f"{_NAME}.jsonl")
            shapes, unseen = grid(info), random_loads(info)
            total = rounds * len(shapes) + len(unseen)
            done = 0

            def count(_: Load) -> None:
                nonlocal done
                done += 1
                report("measuring", done, total)

            # First steps are slow, and not counted.
            await sweep.run("warm", (shapes[0], shapes[-1]))
            for _ in range(rounds):
                await sweep.run("grid", shapes, count)
            await sweep.run("unseen", unseen, count)
        finally:
            await engine.stop()
        swept, tried = sweep.samples("grid"), sweep.samples("unseen")
    key = info.profile.key
    return Measured(info.model, info.policy, key, start or info.profile, swept, tried)


def fit_sweep(measured: Measured, family: str | None = None) -> Fitted:
    """Fit ``family``, or the one that predicts better, to the sweep. Raises ValueError: too few
    steps."""
    swept, unseen = measured.swept, measured.unseen
    model, report = best_fit(swept) if family is None else fit(swept, family)
    others: dict[str, float] = {}
    for other in FAMILIES:
        if other != model.family:
            try:
                rival, _ = fit(swept, other)
            except ValueError:
                continue
            others[other] = step_errors(rival, unseen).mape
    others["without_context"] = step_errors(fit_without_context(swept)[0], unseen).mape
    others["start"] = step_errors(measured.start.model, unseen).mape
    return Fitted(
        LatencyProfile.of(measured.key, model, report),
        errors_by_kind(model, swept),
        errors_by_kind(model, unseen),
        others,
    )


def _measure(
    config: EngineConfig, rounds: int, report: Callable[[str, int, int], None]
) -> Measured:
    from sluice.protocol.requests import EngineDeadError
    from sluice.replica.profiling import SweepError, VirtualLoop

    # Standard output is the report's, and lines would run through the progress bar.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # A simulated engine only waits, so it runs on virtual time.
    loop = VirtualLoop if config.kind == "simulated" else None
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(measure(config, rounds, report))
    except (SweepError, EngineDeadError) as error:
        raise Failure(Exit.FAILED, str(error)) from error
    except (ValueError, OSError, RuntimeError) as error:
        raise Failure(Exit.FAILED, f"the engine did not start: {error}") from error


def _engine(config: EngineConfig) -> Engine:
    """The engine to measure, on the time of the running loop where it is simulated."""
    if config.kind == "simulated":
        from sluice.replica.simulated.engine import SimulatedEngine

        clock = asyncio.get_running_loop().time
        return SimulatedEngine(config, _NAME, _REQUESTS, clock)
    from sluice.replica.deployment import make_engines

    return make_engines(config, _NAME, _REQUESTS, 0)[0]


def _chosen(config: SluiceConfig, served: str | None) -> EngineConfig:
    """The engine to measure, of those that are configured."""
    engines = {fleet.model: fleet.config.engine for fleet in config.fleets}
    if served is None and len(engines) == 1:
        return next(iter(engines.values()))
    if served not in engines:
        raise Failure(Exit.USAGE, f"--served must be one of: {', '.join(engines)}")
    return engines[served]


def _check_place(path: Path | None) -> None:
    """Refuse a file that cannot be written before minutes are spent on it."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise Failure(
            Exit.FAILED,
            f"cannot write {path}: {path.absolute().parent} is no folder that can be written",
        )


def _keep(config: EngineConfig, found: LatencyProfile, out: Path | None) -> Path | None:
    """Write the profile. Returns its path; ``None`` if no replica would look for it."""
    from sluice.replica.profiling import profile_path, save_profile

    if out is None:
        if config.kind == "simulated":
            return None
        out = profile_path(config.cache_dir, found.key)
    try:
        save_profile(out, found)
    except OSError as error:
        raise Failure(Exit.FAILED, f"cannot write {out}: {error.strerror}") from error
    return out
