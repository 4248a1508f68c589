"""The frame of the live benchmarks: what they start in, and loads that are sent to a system."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from sluice.benchmarks.live.client import Body, LoadError, Outcome, replay, saturated
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.report import Meter, Run, Usage
from sluice.benchmarks.live.systems import Bench, LeftOutError, System
from sluice.benchmarks.report import ReportError
from sluice.deploy.local import StoppedError, stop_signals
from sluice.simulation.traces import TraceError
from sluice.simulation.workload import Arrival, Workload

IN_FLIGHT = 16
"""Concurrent requests that saturate an engine."""

T = TypeVar("T")


@contextmanager
def campaign(step_ms: float = 0.0) -> Iterator[Bench]:
    """What systems are started with, until the block ends; its errors are those of a command."""
    # What servers say may look like markup.
    say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
    try:
        with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            yield Bench({}, Path(folder), say, stop, step_ms)
    except (LeftOutError, LoadError, ReportError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except StoppedError:
        raise click.Abort from None


def run(
    bench: Bench,
    system: System,
    labels: Mapping[str, Any],
    seconds: float,
    workload: Workload,
    roots: Mapping[int, str] | None = None,
    **options: Any,
) -> Run:
    """One run of ``seconds`` of arrivals, with the usage of the processes of ``roots``."""
    gc.collect()
    meter = Meter(roots)

    async def measured() -> tuple[list[Outcome], Usage]:
        sent = replay(completions(system), MODEL, workload, **options)
        return await until_stopped(bench, sent), meter.stop()

    return Run(labels, seconds, *asyncio.run(measured()))


def capacity(
    bench: Bench,
    system: System,
    arrivals: Iterator[Arrival],
    body: Body,
    in_flight: int,
    *times: Any,
) -> float:
    """Requests a second, see :func:`sluice.benchmarks.live.client.saturated`."""
    load = saturated(completions(system), MODEL, arrivals, body, in_flight, *times)
    return asyncio.run(until_stopped(bench, load))


async def until_stopped(bench: Bench, load: Coroutine[Any, Any, T]) -> T:
    """The result of a load; raises :class:`StoppedError` if this process is to end before."""
    task = asyncio.create_task(load)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        if bench.stop.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise StoppedError("stopped in the middle of a run")
    return task.result()


def completions(system: System) -> str:
    """URL of the completions endpoint."""
    return f"{system.urls[0]}/v1/completions"
