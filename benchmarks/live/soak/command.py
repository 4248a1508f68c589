"""A steady mixed load on real Ray and Serve for any duration: is anything lost, does memory grow?
With ``--faults``: while parts of it are killed and frozen at random.

Run with ``sluice bench soak``. Every answer is checked against its request: with simulated engines
its whole text, so that missing and duplicated tokens are detected. In the end, when the application
is idle, nothing may be left: no request, no reservation, no byte of a body. Without faults the
routers' counters must then match the client's own counts.

The exit status is 1 if a request was lost, memory grows, something is left, or counters differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click
import numpy as np
from rich.table import Table

from sluice.benchmarks.live.application import application, metrics
from sluice.benchmarks.live.client import End, Outcome, replay
from sluice.benchmarks.live.loads import Kind
from sluice.benchmarks.live.report import Json, by_class, of_class, table
from sluice.benchmarks.live.resources import processes
from sluice.benchmarks.live.soak.faults import KILL_ROUTER, Chaos, Fault
from sluice.benchmarks.live.soak.load import (
    CAPACITY,
    LOAD,
    LOAD_WITH_FAULTS,
    Load,
    configuration,
    make_load,
)
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.deploy.config import SluiceConfig

SAMPLE_S: Final = 10.0
WARM_UP_S: Final = 60.0
"""Growth counts from here on, seconds from the load's start; in a short run, from a fifth of it."""

LEAST_S: Final = 300.0
"""Minimum time to judge growth, seconds: before, caches fill and allocators settle."""

JUDGED: Final = ("routers", "replicas", "controller", "HAProxy", "Serve", "Serve controller")
"""Kinds of processes whose memory must not grow. Ray's own and the client's is only shown."""

ALLOWED_MIB, ALLOWED_SHARE = 8.0, 0.04
"""By how much memory may grow."""

IDLE: Final = (
    *("sluice_in_flight_requests", "sluice_held_body_bytes", "sluice_line_requests"),
    *("sluice_reservations", "sluice_replica_live_requests", "sluice_replica_waiting_requests"),
    *("sluice_replica_running_requests", "sluice_replica_kv_usage_ratio"),
)
"""Figures of the application's page that are 0 when it is idle."""

CUT_S: Final = 5.0
"""How long after a router's death its clients may still find connections broken, seconds."""

GRACE_S: Final = 120.0
_IDLE_S = 60.0
_POLL_S = 0.5

Sample = tuple[float, dict[tuple[str, int], float]]
"""Seconds from the start, and the memory of each process that it does not share, MiB, by kind and
process id."""


@click.command(name="soak")
@number_option("--minutes", default=5.0, least=0.1, most=10_000)
@click.option("--faults", is_flag=True, help="Kill and freeze processes at random.")
@seed
@number_option("--replicas", default=3, least=2, most=64)
@number_option("--routers", default=2, least=1, most=16)
@number_option(
    "--rate",
    default=None,
    least=0.01,
    most=1_000,
    words="Requests a second in total, between bursts.  [default: about 80 % of the engines' "
    "capacity, with faults 50 %]",
)
@as_json
def soak(
    minutes: float,
    faults: bool,
    seed: int,
    replicas: int,
    routers: int,
    rate: float | None,
    as_json: bool,
) -> None:
    """Serve a mixed load for long, and check whether anything is lost or grows.

    \b
    Examples:
      sluice bench soak --minutes 40
      sluice bench soak --minutes 20 --faults --seed 7
    """
    share = LOAD_WITH_FAULTS if faults else LOAD
    load = make_load(60 * minutes, rate or share * CAPACITY * replicas, seed)
    found = measure(configuration(replicas, routers), load, seed if faults else None)
    wrong = {name: found[name] for name in ("lost", "left_over", "growing", "differing")}
    show(found, tables(found), as_json, *(f"{name}: {each}" for name, each in wrong.items()))
    raise SystemExit(any(wrong.values()))


def measure(config: SluiceConfig, load: Load, faults_seed: int | None) -> Json:
    """Serve ``config``, send all of ``load``, and report the results; faults are drawn by
    ``faults_seed``, if there are to be any."""
    with application(config) as served:
        chaos = None if faults_seed is None else Chaos(faults_seed, config, served.stop)
        sending = _drive(served.completions, served.stop, config.engine.model, load, chaos)
        outcomes, samples = asyncio.run(sending)
        if chaos is not None:
            chaos.wait_until_well()
        left = _wait_until_idle(served.url, served.stop)
        # A killed router loses counts.
        differing = _counters(served.url, outcomes, load.kinds) if chaos is None else []
    return summary(outcomes, samples, chaos.done if chaos else [], left, differing)


async def _drive(
    url: str, stop: threading.Event, model: str, load: Load, chaos: Chaos | None
) -> tuple[list[Outcome], list[Sample]]:
    """Send the load; sample the processes and inject faults until all of it has been sent.

    Raises:
        click.Abort: a stop was requested.
    """
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

    async def until_stopped() -> None:
        while not stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    leaves = load.leaves.__getitem__
    sending = asyncio.create_task(
        replay(url, model, load.workload, GRACE_S, sent.set, load.body, leaves)
    )
    stopping = asyncio.create_task(until_stopped())
    beside = [asyncio.create_task(sample())]
    beside += [asyncio.create_task(chaos.run(whole_s))] if chaos is not None else []
    await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not sending.done():
        raise click.Abort
    stopping.cancel()
    await asyncio.gather(*beside)
    return sending.result(), samples


def _wait_until_idle(url: str, stop: threading.Event) -> dict[str, float]:
    """Figures that are not 0 although the application is idle; returns once there are none."""
    deadline_s = time.monotonic() + _IDLE_S
    while True:
        page: dict[str, float] = {}
        with contextlib.suppress(OSError):
            page = metrics(url)
        left = {name: page.get(name, math.nan) for name in IDLE}
        left = {name: value for name, value in left.items() if value != 0}
        if not left or time.monotonic() > deadline_s or stop.is_set():
            return left
        time.sleep(_POLL_S)


def _counters(url: str, outcomes: Sequence[Outcome], kinds: Sequence[Kind]) -> list[str]:
    """:func:`counters_that_differ`, once none do, or after a while: routers report late."""
    deadline_s = time.monotonic() + _IDLE_S
    while True:
        ends = ("ok", "cancelled", "refused", "client_error", "failed")
        pages = {end: metrics(url, outcome=end) for end in ends}
        requests = {end: page.get("sluice_requests_total", 0.0) for end, page in pages.items()}
        tokens = metrics(url, type="generated").get("sluice_tokens_total", 0.0)
        differing = counters_that_differ(requests, tokens, outcomes, kinds)
        if not differing or time.monotonic() > deadline_s:
            return differing
        time.sleep(_POLL_S)


# The report.


def lost(outcomes: Iterable[Outcome], faults: Sequence[Fault]) -> list[Outcome]:
    """Requests that ended neither complete nor in an explicit error. A cut connection counts as
    lost, except if a router was killed while it was open: no other router can resume it."""
    deaths = [fault.at_s for fault in faults if fault.what == KILL_ROUTER]

    def excused(each: Outcome) -> bool:
        ended_s = math.inf if each.ended_s is None else each.ended_s
        return any(each.sent_s <= at_s + CUT_S and at_s <= ended_s for at_s in deaths)

    silent = (each for each in outcomes if each.end in (End.SILENT, End.CUT))
    return [each for each in silent if each.end is End.SILENT or not excused(each)]


def growth(samples: Sequence[Sample]) -> list[Json]:
    """First and last memory, MiB, of each process that is in at least half of the samples, its
    change in MiB an hour with a standard error, and whether it grows.

    It grows where the median of its last quarter exceeds that of its first by more than what is
    allowed, and the slope of a straight line is more than twice its standard error.
    """
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
            and hours[-1] - hours[0] >= LEAST_S / 3600
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
    """The routers' requests by outcome and generated tokens that are not the client's counts.

    Of a request whose client disconnected early, the client knows neither whether it was served to
    its end nor how many tokens were sent: anything between none and all of it is right.
    """
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
    left: dict[str, float],
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
        "classes": {**by_class(outcomes), "all": of_class(outcomes)},
        "reasons": dict(Counter(f"{each.end}: {each.reason}" for each in outcomes if each.reason)),
        "late_ms": round(1e3 * max((each.late_s for each in outcomes), default=0.0), 1),
        "faults": [fault._asdict() for fault in faults],
        "memory_mib": grown,
    }


def tables(found: Json) -> list[Table]:
    """The summary as tables."""
    rows = [{"class": name, **row} for name, row in found["classes"].items()]
    counts = ("sent", "attained", "guaranteed", "kept", *(end.value for end in End))
    reasons = [{"reason": reason, "count": count} for reason, count in found["reasons"].items()]
    return [
        table(rows, "class", *counts, title="requests"),
        table(reasons, "reason", "count", title="other ends than answers"),
        table(found["memory_mib"], "process", "first", "last", "per_hour", "error", title="MiB"),
        table(found["faults"], "at_s", "what", "seconds", title="faults"),
    ]
