"""Overload over real HTTP on real Ray and Serve, with simulated engines: does what is served stay
the same when clients send far more than can be, and come again at once when they are refused?

Run with ``sluice bench overload``. The classes refuse what cannot be promised, so all that is
served was promised. The runs take turns on one cluster, the same requests at the same times with
and without retries. The client and the cluster share this machine: see how late the client was, and
how busy the machine, before believing a figure.

The exit status is 1 if an answer was lost, or if with retries less was served in time than
:data:`LEAST_RATIO` of what was without.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay_client import End, Outcome, replay
from benchmarks.replay_report import GUARANTEED
from benchmarks.resources import Meter, Usage, held
from deploy.config import SluiceConfig, parse_config
from deploy.local import base_url, running, stop_signals
from router.config import RouterConfig
from scheduling.objective import SLO
from simulation.workload import Arrival, Workload, window

ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.05,
    "token_s": 0.0004,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 4096,
    "max_batch_tokens": 1024,
    "max_sequences": 16,
}
"""The simulated engine. Its steps cost no processor time, and are long beside what delays them."""

SLO_OF: Final = SLO(ttft_s=1.5, tpot_s=0.15, priority=2, service_class="strict")
CLASS: Final = {"ttft_ms": 1_500, "tpot_ms": 150, "priority": 2, "when_unattainable": "reject"}

RATE: Final = 3.0
"""About what one engine can promise of such requests, requests a second: 1x."""

PATIENCE_S: Final = 5.0
"""A client that comes again at once gives up after so long, seconds."""

LEAST_RATIO: Final = 0.95

_PROMPT_TOKENS, _OUTPUT_TOKENS = 300, 40
_WARM_UP_S = 5.0
_SETTINGS: Final = {"none": 0.0, "at once": PATIENCE_S}
_DEFAULT = RouterConfig()

Json = dict[str, Any]


@click.command(name="overload")
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(1, 3_600))
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=click.FloatRange(0.1, 100),
    help="Times of what the engines can do; several.  [default: 1, 3, 10]",
)
@click.option("--replicas", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--refusals-per-s",
    default=_DEFAULT.refusals_per_s,
    show_default=True,
    type=click.FloatRange(1, 1e6),
    help="router.refusals_per_s; a million is as if refusals were not paced.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**31))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def overload(
    seconds: float,
    loads: tuple[float, ...],
    replicas: int,
    refusals_per_s: float,
    seed: int,
    as_json: bool,
) -> None:
    """Send real clusters more than they can do, by clients that retry at once and that do not.

    \b
    Example:
      sluice bench overload --load 3 --load 10
    """
    say = Console(stderr=True).print
    config = _config(replicas, refusals_per_s)
    rows: list[Json] = []
    # Ray's own messages must not stand between the lines of the JSON.
    with redirect_stdout(sys.stderr), stop_signals() as stop, running(config, stop, say):
        url = f"{base_url(config)}/v1/completions"
        _replayed(url, window(make_load(RATE * replicas, 60.0, seed), 0.0, _WARM_UP_S), 0.0)
        for load in loads or (1.0, 3.0, 10.0):
            workload = make_load(load * RATE * replicas, seconds, seed)
            for retries, patience_s in _SETTINGS.items():
                outcomes, usage = _replayed(url, workload, patience_s)
                row = {"load": load, "retries": retries, **figures(outcomes, usage, seconds)}
                say(f"{load:g}x, retries {retries}: {row['goodput']:.2f}/s in time")
                rows.append(row)
    add_ratios(rows)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        Console().print(table(rows))
    missed = any(row["ratio"] < LEAST_RATIO for row in rows)
    raise SystemExit(missed or any(row["lost"] for row in rows))


def make_load(rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals for so many seconds, with lengths drawn from exponential distributions."""
    chance = np.random.default_rng(seed)
    times = np.cumsum(chance.exponential(1 / rate, size=round(2 * rate * seconds) + 50))
    times = times[times < seconds]
    most = ENGINE["max_model_tokens"] // 2
    prompts = np.clip(chance.exponential(_PROMPT_TOKENS, len(times)), 8, most)
    outputs = np.clip(chance.exponential(_OUTPUT_TOKENS, len(times)), 2, most)
    return Workload(
        "overload",
        tuple(
            Arrival(float(time_s), int(prompt), int(output), SLO_OF)
            for time_s, prompt, output in zip(times, prompts, outputs, strict=True)
        ),
    )


def _config(replicas: int, refusals_per_s: float) -> SluiceConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return parse_config(
        {
            "engine": {"kind": "simulated", "model": "simulated", "simulated": ENGINE},
            "replica": {"count": replicas, "num_cpus": 0.1},
            "router": {
                "port": port,
                "refusals_per_s": refusals_per_s,
                "classes": {SLO_OF.service_class: CLASS},
                "default_class": SLO_OF.service_class,
            },
        }
    )


def _replayed(url: str, workload: Workload, patience_s: float) -> tuple[list[Outcome], Usage]:
    meter = Meter()
    outcomes = asyncio.run(
        replay(url, "simulated", workload, on_sent=meter.stop, patience_s=patience_s)
    )
    return outcomes, meter.usage


def figures(outcomes: Sequence[Outcome], usage: Usage, seconds: float) -> Json:
    """What is reported of one run, as plain data.

    ``goodput`` counts what was answered within its objective before the last request was due: what
    a client gets by its patience after that would be none of the same time.
    """
    in_time = [
        each for each in outcomes if each.attained and each.ended_s and each.ended_s <= seconds
    ]
    refusals_ms = [1e3 * each.refused_s / each.refusals for each in outcomes if each.refusals]
    memory = dict.fromkeys(usage.kinds, 0.0)
    for each in held().values():
        memory[each.kind] = memory.get(each.kind, 0.0) + each.memory_mib
    return {
        "sent": len(outcomes),
        "goodput": round(len(in_time) / seconds, 3),
        "kept": sum(each.attained for each in outcomes)
        / max(1, sum(each.end is End.ANSWERED for each in outcomes)),
        "answered": sum(each.end is End.ANSWERED for each in outcomes),
        "promised": sum(each.admission == GUARANTEED for each in outcomes),
        "ttft_ms": _quantiles([1e3 * each.ttft_s for each in outcomes if each.ttft_s is not None]),
        "refusals": sum(each.refusals for each in outcomes),
        "refusal_ms": _quantiles(refusals_ms),
        "lost": sum(each.end in (End.SILENT, End.CUT) for each in outcomes),
        "failed": sum(each.end is End.FAILED for each in outcomes),
        "late_ms": round(1e3 * float(np.quantile([each.late_s for each in outcomes], 0.99)), 1),
        "busy": usage.machine_busy,
        "cores": {kind: used.cores for kind, used in usage.kinds.items()},
        "memory_mib": {kind: round(size, 1) for kind, size in sorted(memory.items())},
    }


def _quantiles(values: Sequence[float]) -> list[float]:
    """Median and 99th percentile; zeros of nothing."""
    return [round(float(value), 1) for value in np.quantile(values or [0.0], (0.5, 0.99))]


def add_ratios(rows: Sequence[Json]) -> None:
    """Add to each row its goodput over that of the row with the same load and no retries."""
    bases = {row["load"]: row["goodput"] for row in rows if row["retries"] == "none"}
    for row in rows:
        row["ratio"] = round(row["goodput"] / bases[row["load"]], 3) if bases[row["load"]] else 1.0


def table(rows: Sequence[Json]) -> Table:
    """The runs as a table."""
    shown = Table(
        *("load", "retries", "sent", "in time /s", "to none", "answered in time", "refusals"),
        *("refusal p50 / p99 ms", "lost", "sent late p99 ms", "machine busy"),
        *("router, client cores", "router, HAProxy MiB"),
        title="what is served in time, and what it takes",
    )
    for row in rows:
        cores, memory = row["cores"], row["memory_mib"]
        shown.add_row(
            *(f"{row['load']:g}x", row["retries"], str(row["sent"]), f"{row['goodput']:.2f}"),
            *(f"{row['ratio']:.3f}", f"{100 * row['kept']:.1f} %", str(row["refusals"])),
            "{:.0f} / {:.0f}".format(*row["refusal_ms"]),
            *(str(row["lost"]), f"{row['late_ms']:.0f}", f"{100 * row['busy']:.0f} %"),
            f"{cores.get('routers', 0):.2f}, {cores.get('client', 0):.2f}",
            f"{memory.get('routers', 0):.0f}, {memory.get('HAProxy', 0):.0f}",
        )
    return shown


if __name__ == "__main__":
    overload()
