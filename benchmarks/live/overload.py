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

from collections.abc import Mapping, Sequence
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Final, NamedTuple

import click
import numpy as np
from rich.console import Console

from sluice.benchmarks.live.application import application, simulated
from sluice.benchmarks.live.client import Outcome
from sluice.benchmarks.live.loads import LIGHT_ENGINE
from sluice.benchmarks.live.report import Json, milliseconds, of_class, quantiles, share, table
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
    runs: list[Run] = []
    with application(config) as running:
        # Of the heaviest kind, so that memory that grows once in a storm has grown.
        storm = window(make_load(10 * rate, 60.0, seed), 0.0, WARM_UP_S)
        running.send(storm, patience_s=PATIENCE_S)
        for turn, load in product(range(rounds), loads):
            workload = make_load(load * rate, seconds, seed + turn)
            for retries in list(_SETTINGS)[:: -1 if turn % 2 else 1]:
                before = held()
                outcomes, usage = running.send_metered(workload, patience_s=_SETTINGS[retries])
                runs.append(Run(load, retries, seconds, outcomes, usage, before, held()))
                say(f"{load:g}x, retries {retries}: {runs[-1].goodput:.2f}/s in time")
    rows = summary(runs)
    cell = ("load", "retries")
    served = ("sent", "goodput", "ratio", "error", "kept", "lost", "failed")
    cost = ("refusals", "refusal_ms", "late_ms", "busy", "cores.routers", "cores.client")
    tables = [
        table(rows, *cell, *served, title=f"served in time, mean of {rounds} rounds"),
        table(rows, *cell, *cost, "memory_mib.routers", "memory_mib.HAProxy", title="resources"),
    ]
    every = [figures([run]) for run in runs]
    show({"summary": rows, "runs": every}, tables, as_json)
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


class Run(NamedTuple):
    """One run: its load and retry behaviour, how long its arrivals lasted, seconds, its outcomes,
    the usage, and the memory before and after it, MiB, by kind of process."""

    load: float
    retries: str
    seconds: float
    outcomes: Sequence[Outcome]
    usage: Usage
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """Requests answered within their objective, per second, that ended between
        :data:`WARM_UP_S` and the time of the last arrival."""
        ended_s = (each.ended_s or 0.0 for each in self.outcomes if each.attained)
        in_time = sum(WARM_UP_S <= each_s <= self.seconds for each_s in ended_s)
        return in_time / (self.seconds - WARM_UP_S)


def figures(runs: Sequence[Run]) -> Json:
    """The figures of all requests of some runs of one kind, and means over the runs. ``kept``:
    answers within their objective; ``memory_mib``: before the first and after the last run."""
    outcomes = [each for run in runs for each in run.outcomes]
    found = of_class(outcomes)
    refused_ms = [1e3 * each.refused_s / each.refusals for each in outcomes if each.refusals]
    first, last = runs[0].before, runs[-1].after
    cores = {
        kind: [run.usage.kinds[kind].cores for run in runs if kind in run.usage.kinds]
        for kind in runs[0].usage.kinds
    }
    return {
        "load": runs[0].load,
        "retries": runs[0].retries,
        "rounds": len(runs),
        **found,
        "goodput": round(fmean(run.goodput for run in runs), 3),
        "kept": share(sum(each.attained for each in outcomes), found["answered"]),
        "lost": found["silent"] + found["cut"],
        "refusals": sum(each.refusals for each in outcomes),
        "refusal_ms": quantiles(refused_ms),
        "late_ms": milliseconds([each.late_s for each in outcomes]),
        "busy": round(fmean(run.usage.machine_busy for run in runs), 3),
        "cores": {kind: round(fmean(each), 3) for kind, each in cores.items()},
        "memory_mib": {kind: [first.get(kind, 0.0), last[kind]] for kind in last},
    }


def summary(runs: Sequence[Run]) -> list[Json]:
    """Each load and retry behaviour over all rounds, in the order of ``runs``.

    ``ratio`` is the goodput over that of the same rounds without retries, and ``error`` its
    standard error by the scatter of the rounds' own ratios; ``None`` with one round.
    """
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.retries), []).append(run)
    rows = []
    for (load, _), own in groups.items():
        ratio, error = _ratio(own, groups[load, "none"])
        rows.append({**figures(own), "ratio": ratio, "error": error})
    return rows


def _ratio(runs: Sequence[Run], bases: Sequence[Run]) -> tuple[float, float | None]:
    """Ratio of the goodputs, and its standard error. 1 where nothing was served without retries."""
    goodputs = ((run.goodput, base.goodput) for run, base in zip(runs, bases, strict=True))
    pairs = [(own, base) for own, base in goodputs if base]
    if not pairs:
        return 1.0, None
    each = [above / below for above, below in pairs]
    error = round(stdev(each) / sqrt(len(each)), 3) if len(each) > 1 else None
    return round(sum(above for above, _ in pairs) / sum(below for _, below in pairs), 3), error
