"""The judge and the report of ``sluice bench peers``.

Every system is judged by its client's clocks and by the same objectives, whether it knows them or
not. A request that was refused, or not answered, has missed all of its objectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
from rich.table import Table

from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.report import Json, by_class, interval, milliseconds, share, table
from sluice.benchmarks.live.resources import CORES
from sluice.simulation.estimate import Estimate
from sluice.simulation.planning.plots import Chart, Point

AT: Final = (0.5, 0.95, 0.99)
CELL: Final = ("pattern", "load", "system")
_MEANS: Final = ("attained", "goodput", "goodput_tokens", "tokens", "kept", "cpu_s", "engine_cpu_s")
_CURVE = 100


class Run(NamedTuple):
    """One run: its labels, how long its arrivals lasted, seconds, its outcomes, the processor
    seconds of the system by kind of process until the last request ended, and the busy share of the
    machine."""

    pattern: str
    load: float
    system: str
    round: int
    seconds: float
    outcomes: Sequence[Outcome]
    cpu_s: Mapping[str, float]
    busy: float


def figures(runs: Sequence[Run]) -> Json:
    """The figures of all requests of some runs of one cell.

    ``attained``: share of all sent requests that met every objective; ``objectives``: the same of
    each objective; ``classes``: of each class. ``goodput`` counts requests that met all of their
    objectives, per second of arrivals, ``goodput_tokens`` their output tokens; ``tokens`` are those
    of all answers until the last request ended. TTFT and TPOT are quantiles of the answers at
    :data:`AT`, ``worst_tpot_ms`` those of the running maximum.
    """
    outcomes = [each for run in runs for each in run.outcomes]
    classes = by_class(outcomes, AT)
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    good = [each for each in outcomes if each.attained]
    seconds = sum(run.seconds for run in runs)
    ends_s = ([run.seconds, *(each.ended_s or 0.0 for each in run.outcomes)] for run in runs)
    took_s = sum(map(max, ends_s))
    cpu_s = [sum(run.cpu_s.values()) for run in runs]
    every = classes.pop("all")
    return {
        **every,
        "attained_interval": interval(len(good), len(outcomes)),
        "objectives": {
            name: share(sum(each.met[place] for each in outcomes), len(outcomes))
            for place, name in enumerate(("ttft", "tpot"))
        },
        "classes": {name: each["attained"] for name, each in classes.items()},
        "by_class": classes,
        "goodput": round(len(good) / seconds, 3),
        "goodput_tokens": round(sum(each.output_tokens for each in good) / seconds, 1),
        "tokens": round(sum(each.output_tokens for each in answered) / took_s, 1),
        "worst_tpot_ms": milliseconds([each.worst_tpot_s or 0.0 for each in answered], AT),
        "cpu_s": round(sum(cpu_s) / len(runs), 2),
        "engine_cpu_s": round(sum(run.cpu_s.get(CORES, 0.0) for run in runs) / len(runs), 2),
        "late_ms": milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
        "busy": round(sum(run.busy for run in runs) / len(runs), 3),
    }


def summary(runs: Sequence[Run]) -> list[Json]:
    """The figures of each pattern, load and system over all rounds. ``range`` has half of the 95 %
    t-interval of the mean over the rounds, ``None`` with one round."""

    def cell(run: Run) -> tuple[str, float]:
        return run.pattern, run.load

    rows = []
    names = list(dict.fromkeys(run.system for run in runs))
    order = sorted(runs, key=lambda run: (*cell(run), names.index(run.system)))
    for labels, group in groupby(order, lambda run: (*cell(run), run.system)):
        own = list(group)
        each = [figures([run]) for run in own]
        ranges = {name: _half(each, name) for name in _MEANS}
        at = dict(zip(CELL, labels, strict=True))
        rows.append({**at, "rounds": len(own), **figures(own), "range": ranges})
    return rows


def _half(rows: Sequence[Json], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    half = Estimate.of(known).half_width
    return round(half, 4) if half == half else None  # not a number with one round


def tables(rows: Sequence[Json]) -> list[Table]:
    """The summary as tables."""
    classes = [f"classes.{name}" for name in rows[0]["classes"]] if rows else []
    met = ("attained", "range.attained", "attained_interval", "objectives.ttft", "objectives.tpot")
    good = ("goodput", "range.goodput", "goodput_tokens", "tokens", "ttft_ms", "tpot_ms")
    ends = [end.value for end in End if end not in (End.ANSWERED, End.LEFT)]
    rest = ("guaranteed", "kept", "cpu_s", "engine_cpu_s", "busy", "late_ms")
    return [
        table(rows, *CELL, "sent", *met, *classes, title="share of requests within objectives"),
        table(rows, *CELL, *good, "worst_tpot_ms", title="goodput; P50 / P95 / P99"),
        table(rows, *CELL, *ends, *rest, title="refusals, promises and processor time"),
    ]


def attainment(rows: Sequence[Json]) -> dict[str, Chart]:
    """By name: attainment against load for each pattern of the summary, with half of the interval
    over requests."""
    return {
        f"attainment-{pattern}": Chart(
            f"Requests within all objectives, {pattern}",
            "load, 1 is the capacity of stock vLLM",
            "share of sent requests",
            {
                system: _by_load(rows, pattern, system)
                for system in dict.fromkeys(row["system"] for row in rows)
            },
        )
        for pattern in dict.fromkeys(row["pattern"] for row in rows)
    }


def first_tokens(runs: Sequence[Run]) -> dict[str, Chart]:
    """By name: the distribution of TTFT for each pattern and load, as a share of all sent
    requests."""
    found = {}
    systems = dict.fromkeys(run.system for run in runs)
    for pattern, load in dict.fromkeys((run.pattern, run.load) for run in runs):
        own = [run for run in runs if (run.pattern, run.load) == (pattern, load)]
        curves = {system: _curve(own, system) for system in systems}
        found[f"ttft-{pattern}-{load:g}"] = Chart(
            f"Time to first token, {pattern}, load {load:g}",
            "seconds",
            "share of sent requests",
            {system: points for system, points in curves.items() if points},
        )
    return found


def _half_of(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2


def _by_load(rows: Sequence[Json], pattern: str, system: str) -> list[Point]:
    return [
        Point(row["load"], row["attained"], _half_of(row["attained_interval"]))
        for row in rows
        if (row["pattern"], row["system"]) == (pattern, system)
    ]


def _curve(runs: Sequence[Run], system: str) -> list[Point]:
    outcomes = [each for run in runs if run.system == system for each in run.outcomes]
    ttfts_s = [each.ttft_s for each in outcomes if each.end is End.ANSWERED]
    if not ttfts_s:
        return []
    at = np.linspace(0.0, 1.0, _CURVE + 1)
    values: Any = np.quantile(np.array(ttfts_s, dtype=float), at)
    whole = len(ttfts_s) / len(outcomes)
    return [Point(float(x), float(y) * whole, 0.0) for x, y in zip(values, at, strict=True)]
