"""Guarantees on two real vLLM replicas on this machine's CPUs, as their client sees them.

Run with ``sluice bench promises --real``. An open load in bursts of three classes, at shares of the
replicas' capacity, on a quiet machine and beside a busy loop on one core that begins in the middle;
first without margins and then with those of production. The two systems have equal engines and get
the same requests at the same times, but each is a new cluster. It first serves requests without
objectives, which correct the step models and teach no margin; then it keeps what it has learned.

With ``--simulated N`` there are N simulated engines in place of vLLM. Their steps take 1.3 times as
long as their profile predicts, and drift to 1.5 times as much and back, once in the time of a run.
In place of the busy loop one random replica process after another is stopped for 300 ms.

The client, the cluster and the busy loop are children of one process, so that the kernel shares the
cores between them and not between sessions. The loop has normal priority, as the engines have
(:mod:`sluice.deploy.ray_settings`). Check the client's lateness, the routers' count of the same
guarantees and the cores that other processes used, before you trust a figure.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import click
import numpy as np
import psutil
from rich.table import Table

from sluice.benchmarks.experiments.promises import LEVEL, MARGINS, NONE
from sluice.benchmarks.live.application import (
    Application,
    application,
    metrics,
    router_fields,
    simulated,
)
from sluice.benchmarks.live.client import (
    Body,
    End,
    Json,
    LoadError,
    Outcome,
    replay,
    saturated,
    stream_body,
)
from sluice.benchmarks.live.loads import LIGHT_ENGINE, objectives
from sluice.benchmarks.live.processes import in_own_process
from sluice.benchmarks.live.report import (
    GUARANTEED,
    interval,
    milliseconds,
    of_class,
    quantiles,
    share,
    table,
)
from sluice.benchmarks.live.resources import Meter, Usage, processes
from sluice.benchmarks.options import number_option, show
from sluice.controller.config import ControllerConfig
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.router.config import ServiceClass
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.simulation.workload import Arrival, Workload

LOADS: Final = (0.7, 1.0, 1.4)
QUIET, BUSY, PAUSES = "quiet", "busy", "pauses"
REPLICAS: Final = 2
SLOWER: Final = 1.3
"""Real over believed time of a simulated engine's steps, before it drifts."""

DRIFT: Final = 1.5
"""Factor on that time in the middle of a drift."""

PAUSE_S, PAUSE_EVERY_S = 0.3, 2.0
"""How long one replica process is stopped, and the mean time between two such pauses."""

CONTROLLERS: Final = {
    NONE: ControllerConfig(promise_level=1e-9),
    MARGINS: ControllerConfig(promise_level=LEVEL),
}
"""By system. At the first system's level the margin is the lowest score so far, so no margin."""

IN_FLIGHT: Final = 16
"""Concurrent requests that saturate a replica."""

WARM_UP_S: Final = 15.0
"""How long it is saturated before finished requests count for its capacity."""

_REPORTED_S = 3.0  # until a router's metrics page counts a finished request
_STARTED_S = 300.0


def with_real(command: click.Command) -> click.Command:
    """The command of the simulated experiment, with the real one behind ``--real``."""
    simulated = command.callback
    assert simulated is not None

    words = "Two vLLM replicas here, no simulation: 12 runs for each seed. One takes 8 minutes."
    instead = "With --real: number of simulated engines with wrong profiles in place of vLLM."
    lasts = "With --real: how long the arrivals of a run last."

    @click.option("--real", is_flag=True, help=words)
    @number_option("--simulated", "engines", default=0, least=0, most=64, words=instead)
    @number_option("--seconds", default=20.0, least=2, most=3_600, words=lasts)
    def callback(real: bool, engines: int, seconds: float, **options: Any) -> None:
        if real:
            first, seeds = options["first_seed"], options["seeds"]
            measure(engines, seconds, range(first, first + seeds), options["as_json"])
        else:
            simulated(**options)

    command.callback = callback
    command.params += reversed(callback.__click_params__)
    return command


class _Load(NamedTuple):
    """Number of simulated engines, 0 for vLLM; requests a second of load 1, ``None`` for the
    capacity; how long a run's arrivals last, seconds; and the seeds."""

    engines: int
    rate: float | None
    seconds: float
    seeds: Sequence[int]


class Run(NamedTuple):
    """One run: its labels, how long its arrivals lasted, seconds, its outcomes, the routers' count
    of its guarantees by outcome, and the cores that processes of others used meanwhile."""

    system: str
    machine: str
    load: float
    seed: int
    seconds: float
    outcomes: Sequence[Outcome]
    by_router: Counter[str]
    others_cores: float


def measure(engines: int, seconds: float, seeds: Sequence[int], as_json: bool) -> None:
    """Serve, run every load under each system, and show the results. Load 1 is the throughput of
    the first system."""
    capacities: dict[str, float] = {}
    runs: list[Run] = []
    rate = None
    for system in CONTROLLERS:
        load = _Load(engines, rate, seconds, seeds)
        capacities[system], found_runs, stopped = in_own_process(_measure, system, load)
        rate = rate or capacities[system]
        runs += found_runs
        if stopped:
            break
    every = [{**{at: getattr(run, at) for at in LABELS}, **figures([run])} for run in runs]
    found = {"load_1": rate, "capacities": capacities, "cells": cells(runs), "runs": every}
    show(found, tables(cells(runs), rate or 0.0), as_json)


def _measure(system: str, load: _Load) -> tuple[float, list[Run], bool]:
    """Serve with the controller of a system and run every load, those on a quiet machine first:
    what is learned on a busy machine persists for a while. Returns the capacity, the runs, and
    whether they were stopped early."""
    runs: list[Run] = []
    disturbed = PAUSES if load.engines else BUSY
    with TemporaryDirectory() as folder:
        config = make_config(system, load.engines, load.seconds, Path(folder))
        with application(config) as served:
            replicas = load.engines or REPLICAS
            if not served.until(lambda: _fresh(served.url) >= replicas, _STARTED_S):
                raise click.ClickException(f"{replicas} replicas have not started")
            capacity = _capacity(served, IN_FLIGHT * replicas, load)
            click.echo(f"{system}: capacity {capacity:.2f} requests/s", err=True)
            for machine, seed, share_of in product((QUIET, disturbed), load.seeds, LOADS):
                if served.stop.is_set():
                    break
                workload = make_load(share_of * (load.rate or capacity), load.seconds, seed)
                found = _run(served, workload, load.seconds, machine, seed)
                runs.append(Run(system, machine, share_of, seed, load.seconds, *found))
                click.echo(f"{system}, {machine}, load {share_of}, seed {seed}: done", err=True)
            return capacity, runs, served.stop.is_set()


def _fresh(url: str) -> float:
    """Number of replicas that report to the controller."""
    with suppress(OSError):  # the page is not there yet
        return metrics(url, state="fresh").get("sluice_replicas", 0.0)
    return 0.0


def make_config(system: str, engines: int, seconds: float, folder: Path) -> SluiceConfig:
    """Two vLLM replicas, or ``engines`` simulated ones, whose profile is written to ``folder``,
    under the controller of a system."""
    controller = CONTROLLERS[system].model_dump()
    router = {"default_class": next(iter(CLASSES))}
    if not engines:
        fields = {"replica": {"count": REPLICAS}, "router": router_fields(CLASSES) | router}
        return parse_config({**fields, "controller": controller})
    fixed, tokens, context = (
        LIGHT_ENGINE[name] / SLOWER for name in ("step_s", "token_s", "context_token_s")
    )
    profile = folder / "profile.json"
    believed = LatencyProfile.of("simulated", LinearLatency(fixed, tokens, context))
    profile.write_text(believed.to_json(), encoding="utf-8")
    drifting = {**LIGHT_ENGINE, "drift": DRIFT, "drift_period_s": seconds}
    return simulated(drifting, engines, CLASSES, router, profile, controller=controller)


def _capacity(served: Application, in_flight: int, load: _Load) -> float:
    """Requests a second with ``in_flight`` requests always in flight, without objectives.

    Raises:
        ClickException: a request was not answered.
    """
    chance = random.Random(f"capacity {load.seeds[0]}")
    drawn = (draw(chance, 0.0)._replace(slo=SLOS[NO_OBJECTIVE]) for _ in count())
    where = (served.completions, served.model)
    try:
        return asyncio.run(
            saturated(*where, drawn, body_of("capacity"), in_flight, WARM_UP_S, load.seconds)
        )
    except LoadError as error:
        raise click.ClickException(str(error)) from None


def _run(
    served: Application, workload: Workload, seconds: float, machine: str, seed: int
) -> tuple[list[Outcome], Counter[str], float]:
    """The measured part of a :class:`Run`."""
    body = body_of(f"{machine} {seed} {workload.rate}")
    sending = replay(served.completions, served.model, workload, body=body, exact=False)
    # Listing processes takes a while, in which the client would read nothing.
    disturbance = _disturbance(machine, seconds, seed)
    before = _router_promises(served.url)

    async def both() -> list[Outcome]:
        beside = asyncio.create_task(disturbance)
        try:
            outcomes = await sending
            meter.stop()
        finally:
            beside.cancel()
            (ended,) = await asyncio.gather(beside, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
        return outcomes

    meter = Meter()
    outcomes = asyncio.run(both())
    wanted = before.total() + sum(each.admission == GUARANTEED for each in outcomes)
    served.until(lambda: _router_promises(served.url).total() >= wanted, _REPORTED_S)
    by_router = _router_promises(served.url)
    by_router.subtract(before)
    return outcomes, by_router, others_cores(meter.usage)


def others_cores(usage: Usage) -> float:
    """Cores that processes of others kept busy."""
    own = sum(each.cores for each in usage.kinds.values())
    return round(max(0.0, usage.machine_busy * (psutil.cpu_count() or 1) - own), 2)


def _router_promises(url: str) -> Counter[str]:
    """Guarantees so far of all classes by the routers' clocks, by outcome: kept or missed."""
    pages = {outcome: metrics(url, outcome=outcome) for outcome in ("kept", "missed")}
    name = "sluice_promises_total"
    return Counter({outcome: int(page.get(name, 0)) for outcome, page in pages.items()})


def _disturbance(machine: str, seconds: float, seed: int) -> Coroutine[Any, Any, None]:
    """The disturbance during a run, until it is cancelled."""
    if machine == BUSY:
        return _busy_from(seconds / 2)
    if machine == PAUSES:
        replicas = [pid for pid, each in processes().items() if each.kind == "replicas"]
        return _pauses([psutil.Process(pid) for pid in replicas], random.Random(seed))
    return asyncio.sleep(0.0)


async def _pauses(replicas: Sequence[psutil.Process], chance: random.Random) -> None:
    """Stop one replica process after the other for a moment."""
    while True:
        await asyncio.sleep(chance.expovariate(1 / PAUSE_EVERY_S))
        process = chance.choice(replicas)
        process.suspend()
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            process.resume()


async def _busy_from(seconds: float) -> None:
    """Keep one core busy, after ``seconds``."""
    await asyncio.sleep(seconds)
    with busy_loop():
        await asyncio.Event().wait()


@contextmanager
def busy_loop() -> Iterator[psutil.Process]:
    """A process that keeps one core busy."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(loop.pid)
        process.cpu_affinity(process.cpu_affinity()[:1])
        yield process
    finally:
        loop.kill()
        loop.wait()


# The load.


class Kind(NamedTuple):
    """Requests of one class: their share, and the ranges of their uniform lengths."""

    share: float
    objective: ServiceClass
    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]


KINDS: Final = {
    "chat": Kind(0.6, ServiceClass(ttft_ms=600, tpot_ms=120), (10, 250), (8, 120)),
    "code": Kind(0.2, ServiceClass(ttft_ms=2_500, tpot_ms=150), (150, 1_200), (4, 50)),
    "document": Kind(0.2, ServiceClass(ttft_ms=9_000, tpot_ms=300), (700, 1_900), (16, 150)),
}
NO_OBJECTIVE: Final = "no-objective"
"""The class of requests that are never guaranteed: no margin is learned from them."""

CLASSES: Final = {name: kind.objective for name, kind in KINDS.items()} | {
    NO_OBJECTIVE: ServiceClass()
}
SLOS: Final = objectives(CLASSES)

_SHAPE = 0.5  # of the gamma distribution of the times between arrivals: their variation is 1.4
_WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "mint", "oak", "sun"]


def make_load(rate: float, seconds: float, seed: int) -> Workload:
    """Arrivals in bursts for ``seconds``, of classes and lengths drawn by ``seed``.

    Raises:
        ValueError: no request arrives in that time.
    """
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    now_s = chance.gammavariate(_SHAPE, 1 / (_SHAPE * rate))
    while now_s < seconds:
        arrivals.append(draw(chance, now_s))
        now_s += chance.gammavariate(_SHAPE, 1 / (_SHAPE * rate))
    if not arrivals:
        raise ValueError(f"no request arrives in {seconds:g} s at {rate:g} requests/s")
    return Workload("promises", tuple(arrivals))


def draw(chance: random.Random, arrival_s: float) -> Arrival:
    """A request of a class and with lengths drawn by ``chance``."""
    name = chance.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    prompt, output = KINDS[name].prompt_words, KINDS[name].output_tokens
    return Arrival(arrival_s, chance.randint(*prompt), chance.randint(*output), SLOS[name])


def body_of(run: str) -> Body:
    """A function that makes the requests of a run. Their words are drawn by the run's name, so that
    no engine has cached a prompt's prefix from another run."""

    def body(model: str, number: int, arrival: Arrival) -> Json:
        words = random.Random(f"{run} {number}").choices(_WORDS, k=arrival.prompt_tokens)
        tokens = arrival.output_tokens
        return stream_body(model, " ".join(words), tokens, ignore_eos=True, temperature=0)

    return body


# The report.

ALL: Final = "all"
"""The load of the line that sums up all loads."""

LABELS: Final = ("system", "machine", "load", "seed")


def cells(runs: Sequence[Run]) -> list[Json]:
    """Each machine, load and system over all seeds, then each machine and system over all loads."""
    machines = dict.fromkeys(run.machine for run in runs)
    loads = dict.fromkeys(run.load for run in runs)
    found = []
    for machine, load, system in product(machines, (*loads, ALL), CONTROLLERS):
        own = [run for run in runs if (run.machine, run.system) == (machine, system)]
        own = [run for run in own if load in (run.load, ALL)]
        if own:
            found.append({"machine": machine, "load": load, "system": system, **figures(own)})
    return found


def figures(runs: Sequence[Run]) -> Json:
    """The figures of all requests of some runs (:func:`~sluice.benchmarks.live.report.of_class`),
    of their guarantees, and the worst of what may have disturbed a run."""
    outcomes = [each for run in runs for each in run.outcomes]
    promised = [each for each in outcomes if each.admission == GUARANTEED]
    kept, seconds = sum(each.attained for each in promised), sum(run.seconds for run in runs)
    by_router = sum((run.by_router for run in runs), Counter[str]())
    return {
        "runs": len(runs),
        "seconds": seconds,
        **of_class(outcomes),
        "kept_interval": interval(kept, len(promised)),
        "kept_by_router": share(by_router["kept"], by_router.total()),
        "goodput": round(kept / seconds, 3),
        "late": {"ttft": lateness(promised, 0), "tpot": lateness(promised, 1)},
        "client_late_ms": milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
        "others_cores": max(run.others_cores for run in runs),
    }


def lateness(outcomes: Sequence[Outcome], objective: int) -> Json:
    """Of the answers that missed their TTFT (0) or TPOT (1) their number, and P50 and P95 of how
    late the first token was, or the last one after the time that the TPOT allows from the first
    on: in seconds and in multiples of the objective."""
    late: list[tuple[float, float]] = []
    for each in outcomes:
        took_s, stated_s = (each.ttft_s, each.tpot_s)[objective], each.slo.columns[objective]
        if each.end is End.ANSWERED and took_s is not None and took_s > stated_s:
            tokens = each.output_tokens - 1 if objective else 1
            late.append(((took_s - stated_s) * tokens, took_s / stated_s - 1))
    late_s, times = np.array(late).reshape(-1, 2).T
    quantiles_of = partial(quantiles, at=(0.5, 0.95), digits=4)
    return {"missed": len(late), "late_s": quantiles_of(late_s), "times": quantiles_of(times)}


def tables(found: Sequence[Json], capacity: float) -> list[Table]:
    """The cells as tables: guarantees, lateness of the missed ones, and checks of the run."""
    labels = ("machine", "load", "system")
    kept = ("sent", "guaranteed", "kept", "kept_interval", "goodput", "attained")
    late = [
        f"late.{at}.{name}" for at in ("ttft", "tpot") for name in ("missed", "times", "late_s")
    ]
    trust = ("runs", "seconds", *(end.value for end in End if end is not End.ANSWERED))
    checks = ("client_late_ms", "kept", "kept_by_router", "others_cores")
    first = f"guarantees as their client saw them; load 1 is {capacity:.2f} requests/s"
    second = "missed guarantees: P50 / P95 of their lateness"
    third = "whether these figures can be trusted: the worst run of each cell"
    return [
        table(found, *labels, *kept, title=first),
        table(found, *labels, *late, title=second),
        table(found, *labels, *trust, *checks, title=third),
    ]
