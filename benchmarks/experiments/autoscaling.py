"""Replica-hours and attainment of autoscaled pools and of pools of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.grid import Experiment, Plan, Product, Scaled
from sluice.benchmarks.experiments.loads import GENERATED, Make, full_load_rate, generated
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, SETUPS, Setup, System
from sluice.benchmarks.experiments.tables import Lines, Rows, estimate
from sluice.scheduling import autoscaling
from sluice.simulation.config import Autoscaling
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


surges = generated(proserve, "sharegpt", arrivals=Surges)
"""Chat with surges that last a few times as long as the start of a replica."""


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
    seed: int, workload: tuple[Make, float], system: Scaling, load: float, seconds: float
) -> Mapping[str, float]:
    """The figures of one run of a workload, whose rate at load 1 is the second of the pair."""
    make, full_rate = workload
    rate = load * full_rate
    made = make(SETUP, rate, round(rate * seconds), seed)
    peak = peak_load(made, full_rate, PEAK_OVER_S)
    sizer: Autoscaling | None = None
    replicas = ceil((peak if system.over_s else load) / FIXED_LOAD)
    if system.policy:
        policy = partial(autoscaling.make_policy, system.policy, system.options)
        most = 4 * ceil(peak / FIXED_LOAD)
        sizer = Autoscaling(lambda role: policy(), 1, most, INTERVAL_S, STARTUP_S)
        replicas = ceil(load / 2 / FIXED_LOAD)
    served = System(ROUTER, DEFAULT, ADMISSION)
    done = systems.run_cluster(
        made, served, SETUP, systems.colocated(replicas), seed, autoscaling=sizer
    )
    sizes = [size.replicas for size in done.result.sizes.get("mixed", ())]
    return {
        **systems.cluster_figures(done),
        "replica_hours": done.result.replica_s / 3600,
        "most_replicas": float(max(sizes, default=replicas)),
        "changes": float(max(0, len(sizes) - 1)),
        "peak_load": peak,
    }


_SHOWN = {
    "replica_hours": ("replica-hours", 2),
    "attainment_mean": ("attainment", 4),
    "tdg": ("TDG ratio", 4),
    "promised": ("promised", 4),
    "ttft_p99_s": ("TTFT p99, s", 2),
    "most_replicas": ("most replicas", 1),
    "changes": ("changes of size", 1),
}


def _shown(rows: Rows) -> list[str]:
    return [estimate(rows, figure).shown(digits) for figure, (_, digits) in _SHOWN.items()]


def _workloads(plan: Plan) -> dict[str, tuple[Make, float]]:
    day_s, chat = SECONDS(plan), _full("sharegpt")
    diurnal = generated(proserve, "sharegpt", arrivals=partial(Diurnal, period_s=day_s))
    makes: dict[str, Make] = {
        "diurnal": diurnal,
        "surges": surges,
        "diurnal, changing mix": partial(changing, day_s),
    }
    return {name: (make, chat) for name, make in makes.items()} | {
        name: (make, full_load_rate(make, SETUP))
        for name, make in loads.recorded_stretched(plan.traces).items()
    }


def _systems(down_s: float, *targets: float) -> dict[str, Scaling]:
    rivals = [serve(target, 10.0, down_s) for target in targets]
    return {system.name: system for system in (*FIXED, OURS, *rivals)}


SECONDS = Scaled(20.0, 1800.0)
SYSTEMS = Scaled(_systems(10.0, 8.0), _systems(180.0, 10.0, 16.0, 24.0))

EXPERIMENT = Experiment(
    "autoscaling",
    "ours; Ray Serve's default autoscaling rule",
    "What do autoscaled pools cost, and which SLO attainment do they reach?",
    seeds=1,
    setting={
        "Arrivals": "a mean of 2 replicas' load in 30 min, Poisson with these rates, or traces "
        "stretched to it",
        "Diurnal": "a day as long as the run, whose rate goes from 0.2 to 1.8 of its mean",
        "Surges": "4 times the load for 2 min on average, with 4 min between two",
        "Changing mix": "chat by day, long prompts with short outputs by night (TTFT 4 s)",
        "Latency": f"setup {SETUP.name} of benchmarks/experiments/systems.py",
        "Replicas": f"serve {STARTUP_S:g} s after they are requested; the load is sampled every "
        f"{INTERVAL_S:g} s",
        "Policies": f"router {ROUTER}, admission {ADMISSION}, local {DEFAULT.policy}; head_room "
        "has its defaults and knows the start-up time",
        "Fixed": f"sized for a load of {FIXED_LOAD:g} each, of the mean load or of the largest "
        f"within {PEAK_OVER_S:g} s",
    },
    grids=[
        Product(
            measure,
            {"workload": _workloads, "system": SYSTEMS},
            {"load": Scaled(0.5, 2.0), "seconds": SECONDS},
        )
    ],
    tables=(
        Lines(
            "Cost and attainment of each way to size the pool",
            ("workload", "system"),
            tuple(words for words, _ in _SHOWN.values()),
            _shown,
            "Replica-hours count from the request for a replica until it has drained.",
        ),
    ),
)
