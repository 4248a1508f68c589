"""Overload over real HTTP on real Ray and Serve, with simulated engines: does goodput stay the same
when clients send far more than the engines can serve, and retry at once when they are refused?

Run with ``sluice bench overload``. The classes refuse requests that cannot be guaranteed. The runs
take turns on one cluster: in each round the same requests at the same times with and without
retries, each of the two first in every other round. Client and cluster share this machine: check
the client's lateness, the machine's load and the error of the ratio before you trust a figure.

The exit status is 1 if an answer was lost, or if the goodput with retries is below
:data:`LEAST_RATIO` of the goodput without.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Final

import click
import numpy as np
from rich.console import Console

from sluice.benchmarks.experiments.tables import grouped
from sluice.benchmarks.live.application import application, simulated
from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.loads import LIGHT_ENGINE
from sluice.benchmarks.live.report import Json, quantiles, table
from sluice.benchmarks.live.resources import Usage, held
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload, window

SLO_OF: Final = SLO(ttft_s=1.5, tpot_s=0.15, priority=2, service_class="strict")
CLASS: Final = ServiceClass(ttft_ms=1_500, tpot_ms=150, priority=2, when_unattainable="reject")

RATE: Final = 3.6
"""About the rate that one engine can guarantee, requests a second: 1x."""

REPLICAS: Final = 2

PATIENCE_S: Final = 5.0
"""A client that retries at once gives up after this time, seconds."""

LEAST_RATIO: Final = 0.95

WARM_UP_S: Final = 5.0
"""Requests that end in the first seconds of a run do not count: the engines begin it empty."""

_PROMPT_TOKENS, _OUTPUT_TOKENS = 300, 40
_SHAPE = 8.0  # of the lengths' distribution: the more they vary, the noisier are the results
_SETTINGS: Final = {"none": 0.0, "at once": PATIENCE_S}


@click.command(name="overload")
@number_option("--seconds", default=30.0, least=6, most=3_600)
@number_option("--rounds", default=4, least=1, most=100)
@number_option("--load", "loads", default=(3.0, 10.0), least=0.1, most=100, multiple=True)
@seed
@as_json
def overload(
    seconds: float, rounds: int, loads: tuple[float, ...], seed: int, as_json: bool
) -> None:
    """Overload real clusters, by clients that retry at once and by clients that do not.

    Each --load is a multiple of the engines' capacity; it is repeatable.

    \b
    Example:
      sluice bench overload --load 3 --load 10
    """
    say = Console(stderr=True).print
    name = SLO_OF.service_class
    config = simulated(LIGHT_ENGINE, REPLICAS, {name: CLASS}, {"default_class": name})
    rate = RATE * REPLICAS
    runs: list[Json] = []
    with application(config) as running:
        # Of the heaviest kind, so that memory that grows once in a storm has grown.
        storm = window(make_load(10 * rate, 60.0, seed), 0.0, WARM_UP_S)
        running.send(storm, patience_s=PATIENCE_S)
        for turn, load in product(range(rounds), loads):
            workload = make_load(load * rate, seconds, seed + turn)
            for retries in list(_SETTINGS)[:: -1 if turn % 2 else 1]:
                before = held()
                outcomes, usage = running.send_metered(workload, patience_s=_SETTINGS[retries])
                memory = {kind: [before.get(kind, 0.0), now] for kind, now in held().items()}
                row = figures(outcomes, usage, memory, seconds)
                say(f"{load:g}x, retries {retries}: {row['goodput']:.2f}/s in time")
                runs.append({"load": load, "retries": retries, "round": turn, **row})
    rows = summary(runs)
    cell = ("load", "retries")
    served = ("sent", "goodput", "ratio", "error", "kept", "lost", "failed")
    cost = ("refusals", "refusal_ms", "late_ms", "busy", "cores.routers", "cores.client")
    tables = [
        table(rows, *cell, *served, title=f"served in time, mean of {rounds} rounds"),
        table(rows, *cell, *cost, "memory_mib.routers", "memory_mib.HAProxy", title="resources"),
    ]
    show({"summary": rows, "runs": runs}, tables, as_json)
    missed = any(row["ratio"] < LEAST_RATIO for row in rows)
    raise SystemExit(missed or any(row["lost"] for row in rows))


def make_load(rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals for ``seconds``, with lengths drawn from gamma distributions."""
    chance = np.random.default_rng(seed)
    times = np.cumsum(chance.exponential(1 / rate, size=round(2 * rate * seconds) + 50))
    times = times[times < seconds]
    most = LIGHT_ENGINE["max_model_tokens"] // 2
    prompts = np.clip(chance.gamma(_SHAPE, _PROMPT_TOKENS / _SHAPE, len(times)), 8, most)
    outputs = np.clip(chance.gamma(_SHAPE, _OUTPUT_TOKENS / _SHAPE, len(times)), 2, most)
    return Workload(
        "overload",
        tuple(
            Arrival(float(time_s), int(prompt), int(output), SLO_OF)
            for time_s, prompt, output in zip(times, prompts, outputs, strict=True)
        ),
    )


def figures(
    outcomes: Sequence[Outcome], usage: Usage, memory: dict[str, list[float]], seconds: float
) -> Json:
    """The report of one run, as plain data.

    ``goodput`` counts requests answered within their objective, per second, that ended between
    :data:`WARM_UP_S` and the time of the last arrival.
    """
    in_time = [
        each
        for each in outcomes
        if each.attained and each.ended_s and WARM_UP_S <= each.ended_s <= seconds
    ]
    span_s = seconds - WARM_UP_S
    return {
        "sent": len(outcomes),
        "goodput": round(len(in_time) / span_s, 3),
        "attained": sum(each.attained for each in outcomes),
        "answered": sum(each.end is End.ANSWERED for each in outcomes),
        "refusals": sum(each.refusals for each in outcomes),
        "refusal_ms": quantiles(
            [1e3 * each.refused_s / each.refusals for each in outcomes if each.refusals]
        ),
        "lost": sum(each.end in (End.SILENT, End.CUT) for each in outcomes),
        "failed": sum(each.end is End.FAILED for each in outcomes),
        "late_ms": round(1e3 * float(np.quantile([each.late_s for each in outcomes], 0.99)), 1),
        "busy": usage.machine_busy,
        "cores": {kind: used.cores for kind, used in usage.kinds.items()},
        "memory_mib": memory,
    }


def summary(runs: Sequence[Json]) -> list[Json]:
    """Each load and retry behaviour over all rounds, in the order of ``runs``.

    ``ratio`` is the goodput over that of the same rounds without retries, and ``error`` its
    standard error by the scatter of the rounds' own ratios; ``None`` with one round. ``memory_mib``
    is that before the first and after the last round.
    """
    groups = grouped(runs, "load", "retries")
    rows = []
    for (load, retries), own in groups.items():
        row: Json = {"load": load, "retries": retries, "rounds": len(own)}
        for name in ("sent", "answered", "attained", "refusals", "lost", "failed"):
            row[name] = sum(run[name] for run in own)
        for name in ("goodput", "busy"):
            row[name] = round(fmean(run[name] for run in own), 3)
        row["ratio"], row["error"] = _ratio(own, groups[load, "none"])
        row["kept"] = round(row["attained"] / max(1, row["answered"]), 4)
        row["late_ms"] = max(run["late_ms"] for run in own)
        row["refusal_ms"] = np.mean([run["refusal_ms"] for run in own], axis=0).round(1).tolist()
        row["cores"] = {
            kind: round(fmean(run["cores"].get(kind, 0.0) for run in own), 3)
            for kind in own[0]["cores"]
        }
        first, last = own[0]["memory_mib"], own[-1]["memory_mib"]
        row["memory_mib"] = {kind: [first.get(kind, [0.0])[0], last[kind][1]] for kind in last}
        rows.append(row)
    return rows


def _ratio(runs: Sequence[Json], bases: Sequence[Json]) -> tuple[float, float | None]:
    """Ratio of the goodputs, and its standard error. 1 where nothing was served without retries."""
    goodputs = ([run["goodput"] for run in each] for each in (runs, bases))
    pairs = [(own, base) for own, base in zip(*goodputs, strict=True) if base]
    if not pairs:
        return 1.0, None
    each = [above / below for above, below in pairs]
    error = round(stdev(each) / sqrt(len(each)), 3) if len(each) > 1 else None
    return round(sum(above for above, _ in pairs) / sum(below for _, below in pairs), 3), error
