"""A recorded trace replayed over real HTTP on real Ray and Serve, with simulated engines: is every
request served as guaranteed and predicted, under the default controller and under plain ones?

Run with ``sluice bench replay``. Each setting of the controller gets a Ray instance of its own and
the same requests at the same times, one setting after the other. The client, the cluster and the
engines share this machine: check how busy it was and how late the client was before you trust a
figure.

The exit status is 1 if an answer was lost: the request was accepted, and its answer is neither
complete nor ends in an error, or its connection was cut.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from sluice.benchmarks.live.application import SIMULATED, application, metrics, simulated
from sluice.benchmarks.live.processes import in_own_process
from sluice.benchmarks.live.replay.client import replay as replay_workload
from sluice.benchmarks.live.replay.load import CLASSES, ENGINE, make_load
from sluice.benchmarks.live.replay.report import summary, tables
from sluice.benchmarks.live.resources import Meter
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.controller.config import NO_ADMISSION
from sluice.deploy.config import SluiceConfig
from sluice.simulation.workload import Workload, window
from sluice.simulation.workloads.traces import TraceError

PLAIN: Final = ("round_robin", "min_load")
"""Routing policies that the default is compared with, without admission."""

_WARM_UP_S = 5.0
_STEP_RATIO = "sluice_step_time_ratio"


@click.command(name="replay")
@click.option(
    "--traces",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A trace, or a folder of traces; several are replayed together. Default: generated.",
)
@number_option("--minutes", default=3.0, least=0.02, most=600)
@number_option("--replicas", default=8, least=1, most=256)
@number_option("--routers", default=2, least=1, most=64)
@number_option(
    "--rate", default=1.0, least=0.001, most=1_000, words="Requests a second for each replica."
)
@seed
@as_json
def replay(
    traces: tuple[Path, ...],
    minutes: float,
    replicas: int,
    routers: int,
    rate: float,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a trace on real Ray with simulated engines, for several controllers.

    The JSON maps setting -> classes, ends by reason, predictions by decile, processor time.

    \b
    Example:
      sluice bench replay --traces DIR
    """
    say = Console(stderr=True).print
    try:
        workload = make_load(traces, rate * replicas, 60 * minutes, seed)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    results = {}
    for name, controller in settings().items():
        say(f"{name}: starting")
        results[name] = in_own_process(_measure, config(controller, replicas, routers), workload)
        ends = results[name]["all"]
        lost = ends["silent"] + ends["cut"]
        say(f"{name}: {ends['answered']} of {ends['sent']} answered, {lost} lost")
    words = f"{workload.description} {workload.scaling}"
    shown = f"{workload.description} ({workload.scaling})."
    show({"workload": words, "settings": results}, tables(results), as_json, shown)
    every = [result["all"] for result in results.values()]
    raise SystemExit(any(ends["silent"] + ends["cut"] for ends in every))


def settings() -> dict[str, dict[str, Any]]:
    """Label -> configuration of the controller. Plain policies give no guarantees."""
    plain = {name: {"policy": name, "admission": NO_ADMISSION} for name in PLAIN}
    return {"default": {}, **plain}


def config(controller: dict[str, Any], replicas: int, routers: int) -> SluiceConfig:
    """An application with this controller."""
    return simulated(ENGINE, replicas, CLASSES, {"replicas": routers}, controller=controller)


def _measure(config: SluiceConfig, workload: Workload) -> dict[str, Any]:
    """Serve ``config``, replay the workload's first seconds to warm up, and then all of it."""
    with application(config) as served:
        url = served.completions
        asyncio.run(replay_workload(url, SIMULATED, window(workload, 0.0, _WARM_UP_S)))
        before = metrics(served.url)
        meter = Meter()
        outcomes = asyncio.run(replay_workload(url, SIMULATED, workload, on_sent=meter.stop))
        after = metrics(served.url)
    seconds, steps = (
        after.get(f"{_STEP_RATIO}_{part}", 0.0) - before.get(f"{_STEP_RATIO}_{part}", 0.0)
        for part in ("sum", "count")
    )
    result = summary(outcomes, meter.usage, seconds / max(1.0, steps))
    controller = config.controller
    return {"policy": controller.policy, "admission": controller.admission, **result}
