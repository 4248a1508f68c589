"""What one real engine takes under Sluice and under vLLM's own server while nothing is sent: the
start to the first answer, that of a second engine beside it, memory, and processor time."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import psutil
from rich.table import Table

from sluice.benchmarks.experiments.grid import grouped
from sluice.benchmarks.live import peers, systems
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.engine import chat_body
from sluice.benchmarks.live.report import Meter, table
from sluice.deploy.local import StoppedError

SYSTEMS: Final = ("stock", "sluice")

SETTLE_S: Final = 10.0
"""Time after the first answer in which what the start has left undone may end, seconds."""

REST_S: Final = 15.0

_CACHES: Final = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

_FIGURES: Final = ("start_s", "nothing_cached_s", "second_s", "memory_mib", "cores", "processes")

_SCALED: Final = {
    "autoscaling": {
        "max_replicas": 2,
        "policy": "ongoing_requests",
        "policy_options": {
            "target_ongoing_requests": 0.1,
            "look_back_period_s": 1,
            "upscale_delay_s": 0,
        },
    }
}
"""A second replica starts with the first requests."""


def measured(bench: systems.Bench, rounds: int) -> list[Json]:
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
                row |= _at_rest(bench, system)
            bench.say(f"starting {name} with nothing cached")
            begun_s = time.monotonic()
            with _nothing_cached(), peers.SYSTEMS[name].start(setting)(bench):
                row["nothing_cached_s"] = round(time.monotonic() - begun_s, 1)
            runs.append(row)
        bench.say(f"starting a second replica, round {number + 1} of {rounds}")
        second_s = _second_replica_s(bench, setting)
        for run in runs[-len(SYSTEMS) :]:
            # Of vLLM's own server a second engine is another one.
            run["second_s"] = second_s if run["system"] == "sluice" else run["start_s"]
    return runs


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """What starts in the block finds no compiled code and no profile."""
    before = dict(os.environ)
    with TemporaryDirectory() as folder:
        os.environ |= dict.fromkeys(("HOME", *_CACHES), folder)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _second_replica_s(bench: systems.Bench, setting: peers.Setting) -> float:
    """Time from the begin of a second replica's process until it can get requests, beside one that
    does nothing meanwhile, seconds."""

    def config_on(_: systems.Bench, port: int) -> Json:
        config = peers.sluice_config({}, {}, setting, port)
        return config | {"replica": config["replica"] | _SCALED}

    with systems.sluice("sluice", config_on)(bench) as system:
        (url,) = system.urls
        chat = f"{url}/v1/chat/completions"
        request = urllib.request.Request(chat, chat_body(200), {"content-type": "application/json"})

        def begun() -> bool:
            with urllib.request.urlopen(request, timeout=systems.START_LIMIT_S) as answer:
                answer.read()
            return len(_replicas(system)) > 1

        def ready() -> bool:
            return systems.metrics(url, state="fresh").get("sluice_replicas") == 2

        if not all(
            systems.until(done, systems.START_LIMIT_S, bench.stop) for done in (begun, ready)
        ):
            raise systems.LeftOutError("no second replica started")
        return round(time.time() - max(each.create_time() for each in _replicas(system)), 1)


def _replicas(system: systems.System) -> list[psutil.Process]:
    """The processes of replicas, also before they are workers of Ray."""
    found = []
    for root in map(psutil.Process, system.processes):
        for raylet in root.children(recursive=True):
            with suppress(psutil.Error):  # one that has ended
                if raylet.name() == "raylet":
                    found += [each for each in raylet.children() if _serves(each)]
    return found


def _serves(process: psutil.Process) -> bool:
    title = " ".join(process.cmdline())
    return ":Replica" in title or "sluice.replica.worker" in title


def _at_rest(bench: systems.Bench, system: systems.System) -> Json:
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
            figure: round(row[figure] / base[figure], 2)
            for figure in ("start_s", "second_s", "memory_mib")
        }
    return rows


def as_table(rows: Sequence[Json]) -> Table:
    """:func:`summary` as a table."""
    columns = ("system", *_FIGURES, "ratio.start_s", "ratio.second_s", "ratio.memory_mib")
    return table(rows, *columns, title="one engine, medians over rounds")
