"""A steady mixed load for any duration, with ``--faults`` while processes are killed and frozen.

Every answer's text is checked; in the end nothing may be left over, and without faults the routers'
counters match the client's. Exit status 1 if anything of that does not hold, or memory grows."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import click
import numpy as np
import psutil
from rich.table import Table

from sluice.benchmarks.live.client import End, Json, Outcome, replay
from sluice.benchmarks.live.report import by_class, processes, table
from sluice.benchmarks.live.systems import metrics, objectives, simulated
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.deploy.ray_start import free_port
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Arrival, Workload
from tests.faults.application import Application, application
from tests.faults.kinds import CLASSES, KINDS, SHARES, Kind
from tests.light_engine import LIGHT_ENGINE

SAMPLE_S: Final = 10.0
WARM_UP_S: Final = 60.0
"""Growth counts from here on, seconds from the load's start; in a short run, from a fifth of it."""

MIN_S: Final = 300.0
"""Minimum time to judge growth, seconds: before, caches fill and allocators settle."""

JUDGED: Final = ("routers", "replicas", "controller", "Serve controller")
"""Kinds of processes whose memory must not grow. Ray's own and the client's is only shown."""

ALLOWED_MIB, ALLOWED_SHARE = 8.0, 0.04
"""By how much memory may grow."""

IDLE: Final = (
    *("sluice_in_flight_requests", "sluice_held_body_bytes", "sluice_admission_queue_requests"),
    *("sluice_reservations", "sluice_replica_live_requests", "sluice_replica_waiting_requests"),
    *("sluice_replica_running_requests", "sluice_replica_kv_usage_ratio"),
)
"""Figures of the application's page that are 0 when it is idle."""

CUT_S: Final = 5.0
"""How long after a router's death its clients may still find connections broken, seconds."""

CLOCK_S: Final = 1.0
"""By how much the clocks of faults and of requests may differ, seconds: each starts apart."""

GRACE_S: Final = 120.0
_IDLE_S = 60.0
_POLL_S = 0.5

ALL_CLASSES: Final = {
    **CLASSES,
    "patient": ServiceClass(
        ttft_ms=3_000, tpot_ms=200, when_unattainable="queue", queue_limit_s=5.0
    ),
    "strict": ServiceClass(ttft_ms=1_500, tpot_ms=150, when_unattainable="reject"),
}
"""A replay's classes, one that queues for a guarantee, and one that is refused without one."""

_SHARES: Final = {
    **{name: 0.8 * share for name, share in SHARES.items()},
    **{"patient": 0.1, "strict": 0.1},
}

LOAD: Final = 0.65
LOAD_WITH_FAULTS: Final = 0.5
BURST: Final = 1.4
"""Load over capacity: between bursts, the same with faults, and in a burst without faults."""

BURST_EVERY_S: Final = 60.0
BURST_S: Final = 8.0

LEAVING: Final = 0.05
"""Share of the streams whose client disconnects midway."""

_MEAN_PROMPT, _MAX_PROMPT = 300, 1_500
_MEAN_OUTPUT, _MAX_OUTPUT = 40, 160

REPLICAS, ROUTERS = 3, 2

CAPACITY: Final = 1 / (
    _MEAN_OUTPUT
    * (LIGHT_ENGINE["step_s"] / LIGHT_ENGINE["max_sequences"] + LIGHT_ENGINE["token_s"])
    + _MEAN_PROMPT * LIGHT_ENGINE["token_s"]
)
"""Approximate capacity of one replica with full batches, requests a second."""

PAUSE_S: Final = (10.0, 20.0)
"""Shortest and longest time between the beginnings of two faults, seconds."""

FROZEN_S: Final = (2.0, 8.0)
"""How long a process is frozen, seconds."""

KILL_ROUTER: Final = ("kill", "routers")
FAULTS: Final = (
    *(KILL_ROUTER, ("kill", "replicas"), ("kill", "controller"), ("kill", "Serve controller")),
    *(("freeze", "replicas"), ("freeze", "controller")),
)
"""What happens to one process of a kind, see :mod:`sluice.benchmarks.live.report`."""

_CALM_S = 15.0  # without faults at the beginning and at the end; less in a short run
_READY_S = 60.0

Sample = tuple[float, dict[tuple[str, int], float]]
"""Seconds from the start, and memory that is not shared, MiB, by kind and id of the process."""


@click.command(name="soak")
@number_option("--minutes", default=5.0, least=0.1, most=10_000)
@click.option("--faults", is_flag=True, help="Kill and freeze processes at random.")
@seed
@number_option(
    "--rate",
    default=None,
    least=0.01,
    most=1_000,
    words="Requests a second between bursts.  [default: 65 % of the capacity, with faults 50 %]",
)
@as_json
def soak(minutes: float, faults: bool, seed: int, rate: float | None, as_json: bool) -> None:
    """Serve a mixed load for long, and check whether anything is lost or grows.

    \b
    Examples:
      python -m tests.faults.soak --minutes 40
      python -m tests.faults.soak --minutes 20 --faults --seed 7
    """
    share = LOAD_WITH_FAULTS if faults else LOAD
    load = make_load(60 * minutes, rate or share * CAPACITY * REPLICAS, seed)
    fields = simulated(free_port(), LIGHT_ENGINE, REPLICAS, ALL_CLASSES)
    fields["router"]["replicas"] = ROUTERS
    config = parse_config(fields)
    with application(config) as served:
        chaos = Chaos(seed, config, served) if faults else None
        outcomes, samples = asyncio.run(_drive(served, load, chaos))
        if chaos is not None:
            chaos.wait_until_well()
        served.until(lambda: not _left_over(served.url), _IDLE_S)
        left, differing = _left_over(served.url), list[str]()
        if chaos is None:  # a killed router loses counts
            served.until(lambda: not _counters(served.url, outcomes, load.kinds), _IDLE_S)
            differing = _counters(served.url, outcomes, load.kinds)
    found = summary(outcomes, samples, chaos.done if chaos else [], left, differing)
    wrong = {name: found[name] for name in ("lost", "left_over", "growing", "differing")}
    show(found, tables(found), as_json, *(f"{name}: {each}" for name, each in wrong.items()))
    raise SystemExit(any(wrong.values()))


async def _drive(
    served: Application, load: Load, chaos: Chaos | None
) -> tuple[list[Outcome], list[Sample]]:
    sent, samples, started_s = asyncio.Event(), list[Sample](), time.monotonic()
    whole_s = load.workload.duration_s

    async def sample() -> None:
        while not sent.is_set():
            found = await asyncio.to_thread(processes)
            memory = {(each.kind, pid): each.own_mib for pid, each in found.items()}
            samples.append((time.monotonic() - started_s, memory))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(SAMPLE_S, whole_s / 20)):
                    await sent.wait()

    sending = asyncio.create_task(
        replay(
            *(served.completions, served.model, load.workload, GRACE_S),
            *(sent.set, load.body, load.leaves.__getitem__),
        )
    )
    beside = [asyncio.create_task(sample())]
    beside += [asyncio.create_task(chaos.run(whole_s))] if chaos is not None else []
    while not sending.done():
        await asyncio.wait([sending], timeout=_POLL_S)
        if served.stop.is_set():
            raise click.Abort
    await asyncio.gather(*beside)
    return sending.result(), samples


def _left_over(url: str) -> list[str]:
    page: dict[str, float] = {}
    with contextlib.suppress(OSError):
        page = metrics(url)
    left = {name: page.get(name, math.nan) for name in IDLE}
    return [f"{name}: {value:g}" for name, value in left.items() if value != 0]


def _counters(url: str, outcomes: Sequence[Outcome], kinds: Sequence[Kind]) -> list[str]:
    ends = ("ok", "cancelled", "refused", "client_error", "failed")
    pages = {end: metrics(url, outcome=end) for end in ends}
    requests = {end: page.get("sluice_requests_total", 0.0) for end, page in pages.items()}
    tokens = metrics(url, type="generated").get("sluice_tokens_total", 0.0)
    return counters_that_differ(requests, tokens, outcomes, kinds)


# The load.


class Load(NamedTuple):
    """All requests, their kinds, and the pieces of text after which clients disconnect, if so."""

    workload: Workload
    kinds: list[Kind]
    leaves: list[int | None]

    def body(self, model: str, number: int, arrival: Arrival) -> Json:
        return self.kinds[number].body(model, number, arrival)


def make_load(seconds: float, rate: float, seed: int) -> Load:
    """Requests for ``seconds``, at ``rate`` a second between bursts."""
    chance = np.random.default_rng(seed)
    # Poisson arrivals of two rates, by thinning the higher one.
    most = rate * BURST / LOAD
    times = np.cumsum(chance.exponential(1 / most, size=round(1.2 * most * seconds) + 50))
    times = times[times < seconds]
    in_burst = times % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
    times = times[in_burst | (chance.random(len(times)) < LOAD / BURST)]
    count = len(times)
    prompts = np.clip(np.ceil(chance.exponential(_MEAN_PROMPT, size=count)), 1, _MAX_PROMPT)
    outputs = np.clip(np.ceil(chance.exponential(_MEAN_OUTPUT, size=count)), 1, _MAX_OUTPUT)
    names = chance.choice(list(_SHARES), size=count, p=list(_SHARES.values()))
    objective_of = objectives(ALL_CLASSES)
    arrivals = tuple(
        Arrival(float(time_s), int(prompt), int(output), objective_of[str(name)])
        for time_s, prompt, output, name in zip(times, prompts, outputs, names, strict=True)
    )
    shares = np.array([kind.share for kind in KINDS])
    drawn = chance.choice(len(KINDS), count, p=shares / shares.sum())
    kinds = [KINDS[index] for index in drawn]
    leaves = [
        int(chance.integers(1, arrival.output_tokens))
        if kind.streams and arrival.output_tokens > 1 and chance.random() < LEAVING
        else None
        for kind, arrival in zip(kinds, arrivals, strict=True)
    ]
    return Load(Workload("soak", arrivals), kinds, leaves)


# Faults.


class Fault(NamedTuple):
    """An injected fault: time from the load's start, kind, and duration, seconds."""

    at_s: float
    what: tuple[str, str]
    seconds: float = 0.0


class Chaos:
    """Draws and injects faults by ``seed``; ``done`` has those so far."""

    def __init__(self, seed: int, config: SluiceConfig, served: Application) -> None:
        self.done: list[Fault] = []
        self._chance = random.Random(seed)
        self._config = config
        self._served = served

    async def run(self, seconds: float) -> None:
        started_s = time.monotonic()
        calm_s = min(_CALM_S, seconds / 6)
        await asyncio.sleep(calm_s)
        while (begun_s := time.monotonic()) - started_s < seconds - calm_s:
            if await asyncio.to_thread(self.wait_until_well):
                await asyncio.to_thread(self._inject, started_s)
            pause_s = self._chance.uniform(*PAUSE_S)
            await asyncio.sleep(max(0.0, begun_s + pause_s - time.monotonic()))

    def wait_until_well(self) -> bool:
        # They import Ray, which reads its environment then.
        from ray import serve

        from sluice.deploy.app import REPLICA_DEPLOYMENTS, ROUTER_DEPLOYMENT

        wanted = {
            REPLICA_DEPLOYMENTS["mixed"]: self._config.replica.first,
            ROUTER_DEPLOYMENT: self._config.router.replicas,
        }

        def well() -> bool:
            application = serve.status().applications.get(self._config.name)
            found = {} if application is None else application.deployments
            running = {name: each.replica_states.get("RUNNING", 0) for name, each in found.items()}
            return all(running.get(name, 0) >= count for name, count in wanted.items())

        return self._served.until(well, _READY_S)

    def _inject(self, started_s: float) -> None:
        what, at_s = self._chance.choice(FAULTS), time.monotonic() - started_s
        pids = [pid for pid, each in processes().items() if each.kind == what[1]]
        seconds = self._chance.uniform(*FROZEN_S) if what[0] == "freeze" else 0.0
        try:
            process = psutil.Process(self._chance.choice(pids))
            if what[0] == "kill":
                process.kill()
            else:
                process.suspend()
                try:
                    self._served.stop.wait(seconds)
                finally:
                    process.resume()
            self.done.append(Fault(round(at_s, 1), what, round(seconds, 1)))
        except (psutil.NoSuchProcess, IndexError):
            return  # it has just ended by itself


# The report.


def lost(outcomes: Iterable[Outcome], faults: Sequence[Fault]) -> list[Outcome]:
    """Requests without an end, or cut although no router was killed meanwhile."""
    deaths = [fault.at_s for fault in faults if fault.what == KILL_ROUTER]

    def excused(each: Outcome) -> bool:
        ended_s = math.inf if each.ended_s is None else each.ended_s
        return any(each.sent_s <= at_s + CUT_S and at_s <= ended_s + CLOCK_S for at_s in deaths)

    silent = (each for each in outcomes if each.end in (End.SILENT, End.CUT))
    return [each for each in silent if each.end is End.SILENT or not excused(each)]


def growth(samples: Sequence[Sample]) -> list[Json]:
    """First and last MiB of each process, its change an hour with an error, whether it grows."""
    found = []
    for kind, pid in sorted({key for _, memory in samples for key in memory}):
        points = np.array([(at, each[kind, pid]) for at, each in samples if (kind, pid) in each])
        if len(points) < max(4, len(samples) / 2):
            continue
        hours, values = points[:, 0] / 3600, points[:, 1]
        (slope, _), covariance = np.polyfit(hours, values, 1, cov=True)
        error, quarter = float(np.sqrt(covariance[0, 0])), len(values) // 4
        first, last = (float(np.median(part)) for part in (values[:quarter], values[-quarter:]))
        grows = (
            kind in JUDGED
            and hours[-1] - hours[0] >= MIN_S / 3600
            and last - first > max(ALLOWED_MIB, ALLOWED_SHARE * first)
            and slope > 2 * error
        )
        figures = {"first": first, "last": last, "per_hour": float(slope), "error": error}
        rounded = {name: round(value, 2) for name, value in figures.items()}
        found.append({"process": f"{kind} {pid}", **rounded, "grows": bool(grows)})
    return found


def counters_that_differ(
    requests: Mapping[str, float], tokens: float, outcomes: Sequence[Outcome], kinds: Sequence[Kind]
) -> list[str]:
    """The routers' requests by outcome and generated tokens that are not the client's counts."""
    ends, made = Counter(each.end for each in outcomes), Counter[End]()
    for outcome, kind in zip(outcomes, kinds, strict=True):
        made[outcome.end] += outcome.output_tokens * kind.fields.get("n", 1)
    whole, left, known = ends[End.ANSWERED], ends[End.LEFT], made[End.ANSWERED]
    expected = {
        "requests": (sum(requests.values()), len(outcomes), 0),
        "ok": (requests["ok"], whole, left),
        "ok or cancelled": (requests["ok"] + requests["cancelled"], whole + left, 0),
        "refused": (requests["refused"] + requests["client_error"], ends[End.REFUSED], 0),
        "failed": (requests["failed"], ends[End.FAILED], 0),
        "generated tokens": (tokens, known, made.total() - known),
    }
    return [
        f"{what}: {value:g}, expected {least} to {least + more}"
        for what, (value, least, more) in expected.items()
        if not least <= value <= least + more
    ]


def summary(
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    faults: Sequence[Fault],
    left: list[str],
    differing: list[str],
) -> Json:
    """The report, as plain data; ``left`` has the figures that were not 0 at the end."""
    gone = lost(outcomes, faults)
    warm_s = min(WARM_UP_S, samples[-1][0] / 5 if samples else 0.0)
    grown = growth([each for each in samples if each[0] >= warm_s])
    return {
        "lost": len(gone),
        "left_over": left,
        "growing": [each["process"] for each in grown if each["grows"]],
        "differing": differing,
        "classes": by_class(outcomes),
        "reasons": dict(Counter(f"{each.end}: {each.reason}" for each in outcomes if each.reason)),
        "late_ms": round(1e3 * max((each.late_s for each in outcomes), default=0.0), 1),
        "faults": [fault._asdict() for fault in faults],
        "memory_mib": grown,
    }


def tables(found: Json) -> list[Table]:
    """The summary as tables."""
    reasons = [{"reason": reason, "count": count} for reason, count in found["reasons"].items()]
    classes = [{"class": name, **row} for name, row in found["classes"].items()]
    met = ("attained", "guaranteed", "kept", "ttft_ms", "tpot_ms")
    return [
        table(classes, "class", "sent", *(end.value for end in End), *met, title="requests"),
        table(reasons, "reason", "count", title="other ends than answers"),
        table(found["memory_mib"], "process", "first", "last", "per_hour", "error", title="MiB"),
        table(found["faults"], "at_s", "what", "seconds", title="faults"),
    ]


if __name__ == "__main__":
    soak()
