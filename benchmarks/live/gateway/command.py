"""The cost of a gateway in front of engines: Sluice, other routers, and no gateway.

Run with ``sluice bench gateway``. All systems run at the same time, on this machine, and take turns
in each round. Their engines compute nothing, so that only the path is measured. Client, engines and
gateways share the cores: read the processor time of a request, which hardly depends on this, and
the ratios of one run.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sluice.benchmarks.live.gateway.client import LoadError, load
from sluice.benchmarks.live.gateway.report import (
    costs,
    figures,
    further_tokens,
    speeds,
    summary,
    token_costs,
)
from sluice.benchmarks.live.gateway.systems import (
    REAL,
    SYSTEMS,
    Bench,
    Start,
    System,
    engines,
    sluice,
)
from sluice.benchmarks.live.processes import LeftOutError, processor_seconds, used
from sluice.benchmarks.options import as_json, number_option, show
from sluice.deploy.local import StoppedError, stop_signals

WARM_UP_S = 1.0
IDLE_S = 2.0
"""Time without requests, to measure the systems' idle usage, seconds."""

OTHER = "other sluice"

Json = dict[str, Any]


@click.command(name="gateway")
@number_option("--rounds", default=3, least=1, most=100)
@number_option(
    "--seconds",
    default=1.5,
    least=0.1,
    most=600,
    words="Duration of each measurement; running requests end after it.",
)
@number_option(
    *("--at-once", "at_onces"),
    default=(1, 16, 64),
    least=1,
    most=1_000,
    words="Concurrent requests; repeatable.",
    multiple=True,
)
@number_option(
    *("--tokens", "token_counts"),
    default=(20, 200),
    least=1,
    most=4_000,
    words="Tokens of a stream; repeatable.",
    multiple=True,
)
@number_option(
    "--step-ms",
    default=0.0,
    least=0,
    most=1_000,
    words="Time between two tokens of an engine; 0: engines answer at once.",
)
@click.option(
    "--system",
    "names",
    multiple=True,
    type=click.Choice(list(SYSTEMS)),
    help="Systems to measure; repeatable.  [default: all but those with vLLM as the engine]",
)
@click.option(
    "--other",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The `sluice` program of another version, to measure beside this one.",
)
@as_json
def gateway(
    rounds: int,
    seconds: float,
    at_onces: tuple[int, ...],
    token_counts: tuple[int, ...],
    step_ms: float,
    names: tuple[str, ...],
    other: Path | None,
    as_json: bool,
) -> None:
    """Measure what a gateway adds to engines that compute nothing: Sluice, other routers, none.

    Missing routers are installed from PyPI into the user's cache. A router that cannot be installed
    or started is left out, and the output says so.

    \b
    Example:
      sluice bench gateway --system direct --system sluice --at-once 16
    """
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    names = names or tuple(name for name in SYSTEMS if name not in REAL)
    starts = {name: SYSTEMS[name] for name in names}
    if other is not None:
        starts[OTHER] = sluice(OTHER, other)
    try:
        with ExitStack() as stack:
            stop = stack.enter_context(stop_signals())
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-gateway-"))
            )
            try:
                bench = Bench({}, folder, say, stop, step_ms)
                bench = bench._replace(engines=stack.enter_context(engines(bench)))
            except LeftOutError as error:
                raise click.ClickException(f"the engines: {error}") from None
            systems, left_out = _started(starts, bench, stack)
            if not systems:
                raise click.ClickException("no system could be started")
            try:
                runs = _rounds(systems, rounds, seconds, at_onces, token_counts, bench)
                # Not before: a system that has just started is busy with its own start-up.
                idle_cores = _idle(systems)
            except LoadError as error:
                raise click.ClickException(str(error)) from None
    except StoppedError:
        raise click.Abort from None
    rows = summary(runs)
    tokens = further_tokens(rows)
    found = {"summary": rows, "further_token": tokens, "idle_cores": idle_cores}
    tables = [speeds(rows), costs(rows), *([token_costs(tokens)] if tokens else [])]
    show({**found, "left_out": left_out, "runs": runs}, tables, as_json)
    if not as_json:
        for name, cores in idle_cores.items():
            click.echo(f"{name} uses {cores:.3f} cores while nothing is sent")
        for name, reason in left_out.items():
            click.echo(f"{name} was left out: {reason}")


def _started(
    starts: Mapping[str, Start], bench: Bench, stack: ExitStack
) -> tuple[dict[str, System], dict[str, str]]:
    """The running systems, until ``stack`` ends, and why the others do not run."""
    systems, left_out = {}, {}
    for name, start in starts.items():
        bench.say(f"starting {name}")
        try:
            systems[name] = stack.enter_context(start(bench))
        except LeftOutError as error:
            left_out[name] = str(error)
            bench.say(f"{name} is left out: {error}")
    return systems, left_out


def _idle(systems: Mapping[str, System]) -> dict[str, float]:
    """Cores that each system uses while nothing is sent, its engines included."""
    begun_s = time.monotonic()
    before = {name: processor_seconds(system.processes) for name, system in systems.items()}
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - begun_s
    return {
        name: round(
            sum(used(before[name], processor_seconds(system.processes)).values()) / elapsed_s, 3
        )
        for name, system in systems.items()
    }


def _rounds(
    systems: Mapping[str, System],
    rounds: int,
    seconds: float,
    at_onces: tuple[int, ...],
    token_counts: tuple[int, ...],
    bench: Bench,
) -> list[Json]:
    """Every cell of every round; every second round has the systems in reverse order.

    Raises:
        LoadError: an answer does not match its request.
        StoppedError: this process is to end.
    """
    for system in systems.values():
        _measured(system, max(at_onces), min(token_counts), WARM_UP_S, bench.stop)
    runs: list[Json] = []
    for number in range(rounds):
        for at_once in at_onces:
            for tokens in token_counts:
                for name in list(systems)[:: -1 if number % 2 else 1]:
                    row = _measured(systems[name], at_once, tokens, seconds, bench.stop)
                    cell = {"system": name, "at_once": at_once, "tokens": tokens}
                    runs.append({**cell, "round": number, **row})
        bench.say(f"round {number + 1} of {rounds}")
    return runs


def _measured(
    system: System, at_once: int, tokens: int, seconds: float, stop: threading.Event
) -> Json:
    gc.collect()
    before = processor_seconds(system.processes)
    measured = asyncio.run(load(system.urls, at_once, tokens, seconds, stop.is_set, system.also))
    if stop.is_set():
        raise StoppedError("stopped in the middle of a measurement")
    return figures(measured, used(before, processor_seconds(system.processes)))
