"""Promises on two real vLLM replicas on CPUs: ``sluice bench promises --real``.

All are children of one process, so that the kernel shares cores between them, not sessions."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any, Final

import click
import psutil
from rich.table import Table

from sluice.benchmarks.experiments.kinds import Kind
from sluice.benchmarks.experiments.promises import LEVEL, MARGINS, NONE
from sluice.benchmarks.live import report, systems
from sluice.benchmarks.live.client import End, Json, Outcome
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import Pattern, body_of
from sluice.benchmarks.live.systems import (
    IN_FLIGHT,
    Bench,
    LeftOutError,
    System,
    campaign,
    capacity,
    objectives,
    router,
    run,
    sluice,
    until,
)
from sluice.benchmarks.options import number_option, show
from sluice.controller.config import ControllerConfig
from sluice.router.config import ServiceClass
from sluice.simulation.generators import Gamma

LOADS: Final = (0.7, 1.0, 1.4)
QUIET, BUSY = "quiet", "busy"
REPLICAS: Final = 2
CONTROLLERS: Final = {
    NONE: ControllerConfig(promise_level=1e-9),
    MARGINS: ControllerConfig(promise_level=LEVEL),
}
"""By system. At the first system's level the margin is the lowest score so far, so no margin."""

WARM_UP_S: Final = 15.0
"""How long it is saturated before finished requests count for its capacity."""


OPTIONS: Final = (
    click.option(
        "--real",
        is_flag=True,
        help="Two vLLM replicas here, no simulation: 12 runs for each seed. One takes 8 minutes.",
    ),
    number_option(
        "--seconds",
        default=20.0,
        least=2,
        most=3_600,
        words="With --real: how long the arrivals of a run last.",
    ),
)
"""Of :func:`measure`, for ``options.with_real``."""


def measure(seconds: float, seeds: Sequence[int], as_json: bool) -> None:
    """Run every load under each system; load 1 is the throughput of the first."""
    capacities: dict[str, float] = {}
    runs: list[report.Run] = []
    with campaign() as bench:
        for name in CONTROLLERS:
            with sluice("sluice", partial(make_config, name))(bench) as system:
                capacities[name] = capacity_of(bench, system, REPLICAS, seconds, seeds[0])
                bench.say(f"{name}: capacity {capacities[name]:.2f} requests/s")
                # Quiet ones first: what is learned on a busy machine persists for a while.
                for machine, seed, load in product((QUIET, BUSY), seeds, LOADS):
                    labels = dict(zip(LABELS, (name, machine, load, seed), strict=True))
                    rate = load * capacities[next(iter(CONTROLLERS))]
                    runs.append(_run(bench, system, rate, seconds, labels))
                    bench.say(f"{name}, {machine}, load {load}, seed {seed}: done")
    load_1, rows = next(iter(capacities.values())), cells(runs)
    shown = {"load_1": load_1, "capacities": capacities, "cells": rows, "runs": report.single(runs)}
    show(shown, tables(rows, load_1), as_json)


def make_config(system: str, _: Bench, port: int) -> Json:
    """The replicas under the controller of a system."""
    parts = {"engine": {"served_model_name": MODEL}, "replica": {"count": REPLICAS}}
    controller = CONTROLLERS[system].model_dump(mode="json")
    return {**parts, "router": router(port, CLASSES), "controller": controller}


def _fresh(url: str) -> float:
    """Number of replicas that report to the controller."""
    with suppress(OSError):  # the page is not there yet
        return systems.metrics(url, state="fresh").get("sluice_replicas", 0.0)
    return 0.0


def capacity_of(bench: Bench, system: System, replicas: int, seconds: float, seed: int) -> float:
    """Requests a second without objectives, once all replicas report to the controller."""
    (url,) = system.urls
    if not until(lambda: _fresh(url) >= replicas, 300.0, bench.stop):
        raise LeftOutError(f"{replicas} replicas have not started")
    drawn = (each._replace(slo=SLOS[NO_OBJECTIVE]) for each in PATTERN.drawn(seed))
    load = body_of("capacity"), IN_FLIGHT * replicas, WARM_UP_S, seconds
    return capacity(bench, system, drawn, *load)


def _run(
    bench: Bench, system: System, rate: float, seconds: float, labels: Mapping[str, Any]
) -> report.Run:
    """One run, its machine's disturbance, and the routers' counts of promises."""
    machine, seed = labels["machine"], labels["seed"]
    workload = PATTERN.workload(rate, seconds, seed, SLOS)
    (url,) = system.urls
    before, body = _router_promises(url), body_of(f"{machine} {seed} {rate}")
    with busy_loop(seconds / 2) if machine == BUSY else nullcontext():
        found = run(bench, system, labels, seconds, workload, body=body, exact=False)
    wanted = before.total() + sum(each.admission == report.GUARANTEED for each in found.outcomes)
    # A router's metrics page counts a finished request somewhat later.
    until(lambda: _router_promises(url).total() >= wanted, 3.0, bench.stop)
    by_router = _router_promises(url)
    by_router.subtract(before)
    return found._replace(counts=by_router)


def others_cores(usage: report.Usage) -> float:
    """Cores that processes of others kept busy."""
    own = sum(each.cores for each in usage.kinds.values())
    return round(max(0.0, usage.machine_busy * (psutil.cpu_count() or 1) - own), 2)


def _router_promises(url: str) -> Counter[str]:
    """Guarantees so far of all classes by the routers' clocks, by outcome: kept or missed."""
    pages = {outcome: systems.metrics(url, outcome=outcome) for outcome in ("kept", "missed")}
    name = "sluice_promises_total"
    return Counter({outcome: int(page.get(name, 0)) for outcome, page in pages.items()})


@contextmanager
def busy_loop(after_s: float) -> Iterator[psutil.Process]:
    """A process that keeps one core busy, after a time."""
    program = f"import time; time.sleep({after_s})\nwhile True: pass"
    loop = subprocess.Popen([sys.executable, "-c", program])
    try:
        process = psutil.Process(loop.pid)
        process.cpu_affinity(process.cpu_affinity()[:1])
        yield process
    finally:
        loop.kill()
        loop.wait()


# The load.

KINDS: Final = {
    "chat": Kind(0.6, (10, 250), (8, 120)),
    "code": Kind(0.2, (150, 1_200), (4, 50)),
    "document": Kind(0.2, (700, 1_900), (16, 150)),
}
NO_OBJECTIVE: Final = "no-objective"
"""The class of requests that are never guaranteed: no margin is learned from them."""

CLASSES: Final = {
    "chat": ServiceClass(ttft_ms=600, tpot_ms=120),
    "code": ServiceClass(ttft_ms=2_500, tpot_ms=150),
    "document": ServiceClass(ttft_ms=9_000, tpot_ms=300),
    NO_OBJECTIVE: ServiceClass(),
}
SLOS: Final = objectives(CLASSES)
PATTERN: Final = Pattern("promises", partial(Gamma, cv=2**0.5), kinds=KINDS)

# The report.

ALL: Final = "all"
"""The load of the line that sums up all loads."""

CELL: Final = ("machine", "load", "system")
LABELS: Final = ("system", "machine", "load", "seed")


def cells(runs: Sequence[report.Run]) -> list[Json]:
    """Each machine, load and system over all seeds, and each machine and system over all loads."""
    every = [run._replace(labels={**run.labels, "load": ALL}) for run in runs]
    return report.summary([*runs, *every], *CELL, more=_figures)


def _figures(runs: Sequence[report.Run]) -> Json:
    """Of the promises, ``goodput`` those kept per second, and the worst disturbance."""
    outcomes = [each for run in runs for each in run.outcomes]
    promised = [each for each in outcomes if each.admission == report.GUARANTEED]
    kept, seconds = sum(each.attained for each in promised), sum(run.seconds for run in runs)
    by_router = sum((Counter(run.counts) for run in runs), Counter[str]())
    return {
        "seconds": seconds,
        "kept_by_router": report.share(by_router["kept"], by_router.total()),
        "goodput": round(kept / seconds, 3),
        "late": lateness(promised),
        "others_cores": max(others_cores(run.usage) for run in runs),
    }


def lateness(outcomes: Sequence[Outcome]) -> list[float]:
    """P50 and P95 of late first tokens, in multiples of the TTFT."""
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    late = [(each.ttft_s or 0.0) / each.slo.columns[0] - 1 for each in answered]
    return report.quantiles([each for each in late if each > 0], (0.5, 0.95), 4)


def tables(rows: Sequence[Json], capacity: float) -> list[Table]:
    """The cells as tables: guarantees, and checks of the run."""
    kept = ("sent", "guaranteed", "kept", "kept_interval", "goodput", "attained", "late")
    trust = ("rounds", "seconds", *(end.value for end in End if end is not End.ANSWERED))
    checks = ("late_ms", "kept", "kept_by_router", "others_cores")
    first = f"guarantees as their client saw them; load 1 is {capacity:.2f} requests/s; late: TTFT"
    return [
        report.table(rows, *CELL, *kept, title=first),
        report.table(rows, *CELL, *trust, *checks, title="whether these figures can be trusted"),
    ]
