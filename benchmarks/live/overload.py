"""Overload over real HTTP on real Ray and Serve, with simulated engines: does goodput stay the same
when clients send far more than the engines can serve, and retry at once when they are refused?

Run with ``sluice bench overload``. The runs take turns on one cluster: in each round the same
requests at the same times with and without retries, each of the two first in every other round.
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

from sluice.benchmarks.live.application import LIGHT_ENGINE, objectives, simulated
from sluice.benchmarks.live.client import End, Json
from sluice.benchmarks.live.drive import campaign, run
from sluice.benchmarks.live.mix import Kind, Pattern
from sluice.benchmarks.live.report import Run, quantiles, share, single, summary, table
from sluice.benchmarks.live.resources import held
from sluice.benchmarks.live.systems import sluice
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Workload, window

CLASSES: Final = {
    "strict": ServiceClass(ttft_ms=1_500, tpot_ms=150, priority=2, when_unattainable="reject")
}

SLOS: Final = objectives(CLASSES)

RATE: Final = 3.6
"""About the rate that one engine can guarantee, requests a second: 1x."""

REPLICAS: Final = 2

PATIENCE_S: Final = 5.0
"""A client that retries at once gives up after this time, seconds."""

LEAST_RATIO: Final = 0.95

WARM_UP_S: Final = 5.0
"""Requests that end in the first seconds of a run do not count: the engines begin it empty."""

PATTERN: Final = Pattern("overload", kinds={"strict": Kind(1.0, (150, 450), (20, 60))})
"""The more lengths vary, the noisier are the results."""

CELL: Final = ("load", "retries")
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
    start = sluice("sluice", lambda _, port: simulated(port, LIGHT_ENGINE, REPLICAS, CLASSES))
    rate = RATE * REPLICAS
    runs: list[Run] = []
    with campaign() as bench, start(bench) as system:
        # Of the heaviest kind, so that memory that grows once in a storm has grown.
        storm = window(make_load(10 * rate, 60.0, seed), 0.0, WARM_UP_S)
        run(bench, system, {}, WARM_UP_S, storm, patience_s=PATIENCE_S)
        before = held()
        for turn, load in product(range(rounds), loads):
            workload = make_load(load * rate, seconds, seed + turn)
            for retries in list(_SETTINGS)[:: -1 if turn % 2 else 1]:
                labels, patience_s = {"load": load, "retries": retries}, _SETTINGS[retries]
                found = run(bench, system, labels, seconds, workload, patience_s=patience_s)
                runs.append(found)
                bench.say(f"{load:g}x, retries {retries}: {goodput(found):.2f}/s in time")
        after = held()
    rows = compared(runs)
    memory = [{"kind": kind, "before": before.get(kind), "after": after[kind]} for kind in after]
    served = ("sent", "goodput", "ratio", "error", "answers_in_time", "lost", "failed")
    cost = ("refusals", "refusal_ms", "late_ms", "busy", "cores.routers", "cores.client")
    tables = [
        table(rows, *CELL, *served, title=f"served in time, mean of {rounds} rounds"),
        table(rows, *CELL, *cost, title="resources"),
        table(memory, *memory[0], title="memory before the first and after the last round, MiB"),
    ]
    show({"summary": rows, "memory_mib": memory, "runs": single(runs)}, tables, as_json)
    missed = any(row["ratio"] < LEAST_RATIO for row in rows)
    raise SystemExit(missed or any(row["lost"] for row in rows))


def make_load(rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals for ``seconds``."""
    return PATTERN.workload(rate, seconds, seed, SLOS)


def goodput(run: Run) -> float:
    """Requests answered within their objective, per second, that ended between :data:`WARM_UP_S`
    and the time of the last arrival."""
    ended_s = (each.ended_s or 0.0 for each in run.outcomes if each.attained)
    in_time = sum(WARM_UP_S <= each_s <= run.seconds for each_s in ended_s)
    return in_time / (run.seconds - WARM_UP_S)


def _figures(runs: Sequence[Run]) -> Json:
    """Mean goodput, ``answers_in_time``: the share of the answers within their objective, and the
    number and time of refusals."""
    outcomes = [each for run in runs for each in run.outcomes]
    refused_ms = [1e3 * each.refused_s / each.refusals for each in outcomes if each.refusals]
    answered = sum(each.end is End.ANSWERED for each in outcomes)
    return {
        "goodput": round(fmean(map(goodput, runs)), 3),
        "answers_in_time": share(sum(each.attained for each in outcomes), answered),
        "refusals": sum(each.refusals for each in outcomes),
        "refusal_ms": quantiles(refused_ms),
    }


def compared(runs: Sequence[Run]) -> list[Json]:
    """Each load and retry behaviour over all rounds. ``ratio`` is the goodput over that of the same
    rounds without retries, and ``error`` its standard error by the scatter of the rounds' own
    ratios; ``None`` with one round."""
    rows = summary(runs, *CELL, more=_figures)
    for row in rows:
        own, bases = (
            [run for run in runs if run.labels == {"load": row["load"], "retries": retries}]
            for retries in (row["retries"], "none")
        )
        row["ratio"], row["error"] = _ratio(own, bases)
    return rows


def _ratio(runs: Sequence[Run], bases: Sequence[Run]) -> tuple[float, float | None]:
    """Ratio of the goodputs, and its standard error. 1 where nothing was served without retries."""
    goodputs = ((goodput(run), goodput(base)) for run, base in zip(runs, bases, strict=True))
    pairs = [(own, base) for own, base in goodputs if base]
    if not pairs:
        return 1.0, None
    each = [above / below for above, below in pairs]
    error = round(stdev(each) / sqrt(len(each)), 3) if len(each) > 1 else None
    return round(sum(above for above, _ in pairs) / sum(below for _, below in pairs), 3), error
