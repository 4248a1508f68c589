"""Replica-hours and attainment of autoscaled pools and of pools of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.grid import Experiment, Plan, Product, Scaled, means
from sluice.benchmarks.experiments.loads import GENERATED, Make, full_load_rate, generated
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, SETUPS, Setup, System
from sluice.scheduling import autoscaling
from sluice.simulation.config import Autoscaling
from sluice.simulation.generators import Diurnal, Surges
from sluice.simulation.settings import proserve
from sluice.simulation.workload import Workload, merged, with_objectives

SETUP = SETUPS["70b"]
STARTUP_S = 30.0
INTERVAL_S = 2.5
DOCUMENTS_TTFT_S = 4.0
FIXED_LOAD = 0.75
"""Load for which fixed pools are sized, the same that the default policy aims at."""


class Scaling(NamedTuple):
    """How a pool is sized: by a policy, or without a name fixed, for the ``peak`` load or the
    mean."""

    policy: str = ""
    options: Mapping[str, Any] = {}
    peak: bool = False


OURS = Scaling("head_room", {"startup_s": STARTUP_S})


def _systems(down_s: float, *targets: float) -> dict[str, Scaling]:
    """By name: fixed pools, ours, and Serve's default rule with these targets."""
    found = {
        "fixed, mean load": Scaling(),
        "fixed, peak load": Scaling(peak=True),
        "head_room": OURS,
    }
    for target in targets:
        delays = {"upscale_delay_s": 10.0, "downscale_delay_s": down_s}
        options = {"target_ongoing_requests": target, **delays}
        name = f"ongoing_requests {target:g}, delays 10/{down_s:g} s"
        found[name] = Scaling("ongoing_requests", options)
    return found


surges = generated(proserve, "sharegpt", arrivals=Surges)
"""Chat with surges that last a few times as long as the start of a replica."""


def changing(day_s: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """Chat by day and long prompts with short outputs by night, of the same load on average."""
    load, seconds = rate / _full("sharegpt"), requests / rate
    parts = []
    for index, (name, begins) in enumerate(_MIX.items()):
        own = load / len(_MIX) * _full(name)
        arrivals = partial(Diurnal, period_s=day_s, begins=begins)
        made = proserve(name, own, round(own * seconds), seed + index, arrivals=arrivals)
        if name == "azure":
            words = f"TTFT {DOCUMENTS_TTFT_S:g} s for documents."
            made = with_objectives(
                made, lambda arrival: replace(arrival.slo, ttft_s=DOCUMENTS_TTFT_S), words
            )
        parts.append(made)
    return merged("chat by day, documents by night", parts)


_MIX = {"sharegpt": 0.0, "azure": 0.5}
"""Data set -> where in the day it begins."""


def _full(dataset: str) -> float:
    """Requests per second that are load 1 of one replica."""
    return full_load_rate(GENERATED[f"proserve {dataset}"], SETUP)


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
    made = make(SETUP, load * full_rate, round(load * full_rate * seconds), seed)
    peak = peak_load(made, full_rate, 60.0)
    replicas, sizer = ceil((peak if system.peak else load) / FIXED_LOAD), None
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
    "ttft_p99_s": ("TTFT p99, s", 2),
    "most_replicas": ("most replicas", 1),
    "changes": ("changes of size", 1),
}


def _workloads(plan: Plan) -> dict[str, tuple[Make, float]]:
    day_s, chat = SECONDS(plan), _full("sharegpt")
    makes: dict[str, Make] = {
        "diurnal": generated(proserve, "sharegpt", arrivals=partial(Diurnal, period_s=day_s)),
        "surges": surges,
        "diurnal, changing mix": partial(changing, day_s),
    }
    traces = loads.recorded_stretched(plan.traces)
    rates = {name: full_load_rate(make, SETUP) for name, make in traces.items()}
    return {name: (make, rates.get(name, chat)) for name, make in (makes | traces).items()}


SECONDS = Scaled(20.0, 1800.0)
SYSTEMS = Scaled(_systems(10.0, 8.0), _systems(180.0, 10.0, 16.0, 24.0))

EXPERIMENT = Experiment(
    "autoscaling",
    "ours; Ray Serve's default autoscaling rule",
    "What do autoscaled pools cost, and which SLO attainment do they reach?",
    seeds=1,
    setting="A mean of 2 replicas' load in 30 min. Diurnal: a day as long as the run, 0.2 to 1.8 "
    "of its mean rate; surges: 4 times the load for 2 min, with 4 min between two; changing mix: "
    f"chat by day, documents (TTFT {DOCUMENTS_TTFT_S:g} s) by night. Replicas serve "
    f"{STARTUP_S:g} s after they are requested; fixed pools have a load of {FIXED_LOAD:g} each.",
    grids=[
        Product(
            measure,
            {"workload": _workloads, "system": SYSTEMS},
            {"load": Scaled(0.5, 2.0), "seconds": SECONDS},
        )
    ],
    tables=(
        means(
            "Cost and attainment of each way to size the pool",
            ("workload", "system"),
            _SHOWN,
            "Replica-hours count from the request for a replica until it has drained.",
        ),
    ),
)
