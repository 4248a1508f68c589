"""Figures of runs as plain data, tables of them, and used resources. Clients' clocks judge
requests; one without an answer has missed all of its objectives."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import sqrt
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
from rich.table import Table

from sluice.benchmarks.live.client import End, Json, Outcome
from sluice.benchmarks.report import Estimate

# Resource usage of a cluster's processes on this machine, by kind of process.
#
# Covers the calling process and all its descendants: Ray's processes are its children.

CORES = "engine cores"
"""vLLM's processes that plan and compute."""

_KINDS = (
    ("VLLM::", CORES),
    ("vllm.entrypoints", "replicas"),
    ("ReplicaServer", "replicas"),
    (":Replica", "replicas"),
    ("sluice.replica.worker", "replicas"),
    (":Server:", "replicas"),
    (":Router", "routers"),
    (":OpenAiIngress", "routers"),
    ("DetachedController", "controller"),
    ("DetachedObserver", "observer"),
    ("ServeController", "Serve controller"),
    ("ProxyActor", "Serve"),
)
"""Part of a process's title -> its kind; the first match applies."""

OWN = "client"


class Used(NamedTuple):
    """Processor time in cores and in seconds, and resident memory at the end, MiB."""

    cores: float
    memory_mib: float
    cpu_s: float = 0.0


class Usage(NamedTuple):
    """Usage between two moments by kind of process, and the machine's busy share, all programs."""

    kinds: dict[str, Used]
    machine_busy: float


class Process(NamedTuple):
    """Processor time (seconds), resident memory (MiB), and its part not shared through files."""

    kind: str
    cpu_s: float
    resident_mib: float
    own_mib: float


class Meter:
    """Measures :func:`processes` until :meth:`stop`; those that ended in between do not count."""

    def __init__(self, roots: Mapping[int, str] | None = None) -> None:
        self._roots = roots
        self._begun = processes(roots)
        self._begun_s = time.monotonic()
        psutil.cpu_percent()

    def stop(self) -> Usage:
        """The usage since the meter was created."""
        busy = psutil.cpu_percent() / 100
        elapsed_s = time.monotonic() - self._begun_s
        now = processes(self._roots)
        memory: dict[str, float] = defaultdict(float)
        for each in now.values():
            memory[each.kind] += each.resident_mib
        kinds = {
            kind: Used(round(seconds / elapsed_s, 3), round(memory[kind], 1), seconds)
            for kind, seconds in sorted(spent(self._begun, now).items())
        }
        return Usage(kinds, round(busy, 3))


def processes(roots: Mapping[int, str] | None = None) -> dict[int, Process]:
    """Processes by id below ``roots`` (or this one), with their kind: given, or by title."""
    found: dict[int, Process] = {}
    own = psutil.Process().pid
    for root, kind in ({own: ""} if roots is None else roots).items():
        with suppress(psutil.Error):
            first = psutil.Process(root)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):  # it ended while we looked
                    named = OWN if roots is None and process.pid == own else kind
                    found[process.pid] = _look(process, named)
    return found


def _look(process: psutil.Process, kind: str) -> Process:
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        return Process(
            kind or kind_of(" ".join(process.cmdline())),
            times.user + times.system,
            memory.rss / 2**20,
            (memory.rss - getattr(memory, "shared", 0)) / 2**20,
        )


def spent(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, float]:
    """Processor seconds by kind of process; one that ended in between is not counted."""
    sums: dict[str, float] = {}
    for pid, each in after.items():
        begun_s = before[pid].cpu_s if pid in before else 0.0
        sums[each.kind] = sums.get(each.kind, 0.0) + each.cpu_s - begun_s
    return sums


def kind_of(title: str) -> str:
    """The kind of a cluster's process, by its title."""
    return next((kind for part, kind in _KINDS if part in title), "Ray")


GUARANTEED, BEST_EFFORT = "guaranteed", "best-effort"
MEDIAN_P99: Final = (0.5, 0.99)
AT: Final = (0.5, 0.95, 0.99)
_MEANS: Final = ("attained", "goodput", "goodput_tokens", "tokens", "kept", "cpu_s", "engine_cpu_s")
_Z = 1.96  # of a two-sided interval of 95 % under a normal distribution


class Run(NamedTuple):
    """One run: its labels, such as system and load; how long its arrivals lasted, seconds; the
    outcomes of its requests; the usage of the system's processes, and the routers' counts,
    meanwhile."""

    labels: Mapping[str, Any]
    seconds: float
    outcomes: Sequence[Outcome]
    usage: Usage
    counts: Mapping[str, int] = {}


def figures(runs: Sequence[Run]) -> Json:
    """The figures of runs: those of ``of_class``; ``goodput``: requests that met all objectives per
    second of arrivals."""
    outcomes = [each for run in runs for each in run.outcomes]
    classes = by_class(outcomes, AT)
    every = classes.pop("all")
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    good = [each for each in outcomes if each.attained]
    kept = sum(each.admission == GUARANTEED for each in good)
    seconds = sum(run.seconds for run in runs)
    ends_s = ([run.seconds, *(each.ended_s or 0.0 for each in run.outcomes)] for run in runs)
    return {
        **every,
        "attained_interval": interval(len(good), len(outcomes)),
        "kept_interval": interval(kept, every["guaranteed"]),
        "objectives": {
            name: share(sum(each.met[place] for each in outcomes), len(outcomes))
            for place, name in enumerate(("ttft", "tpot"))
        },
        "classes": {name: each["attained"] for name, each in classes.items()},
        "by_class": classes,
        "goodput": round(len(good) / seconds, 3),
        "goodput_tokens": round(sum(each.output_tokens for each in good) / seconds, 1),
        "tokens": round(sum(each.output_tokens for each in answered) / sum(map(max, ends_s)), 1),
        "late_ms": milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
        **_used([run.usage for run in runs]),
    }


def _used(usages: Sequence[Usage]) -> Json:
    every = [own for usage in usages for own in usage.kinds.items()]
    engines = [used for kind, used in every if kind == CORES]
    return {
        "cpu_s": round(sum(used.cpu_s for _, used in every) / len(usages), 2),
        "engine_cpu_s": round(sum(used.cpu_s for used in engines) / len(usages), 2),
        "busy": round(fmean(each.machine_busy for each in usages), 3),
    }


def summary(
    runs: Sequence[Run], *labels: str, more: Callable[[Sequence[Run]], Json] = lambda _: {}
) -> list[Json]:
    """A row of figures for the runs with equal ``labels``. ``range``: half of the 95 %
    t-interval."""
    known = {name: [*dict.fromkeys(run.labels[name] for run in runs)] for name in labels}

    def place(run: Run) -> list[int]:
        return [known[name].index(run.labels[name]) for name in labels]

    rows = []
    for own in (list(group) for _, group in groupby(sorted(runs, key=place), place)):
        each = [figures([run]) for run in own]
        ranges = {name: _half([row[name] for row in each]) for name in _MEANS}
        cell = {name: own[0].labels[name] for name in labels}
        rows.append({**cell, "rounds": len(own), **figures(own), **more(own), "range": ranges})
    return rows


def single(runs: Iterable[Run]) -> list[Json]:
    """The labels and figures of each run."""
    return [{**run.labels, **figures([run])} for run in runs]


def _half(values: Sequence[float | None]) -> float | None:
    half = Estimate.of([value for value in values if value is not None]).half_width
    return round(half, 4) if half == half else None  # not a number with one round


def of_class(outcomes: Sequence[Outcome], at: Sequence[float] = MEDIAN_P99) -> Json:
    """Figures of some requests. ``attained``: of all sent; ``kept``: of the promised ones."""
    ends = Counter(each.end for each in outcomes)
    promised = [each for each in outcomes if each.admission == GUARANTEED]
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    return {
        "sent": len(outcomes),
        "guaranteed": len(promised),
        "best_effort": sum(each.admission == BEST_EFFORT for each in outcomes),
        **{end.value: ends[end] for end in End},
        "attained": share(sum(each.attained for each in outcomes), len(outcomes)),
        "kept": share(sum(each.attained for each in promised), len(promised)),
        "ttft_ms": milliseconds([each.ttft_s or 0.0 for each in answered], at),
        "tpot_ms": milliseconds([each.tpot_s or 0.0 for each in answered], at),
    }


def by_class(outcomes: Sequence[Outcome], at: Sequence[float] = MEDIAN_P99) -> dict[str, Json]:
    """:func:`of_class` of each service class, and of all requests."""
    found = {}
    for name in sorted({each.slo.service_class for each in outcomes}):
        found[name] = of_class([each for each in outcomes if each.slo.service_class == name], at)
    return {**found, "all": of_class(outcomes, at)}


def share(count: float, of: float) -> float | None:
    """A share; ``None`` of nothing."""
    return round(count / of, 4) if of else None


def interval(count: int, of: int) -> list[float] | None:
    """The 95 % confidence interval of a share (Wilson 1927); ``None`` if ``of`` is 0."""
    if not of:
        return None
    mean, spread = count / of, _Z * _Z / of
    middle = mean + spread / 2
    reach = _Z * sqrt(mean * (1 - mean) / of + spread / (4 * of))
    ends = (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)
    return [round(min(max(end, 0.0), 1.0), 4) for end in ends]


def quantiles(values: Any, at: Sequence[float] = MEDIAN_P99, digits: int = 1) -> list[float]:
    """Quantiles, by default median and 99th percentile; zeros without values."""
    found = np.quantile(values if len(values) else [0.0], at)
    return [round(float(value), digits) for value in found]


def milliseconds(values_s: Sequence[float], at: Sequence[float] = MEDIAN_P99) -> list[float] | None:
    """Quantiles of seconds, in milliseconds; ``None`` without values."""
    return quantiles(1e3 * np.array(values_s), at) if values_s else None


def table(rows: Iterable[Mapping[str, Any]], *columns: str, title: str) -> Table:
    """A table with a column for each key; dots in a key lead into nested mappings."""
    headings = (each.replace(".", " ").replace("_", " ") for each in columns)
    shown = Table(*headings, title=title)
    for row in rows:
        shown.add_row(*(text(_value(row, column)) for column in columns))
    return shown


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def text(value: Any) -> str:
    """A value in a table's cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return " / ".join(map(text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(each)}" for key, each in value.items())
    return str(value)
