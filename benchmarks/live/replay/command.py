"""A recorded trace replayed over real HTTP on real Ray and Serve, with simulated engines: is every
request served as guaranteed and predicted, under the default controller and under plain ones?

Run with ``sluice bench replay`` or ``python -m sluice.benchmarks.live.replay.command``. Each
setting of the controller gets a Ray instance of its own and the same requests at the same times,
one setting after the other. The client, the cluster and the engines share this machine: check how
busy it was and how late the client was before you trust a figure.

The exit status is 1 if an answer was lost: the request was accepted, and its answer is neither
complete nor ends in an error, or its connection was cut.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from sluice.benchmarks.live.own_process import in_own_process
from sluice.benchmarks.live.replay.client import replay as replay_workload
from sluice.benchmarks.live.replay.load import CLASSES, ENGINE, make_load
from sluice.benchmarks.live.replay.report import summary
from sluice.benchmarks.live.resources import Meter
from sluice.controller.config import NO_ADMISSION
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import base_url, running, stop_signals
from sluice.deploy.ray_settings import free_port
from sluice.deploy.tables import print_table
from sluice.scheduling.routing import POLICIES
from sluice.simulation.workload import Workload, window
from sluice.simulation.workloads.traces import TraceError

PLAIN: Final = ("round_robin", "min_load")
"""Routing policies that the default is compared with, without admission."""

_WARM_UP_S = 5.0
_STEP_RATIO = re.compile(r"^sluice_step_time_ratio_(sum|count)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@click.command(name="replay")
@click.option(
    "--traces",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A trace, or a folder of traces; several are replayed together. Default: generated.",
)
@click.option("--minutes", default=3.0, show_default=True, type=click.FloatRange(0.02, 600))
@click.option("--replicas", default=8, show_default=True, type=click.IntRange(1, 256))
@click.option("--routers", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--rate",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.001, 1_000),
    help="Requests a second for each replica.",
)
@click.option(
    "--policies",
    multiple=True,
    type=click.Choice(sorted(POLICIES)),
    help="Routing policies, without admission, to compare the default with.  "
    "[default: round_robin, min_load]",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**31))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def replay(
    traces: tuple[Path, ...],
    minutes: float,
    replicas: int,
    routers: int,
    rate: float,
    policies: tuple[str, ...],
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
        from sluice.benchmarks.live.replay.report import tables

        workload = make_load(traces, rate * replicas, 60 * minutes, seed)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    except ImportError as error:
        raise click.ClickException(f"{error}; install sluice[bench]") from error
    results = {}
    for name, controller in _settings(policies).items():
        say(f"{name}: starting")
        config = _config(controller, replicas, routers)
        results[name] = in_own_process(_measure, config, workload)
        ends = results[name]["all"]
        lost = ends["silent"] + ends["cut"]
        say(f"{name}: {ends['answered']} of {ends['sent']} answered, {lost} lost")
    if as_json:
        words = f"{workload.description} {workload.scaling}"
        click.echo(json.dumps({"workload": words, "settings": results}, indent=2))
    else:
        console = Console()
        console.print(workload.description, f"({workload.scaling}).")
        for table in tables(results):
            print_table(table, console)
    every = [result["all"] for result in results.values()]
    raise SystemExit(any(ends["silent"] + ends["cut"] for ends in every))


def _settings(policies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Label -> configuration of the controller. Plain policies give no guarantees."""
    compared = policies or tuple(name for name in PLAIN if name in POLICIES)
    settings: dict[str, dict[str, Any]] = {"default": {}}
    return settings | {name: {"policy": name, "admission": NO_ADMISSION} for name in compared}


def _config(controller: dict[str, Any], replicas: int, routers: int) -> SluiceConfig:
    return SluiceConfig.model_validate(
        {
            "engine": {"kind": "simulated", "model": "simulated", "simulated": ENGINE},
            "replica": {"count": replicas, "num_cpus": 0.1},
            "controller": controller,
            "router": {
                "port": free_port(),
                "replicas": routers,
                "classes": {name: entry.model_dump() for name, entry in CLASSES.items()},
            },
        }
    )


def _measure(config: SluiceConfig, workload: Workload) -> dict[str, Any]:
    """Serve ``config``, replay the workload's first seconds to warm up, and then all of it."""
    url = f"{base_url(config)}/v1/completions"
    model = config.engine.model
    say = Console(stderr=True).print
    # Ray's own messages must not stand between the lines of the JSON.
    with redirect_stdout(sys.stderr), stop_signals() as stop, running(config, stop, say):
        asyncio.run(replay_workload(url, model, window(workload, 0.0, _WARM_UP_S)))
        before = _step_ratio(config)
        meter = Meter()
        outcomes = asyncio.run(replay_workload(url, model, workload, on_sent=meter.stop))
        after = _step_ratio(config)
    steps = max(1.0, after[1] - before[1])
    result = summary(outcomes, meter.usage, (after[0] - before[0]) / steps)
    controller = config.controller
    return {"policy": controller.policy, "admission": controller.admission, **result}


def _step_ratio(config: SluiceConfig) -> tuple[float, float]:
    """Sum and count, over all engines, of real over predicted step time."""
    with urllib.request.urlopen(f"{base_url(config)}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    sums = {"sum": 0.0, "count": 0.0}
    for part, value in _STEP_RATIO.findall(page):
        sums[part] += float(value)
    return sums["sum"], sums["count"]


if __name__ == "__main__":
    replay()
