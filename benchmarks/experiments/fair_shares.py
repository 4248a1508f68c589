"""Tenants under overload: does each get its fair share of guaranteed capacity, and at what cost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import (
    Experiment,
    Lines,
    Product,
    Rows,
    Scaled,
    first,
    having,
    mean,
)
from sluice.benchmarks.experiments.loads import GENERATED, Conditions
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, SETUPS, System
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.tenancy.fair_shares import water_level
from sluice.simulation.metrics import Flags, TPOTMetric, attained, stages
from sluice.simulation.workload import Workload, merged

OVERLOAD = 3.0
WINDOW_S = 30.0
WARM_UP_S = 20.0
"""Decaying counters, whose time constants are some seconds, and the queues begin empty."""

BURST_S, SILENCE_S = 3.0, 7.0


class Tenant(NamedTuple):
    """The weight of a tenant's share, its demand over its share by weight (scaled so that the sum
    of all is the load), and whether its requests arrive in bursts."""

    weight: float
    demand: float
    bursty: bool = False


GROUPS: dict[str, tuple[Tenant, ...]] = {
    "one greedy": (Tenant(1, 0.5), Tenant(1, 5.5)),
    "weights 1, 1, 2": (Tenant(1, 0.2), Tenant(1, 9.8), Tenant(2, 1.0)),
    "all greedy": (Tenant(1, 2.0), Tenant(1, 4.0), Tenant(2, 3.0)),
    "a burst": (Tenant(1, 0.5, bursty=True), Tenant(1, 3.0), Tenant(2, 4.25)),
    "five": (Tenant(1, 0.2), Tenant(1, 0.6), Tenant(2, 1.0), Tenant(1, 1.5), Tenant(2, 20.0)),
}

MAKE, SETUP = GENERATED["proserve sharegpt"], SETUPS["8b"]


def workload(tenants: Sequence[Tenant], rate: float, seconds: float, seed: int) -> Workload:
    """The requests of all tenants, ``rate`` a second in total."""
    demand = sum(tenant.weight * tenant.demand for tenant in tenants)
    parts = []
    for index, tenant in enumerate(tenants):
        own = rate * tenant.weight * tenant.demand / demand
        part = MAKE(SETUP, own, max(2, round(own * seconds)), 10 * seed + index)
        arrivals = tuple(
            arrival._replace(
                arrival_s=_in_bursts(arrival.arrival_s) if tenant.bursty else arrival.arrival_s,
                tenant=index + 1,
                weight=tenant.weight,
            )
            for arrival in part.arrivals
        )
        parts.append(replace(part, arrivals=arrivals))
    return merged("tenants", parts)


def _in_bursts(time_s: float) -> float:
    """The same mean rate, on a clock that runs only in bursts, and faster there."""
    period_s = BURST_S + SILENCE_S
    whole, rest_s = divmod(time_s, period_s)
    return whole * period_s + rest_s * BURST_S / period_s


def measure(
    seed: int, tenants: str, shares: str, replicas: int, seconds: float
) -> Mapping[str, float]:
    """One run: promised tokens of each tenant against weighted max-min. ``error``: distance of a
    tenant from its share, over all promised tokens, mean over windows and tenants; ``worst``: the
    largest; ``below``: lowest promised part of the demand of a tenant within its share."""
    group, layout = GROUPS[tenants], systems.colocated(replicas)
    load = workload(group, OVERLOAD * Conditions(MAKE, SETUP, layout).full_rate, seconds, seed)
    submitted = load
    if shares == "none":
        submitted = replace(load, arrivals=tuple(a._replace(tenant=0) for a in load.arrivals))
    served = System(ROUTER, DEFAULT, ADMISSION, "reject")
    requests = systems.run_cluster(submitted, served, SETUP, layout, seed).result.requests
    arrival_s = np.array([arrival.arrival_s for arrival in load.arrivals])
    owner = np.array([arrival.tenant for arrival in load.arrivals]) - 1
    tokens = np.array([float(a.prompt_tokens + a.output_tokens) for a in load.arrivals])
    promised = ~np.isnan(requests.promised_s)
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    begin_s = min(WARM_UP_S, seconds / 3)
    counted = (arrival_s >= begin_s) & (arrival_s < seconds)

    def by_tenant(chosen: Flags) -> Floats:
        sums: Floats = np.bincount(owner[chosen], tokens[chosen], len(group)).astype(np.float64)
        return sums

    errors, below = [], []
    weights = np.array([tenant.weight for tenant in group], np.float64)
    window = np.floor((arrival_s - begin_s) / WINDOW_S)
    for number in np.unique(window[counted]):
        here = counted & (window == number)
        wanted, got = by_tenant(here), by_tenant(here & promised)
        fair = np.minimum(wanted, weights * water_level(wanted, weights, float(got.sum())))
        errors.append(np.abs(got - fair) / got.sum())
        modest = (fair >= wanted) & (wanted > 0.0)
        if modest.any():
            below.append(float((got[modest] / wanted[modest]).min()))
    span_s = seconds - begin_s
    return {
        "error": float(np.mean(errors)),
        "worst": float(np.max(errors)),
        "below": float(np.mean(below)) if below else 1.0,
        "tokens_per_s": float(tokens[counted & promised].sum()) / span_s,
        "goodput": float(tokens[counted & met].sum()) / span_s,
        "kept": float(met[counted & promised].mean()),
    }


FIGURES = {
    "error": "distance from the share, over all guaranteed tokens",
    "worst": "the largest of any tenant in any window",
    "below": "lowest guaranteed part of the demand of a tenant below its share",
    "kept": "share of the guaranteed requests that met their objective",
}


def _compared(rows: Rows) -> list[str]:
    none, fair = (having(rows, {"shares": on}) for on in ("none", "fair"))
    pairs = [(mean(none, name), mean(fair, name)) for name in (*FIGURES, "tokens_per_s", "goodput")]
    shown = [f"{before:.3f} -> {after:.3f}" for before, after in pairs[: len(FIGURES)]]
    return [*shown, *(f"{after / max(before, 1e-9):.3f}" for before, after in pairs[-2:])]


EXPERIMENT = Experiment(
    "fair_shares",
    "ours; weighted max-min fairness, trunk reservation",
    "Under overload, does each tenant get its fair share of guaranteed capacity, and what does "
    "that cost?",
    setting=f"ProServe's ShareGPT lengths at load {OVERLOAD:g}, to which the demands are scaled "
    f"together. Shares: weighted max-min of the promised tokens of prompt and output, in windows "
    f"of {WINDOW_S:g} s after the first {WARM_UP_S:g} s. What cannot be promised is refused.",
    grids=[
        Product(
            measure,
            {"tenants": first(tuple(GROUPS)), "shares": ("none", "fair")},
            {"replicas": Scaled(1, 4), "seconds": Scaled(6.0, WARM_UP_S + 3 * WINDOW_S)},
        )
    ],
    tables=[
        Lines(
            "Without fair shares -> with them",
            ("tenants",),
            (*FIGURES, "promised tokens", "goodput"),
            _compared,
            "; ".join(f"{name}: {words}" for name, words in FIGURES.items())
            + "; promised (guaranteed) tokens, goodput: with fair shares over without.",
        )
    ],
)
