"""Replica-hours and attainment of autoscaled pools and of pools of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments.grid import Cell, Experiment, Plan, Rows, estimate, grouped
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    LOAD_WORDS,
    Make,
    full_load_rate,
    recorded,
)
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    Setup,
    System,
    cluster_figures,
    colocated,
    run_cluster,
)
from sluice.scheduling import autoscaling
from sluice.scheduling.roles import Role
from sluice.simulation.config import Autoscaling
from sluice.simulation.planning.plots import Table
from sluice.simulation.workload import Workload, merged, with_objectives
from sluice.simulation.workloads.arrivals import Diurnal, Surges
from sluice.simulation.workloads.settings import proserve

SETUP = SETUPS["70b"]
STARTUP_S = 30.0
INTERVAL_S = 2.5
PEAK_OVER_S = 60.0
DOCUMENTS_TTFT_S = 4.0
FIXED_LOAD = 0.75
"""Load for which fixed pools are sized, the same that the default policy aims at."""

CLOSE = 0.002
"""Attainment that is lower by at most this counts as equal."""


class Scaling(NamedTuple):
    """How a pool is sized.

    Attributes:
        name: as shown in tables.
        policy: registered name; empty for a pool of a fixed size.
        options: of the policy.
        over_s: a pool of a fixed size is sized for the largest load over this many seconds; 0: for
            the mean load.
    """

    name: str
    policy: str = ""
    options: Mapping[str, Any] = {}
    over_s: float = 0.0


OURS = Scaling("head_room", "head_room", {"startup_s": STARTUP_S})
FIXED = (Scaling("fixed, mean load"), Scaling("fixed, peak load", over_s=PEAK_OVER_S))


def serve(target: float, up_s: float, down_s: float) -> Scaling:
    """Serve's default rule with these settings."""
    options = {
        "target_ongoing_requests": target,
        "upscale_delay_s": up_s,
        "downscale_delay_s": down_s,
    }
    name = f"ongoing_requests {target:g}, delays {up_s:g}/{down_s:g} s"
    return Scaling(name, "ongoing_requests", options)


def diurnal(day_s: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """Chat over one day that is as short as a run."""
    return proserve("sharegpt", rate, requests, seed, arrivals=partial(Diurnal, period_s=day_s))


def surges(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """Chat with surges that last a few times as long as the start of a replica."""
    return proserve("sharegpt", rate, requests, seed, arrivals=Surges)


def changing(day_s: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """Chat by day and long prompts with short outputs by night, of the same load on average."""
    rates = {name: _full(name) for name in _MIX}
    load = rate / _full("sharegpt")
    seconds = requests / rate
    parts = []
    for index, (name, begins) in enumerate(_MIX.items()):
        own = load / len(_MIX) * rates[name]
        arrivals = partial(Diurnal, period_s=day_s, begins=begins)
        made = proserve(name, own, round(own * seconds), seed + index, arrivals=arrivals)
        if name == "azure":
            words = f"TTFT {DOCUMENTS_TTFT_S:g} s for documents."
            made = with_objectives(
                made, lambda arrival: replace(arrival.slo, ttft_s=DOCUMENTS_TTFT_S), words
            )
        parts.append(made)
    return merged("chat by day, documents by night", parts)


def _full(dataset: str) -> float:
    """Requests per second that are load 1 of one replica."""
    return full_load_rate(GENERATED[f"proserve {dataset}"], SETUP)


_MIX = {"sharegpt": 0.0, "azure": 0.5}
"""Data set -> where in the day it begins."""


def peak_load(workload: Workload, full_rate: float, over_s: float) -> float:
    """The largest load over any ``over_s`` seconds, in replicas that would be busy all the time."""
    times = np.array([arrival.arrival_s for arrival in workload.arrivals])
    ends = np.searchsorted(times, times + over_s, side="left")
    most = int((ends - np.arange(len(times))).max())
    return most / over_s / full_rate


def measure(
    make: Make, load: float, seconds: float, full_rate: float, scaling: Scaling, seed: int
) -> Mapping[str, float]:
    """The figures of one run."""
    rate = load * full_rate
    workload = make(SETUP, rate, round(rate * seconds), seed)
    peak = peak_load(workload, full_rate, PEAK_OVER_S)
    sizer: Autoscaling | None = None
    replicas = ceil((peak if scaling.over_s else load) / FIXED_LOAD)
    if scaling.policy:
        make_policy: Callable[[Role], autoscaling.AutoscalingPolicy] = lambda _: (  # noqa: E731
            autoscaling.make_policy(scaling.policy, scaling.options)
        )
        most = 4 * ceil(peak / FIXED_LOAD)
        sizer = Autoscaling(make_policy, 1, most, INTERVAL_S, STARTUP_S)
        replicas = ceil(load / 2 / FIXED_LOAD)
    system = System(ROUTER, DEFAULT, ADMISSION)
    done = run_cluster(workload, system, SETUP, colocated(replicas), seed, autoscaling=sizer)
    sizes = [size.replicas for size in done.result.sizes.get("mixed", ())]
    return {
        **cluster_figures(done),
        "replica_hours": done.result.replica_s / 3600,
        "most_replicas": float(max(sizes, default=replicas)),
        "changes": float(max(0, len(sizes) - 1)),
        "peak_load": peak,
    }


def cells(plan: Plan) -> list[Cell]:
    """Workloads x ways to size the pool."""
    seconds = plan.pick(20.0, 1800.0, 7200.0)
    load = plan.pick(0.5, 2.0, 4.0)
    down_s = plan.pick(10.0, 180.0, 180.0)
    targets = plan.pick((8.0,), (10.0, 16.0, 24.0), (4.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0))
    systems = [*FIXED, OURS, *(serve(target, 10.0, down_s) for target in targets)]
    systems += plan.pick([], [], [serve(target, 30.0, 600.0) for target in targets])
    chat = _full("sharegpt")
    makes: dict[str, tuple[Make, float]] = {
        "diurnal": (partial(diurnal, seconds), chat),
        "surges": (surges, chat),
        "diurnal, changing mix": (partial(changing, seconds), chat),
    }
    for name, make in recorded(plan.traces).items():
        if name.endswith("(stretched)"):
            makes[name] = (make, full_load_rate(make, SETUP))
    return [
        Cell(
            {"workload": name, "system": system.name},
            partial(measure, make, load, seconds, full, system),
        )
        for name, (make, full) in makes.items()
        for system in systems
    ]


_SHOWN = {
    "replica_hours": ("replica-hours", 2),
    "attainment_mean": ("attainment", 4),
    "tdg": ("TDG ratio", 4),
    "promised": ("promised", 4),
    "ttft_p99_s": ("TTFT p99, s", 2),
    "most_replicas": ("most replicas", 1),
    "changes": ("changes of size", 1),
}


def overall(rows: Rows) -> Table:
    """Every system on every workload."""
    return Table(
        "Cost and attainment of each way to size the pool",
        ("workload", "system", *(words for words, _ in _SHOWN.values())),
        [
            (
                *map(str, labels),
                *(estimate(own, figure).shown(digits) for figure, (_, digits) in _SHOWN.items()),
            )
            for labels, own in grouped(rows, "workload", "system").items()
        ],
        "Replica-hours count from the request for a replica until it has drained.",
    )


def after_the_fact(rows: Rows) -> Table:
    """By workload: the cheapest setting of Serve's rule that attains as much as the default; and
    the setting that does so on every workload at the lowest sum."""
    lines = []
    rivals = [str(name) for (name,) in grouped(rows, "system") if str(name).startswith("ongoing")]
    by_cell = grouped(rows, "workload", "system")
    workloads = [workload for (workload,) in grouped(rows, "workload")]

    def figure(workload: object, system: str, name: str) -> float:
        return estimate(by_cell[(str(workload), system)], name).mean

    def holds(workload: object, system: str) -> bool:
        ours = figure(workload, OURS.name, "attainment_mean")
        return figure(workload, system, "attainment_mean") >= ours - CLOSE

    everywhere = [name for name in rivals if all(holds(each, name) for each in workloads)]
    one = min(
        everywhere,
        key=lambda name: sum(figure(each, name, "replica_hours") for each in workloads),
        default="",
    )
    for workload in workloads:
        able = [name for name in rivals if holds(workload, name)]
        best = min(able, key=lambda name: figure(workload, name, "replica_hours"), default="")
        line = [str(workload), f"{figure(workload, OURS.name, 'replica_hours'):.2f}"]
        for name in (best, one):
            hours = f"{figure(workload, name, 'replica_hours'):.2f} ({name})" if name else "none"
            line.append(hours)
        lines.append(line)
    return Table(
        f"Replica-hours of {OURS.name}, untuned, and of Serve's rule, tuned after the fact",
        ("workload", OURS.name, "best setting for this workload", "best setting for all"),
        lines,
        f"Of the settings whose attainment is no more than {CLOSE:g} below that of {OURS.name}.",
    )


EXPERIMENT = Experiment(
    name="autoscaling",
    source="ours; Ray Serve's default autoscaling rule",
    question="What do autoscaled pools cost, and which SLO attainment do they reach?",
    setting={
        "TPOT": "judged by its mean; 0.08 s, with a TTFT of 0.8 s (4 s for documents)",
        "Priorities": "two, drawn with equal chance (ProServe §5.1)",
        "Arrivals": "a mean of 2 replicas' load in 30 min (4 in 2 h in full scale), Poisson with "
        f"the rates below; traces stretched to it; {LOAD_WORDS}",
        "Diurnal": "a day as long as the run, whose rate goes from 0.2 to 1.8 of its mean",
        "Surges": "4 times the load for 2 min on average, with 4 min between two",
        "Changing mix": "chat by day, long prompts with short outputs by night",
        "Latency": f"setup {SETUP.name}: {SETUP.words}",
        "Replicas": f"serve {STARTUP_S:g} s after they are requested; the load is sampled every "
        f"{INTERVAL_S:g} s",
        "Policies": f"router {ROUTER}, admission {ADMISSION}, local {DEFAULT.policy}; head_room "
        "has its defaults and knows the start-up time",
        "Fixed": f"sized for a load of {FIXED_LOAD:g} each, of the mean load or of the largest "
        f"within {PEAK_OVER_S:g} s",
    },
    seeds=1,
    cells=cells,
    tables=(overall, after_the_fact),
)
