"""The cost of a gateway in front of engines: Sluice, other routers, and no gateway.

Run with ``sluice bench gateway``. All systems run at the same time on this machine, and take turns
in each round. Client, engines and gateways share the cores: read the processor time of a request,
which hardly depends on this, and the ratios of one run.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Final

import click
from rich.table import Table

from sluice.benchmarks.experiments.tables import grouped
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.application import simulated
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.drive import campaign
from sluice.benchmarks.live.gateway.client import Load, load
from sluice.benchmarks.live.report import quantiles, table
from sluice.benchmarks.live.resources import OWN, Meter
from sluice.benchmarks.live.systems import ENGINES, REPLICAS, Bench, Server, System, served, sluice
from sluice.benchmarks.options import as_json, choices_option, number_option, show
from sluice.deploy.local import StoppedError

WARM_UP_S = 1.0
IDLE_S = 2.0
"""Time without requests, to measure the systems' idle usage, seconds."""

REFERENCES: Final = ("direct", "vllm-router")
"""Systems with which the others' requests a second are compared, where they were measured."""

GATEWAY: Final = "gateway"
"""All processes but those of engines and the client."""


@contextmanager
def _direct(bench: Bench) -> Iterator[System]:
    yield System(tuple(bench.engines.values()), dict.fromkeys(bench.engines, ENGINES))


def sluice_config(bench: Bench, port: int) -> Json:
    """Sluice in front of simulated engines with the step time of ``bench``."""
    times = {"step_s": bench.step_ms / 1e3, "token_s": 0.0, "context_token_s": 0.0}
    return simulated(port, times, REPLICAS)


def _serve_llm(bench: Bench, port: int) -> Server:
    return live.serve_llm(bench, port, "--replicas", f"{REPLICAS}", "--step-ms", f"{bench.step_ms}")


SYSTEMS: Final[dict[str, live.Start]] = {
    "direct": _direct,
    "vllm-router": served("vllm-router", live.vllm_router),
    "ray-serve-llm": served("ray-serve-llm", _serve_llm),
    "sluice": sluice("sluice", sluice_config),
}
"""The function that starts each system."""


@click.command(name="gateway")
@number_option("--rounds", default=3, least=1, most=100)
@number_option("--seconds", default=1.5, least=0.1, most=600, words="Of each measurement.")
@number_option("--at-once", "at_onces", default=(1, 16, 64), least=1, most=1_000, multiple=True)
@number_option("--tokens", "token_counts", default=(20, 200), least=1, most=4_000, multiple=True)
@number_option(
    "--step-ms", default=0.0, least=0, most=1_000, words="Time between two tokens of an engine."
)
@choices_option("--system", "names", of=SYSTEMS, words="[default: all]")
@as_json
def gateway(
    rounds: int,
    seconds: float,
    at_onces: tuple[int, ...],
    token_counts: tuple[int, ...],
    step_ms: float,
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure what a gateway adds to engines that compute nothing: Sluice, other routers, none.

    Each number of concurrent requests, --at-once, is measured with streams of each number of
    --tokens; they and --system are repeatable. Missing routers are installed from PyPI into the
    user's cache. A router that cannot be installed or started is left out, and the output says so.

    \b
    Example:
      sluice bench gateway --system direct --system sluice --at-once 16
    """
    starts = {name: SYSTEMS[name] for name in names or SYSTEMS}
    with campaign(step_ms) as bench, live.started(starts, bench) as (systems, left_out):
        if not systems:
            raise click.ClickException("no system could be started")
        for system in systems.values():
            _measured(system, max(at_onces), min(token_counts), WARM_UP_S, bench.stop)
        runs: list[Json] = []
        for number in range(rounds):
            turn = list(systems)[:: -1 if number % 2 else 1]
            for at_once, tokens, name in product(at_onces, token_counts, turn):
                row = _measured(systems[name], at_once, tokens, seconds, bench.stop)
                cell = {"system": name, "at_once": at_once, "tokens": tokens}
                runs.append({**cell, "round": number, **row})
            bench.say(f"round {number + 1} of {rounds}")
        # Not before: a system that has just started is busy with its own start-up.
        idle_cores = _idle(systems)
    rows = summary(runs)
    further = further_tokens(rows)
    found = {"summary": rows, "further_token": further, "idle_cores": idle_cores}
    lines = [
        f"{name}: {cores:.3f} cores while nothing is sent" for name, cores in idle_cores.items()
    ]
    lines += [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    show({**found, "left_out": left_out, "runs": runs}, tables(rows, further), as_json, *lines)


def _idle(systems: Mapping[str, System]) -> dict[str, float]:
    """Cores that each system uses while nothing is sent, its engines included."""
    meters = {name: Meter(system.processes) for name, system in systems.items()}
    time.sleep(IDLE_S)
    used = {name: meter.stop().kinds.values() for name, meter in meters.items()}
    return {name: round(sum(each.cores for each in kinds), 3) for name, kinds in used.items()}


def _measured(
    system: System, at_once: int, tokens: int, seconds: float, stop: threading.Event
) -> Json:
    gc.collect()
    meter = Meter(system.processes)
    measured = asyncio.run(load(system.urls, at_once, tokens, seconds, stop.is_set))
    if stop.is_set():
        raise StoppedError("stopped in the middle of a measurement")
    return figures(measured, {kind: used.cpu_s for kind, used in meter.stop().kinds.items()})


# The report.


def figures(load: Load, cpu_s: Mapping[str, float]) -> Json:
    """One run, as plain data; ``cpu_s`` are processor seconds by kind of process."""
    requests = len(load.ttfts_s)
    p50, p99 = quantiles(load.ttfts_s, digits=6)
    each = {**cpu_s, OWN: load.cpu_s}
    return {
        "requests": requests,
        "per_second": round(requests / load.elapsed_s, 2),
        "ttft_p50_ms": round(1e3 * p50, 3),
        "ttft_p99_ms": round(1e3 * p99, 3),
        "cpu_ms": {kind: round(1e3 * seconds / requests, 4) for kind, seconds in each.items()},
    }


def summary(runs: Sequence[Json]) -> list[Json]:
    """Each cell and system over all rounds, in the order of ``runs``.

    Times and rates are medians over rounds; ratios are computed within a round, since a busy moment
    of the machine hits a whole round, and their medians taken; processor time is that of all
    requests of all rounds.
    """
    rows = []
    for (at_once, tokens), cell in grouped(runs, "at_once", "tokens").items():
        systems = {name: own for (name,), own in grouped(cell, "system").items()}
        for system, own in systems.items():
            row: Json = {"at_once": at_once, "tokens": tokens, "system": system}
            row["requests"] = sum(run["requests"] for run in own)
            row["cpu_ms"] = _cpu_ms(own, row["requests"])
            for name in ("per_second", "ttft_p50_ms", "ttft_p99_ms"):
                row[name] = round(median(run[name] for run in own), 3)
            row["ratio"] = {
                name: _ratio(own, systems[name])
                for name in REFERENCES
                if name in systems and name != system
            }
            rows.append(row)
    return rows


def _ratio(runs: Sequence[Json], bases: Sequence[Json]) -> float:
    pairs = zip(runs, bases, strict=True)
    ratios = [float(run["per_second"] / base["per_second"]) for run, base in pairs]
    return round(median(ratios), 3)


def _cpu_ms(runs: Sequence[Json], requests: int) -> dict[str, float]:
    """Processor time of a request, by kind of process, and of all processes of the gateway."""
    sums = Counter[str]()
    for run in runs:
        sums.update({kind: ms * run["requests"] for kind, ms in run["cpu_ms"].items()})
    found = {kind: total / requests for kind, total in sums.items()}
    found[GATEWAY] = sum(ms for kind, ms in found.items() if kind not in (ENGINES, OWN))
    return {kind: round(ms, 3) for kind, ms in found.items()}


def further_tokens(rows: Sequence[Json]) -> list[Json]:
    """The cost of a further token of a stream for each system, in microseconds of processor time:
    from the difference between the longest and the shortest streams of :func:`summary`. Empty where
    all are equally long."""
    costs = []
    for (at_once, system), own in grouped(rows, "at_once", "system").items():
        short, long = (pick(own, key=lambda row: row["tokens"]) for pick in (min, max))
        tokens = long["tokens"] - short["tokens"]
        if tokens:
            cpu_us = {
                kind: round(1e3 * (ms - short["cpu_ms"].get(kind, 0.0)) / tokens, 2)
                for kind, ms in long["cpu_ms"].items()
            }
            costs.append({"at_once": at_once, "system": system, "cpu_us": cpu_us})
    return costs


def tables(rows: Sequence[Json], tokens: Sequence[Json]) -> list[Table]:
    """:func:`summary` and :func:`further_tokens` as tables."""
    cell = ("at_once", "tokens", "system")
    speed = ("per_second", "ratio.direct", "ratio.vllm-router", "ttft_p50_ms", "ttft_p99_ms")
    kinds = dict.fromkeys([GATEWAY, *(kind for row in rows for kind in row["cpu_ms"])])
    of_request, of_token = ([f"{unit}.{kind}" for kind in kinds] for unit in ("cpu_ms", "cpu_us"))
    shown = [
        table(rows, *cell, *speed, "requests", title="medians over rounds"),
        table(rows, *cell, *of_request, title="processor time of a request"),
    ]
    if tokens:
        title = "processor time of a further token"
        shown.append(table(tokens, "at_once", "system", *of_token, title=title))
    return shown
