"""What one real engine takes under Sluice and under vLLM's own server while nothing is sent: the
start to the first answer, memory, and processor time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import psutil
from rich.table import Table

from sluice.benchmarks.experiments.grid import grouped
from sluice.benchmarks.live import peers
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.report import Meter, table
from sluice.benchmarks.live.systems import Bench, System
from sluice.deploy.local import StoppedError

SYSTEMS: Final = ("stock", "sluice")

SETTLE_S: Final = 10.0
"""Time after the first answer in which what the start has left undone may end, seconds."""

REST_S: Final = 15.0

_FIGURES: Final = ("start_s", "memory_mib", "cores", "processes")


def measured(bench: Bench, rounds: int) -> list[Json]:
    """Each system alone, once a round, with the same model and arguments of vLLM."""
    setting = peers.setting_of(peers.LOCAL, {}, 1)
    runs = []
    for number in range(rounds):
        for name in SYSTEMS[:: -1 if number % 2 else 1]:
            bench.say(f"starting {name}, round {number + 1} of {rounds}")
            begun_s = time.monotonic()
            with peers.SYSTEMS[name].start(setting)(bench) as system:
                start_s = time.monotonic() - begun_s
                row = {"system": name, "round": number, "start_s": round(start_s, 1)}
                runs.append(row | _at_rest(bench, system))
    return runs


def _at_rest(bench: Bench, system: System) -> Json:
    bench.stop.wait(SETTLE_S)
    meter = Meter(system.processes)
    bench.stop.wait(REST_S)
    if bench.stop.is_set():
        raise StoppedError("stopped in the middle of a measurement")
    kinds = meter.stop().kinds
    cores = {kind: used.cores for kind, used in kinds.items()}
    found = [
        each
        for root in map(psutil.Process, system.processes)
        for each in (root, *root.children(recursive=True))
    ]
    # Of memory that several processes share, each counts its part.
    memory = sum(each.memory_full_info().pss for each in found)
    return {
        "memory_mib": round(memory / 2**20),
        "cores": round(sum(cores.values()), 3),
        "processes": len(found),
        "cores_by_kind": cores,
    }


def summary(runs: Sequence[Json]) -> list[Json]:
    """Medians over rounds, and their ratios to vLLM's own server."""
    rows = [
        {"system": name} | {figure: median(run[figure] for run in own) for figure in _FIGURES}
        for (name,), own in grouped(runs, "system").items()
    ]
    base = next(row for row in rows if row["system"] == SYSTEMS[0])
    for row in rows:
        row["ratio"] = {
            figure: round(row[figure] / base[figure], 2) for figure in ("start_s", "memory_mib")
        }
    return rows


def as_table(rows: Sequence[Json]) -> Table:
    """:func:`summary` as a table."""
    columns = ("system", *_FIGURES, "ratio.start_s", "ratio.memory_mib")
    return table(rows, *columns, title="one engine, medians over rounds")
