"""Whether refused requests are guaranteed when they retry after exactly ``Retry-After``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import (
    Experiment,
    Lines,
    Product,
    Rows,
    Scaled,
    estimate,
    first,
    having,
    mean,
)
from sluice.benchmarks.experiments.loads import GENERATED, Conditions, Make, Span
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, SETUPS, colocated
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests

SETUP = SETUPS["8b"]
REPLICAS = 2
WORKLOADS = ("proserve sharegpt", "proserve azure", "chat and code", "proserve bursty")
AGAIN, GONE, NOT_RESERVED = "retry", "leave", "leave, nothing reserved"
COME_BACKS = {AGAIN: 10, GONE: 0, NOT_RESERVED: 0}
"""Max retries of a refused client, by what clients do."""

WANTED = 0.8
"""Target share of the retries, sent exactly at ``Retry-After``, that are guaranteed."""

MIN_RETURNS = 50
"""A cell with fewer retries, over all seeds, is not judged by that share."""

WARM_UP_S = 10.0
"""This start of a run does not count; of a short run, its first third."""


def measure(
    seed: int, workload: Make, load: float, clients: str, span: Span
) -> Mapping[str, float]:
    """The counts of one run."""
    rate = load * Conditions(workload, SETUP, colocated(REPLICAS)).full_rate
    made = workload(SETUP, rate, span.requests(rate), seed)
    lasts_s = made.arrivals[-1].arrival_s
    if clients == NOT_RESERVED:
        # Only new requests of the same API key respect a reservation, and here each request has
        # its own key.
        alone = tuple(each._replace(tenant=key) for key, each in enumerate(made.arrivals))
        made = replace(made, arrivals=alone)
    system = systems.System(ROUTER, DEFAULT, ADMISSION, "reject")
    layout = colocated(REPLICAS, come_backs=COME_BACKS[clients])
    return counts(systems.run_cluster(made, system, SETUP, layout, seed).result.requests, lasts_s)


def counts(requests: Requests, lasts_s: float) -> dict[str, float]:
    """Of the retries after the warm-up and before ``lasts_s``: ``returns``, how many were promised
    (``held``), and the P95 of their ``Retry-After``, seconds. ``promised``: share of all requests
    in the end. ``goodput``: requests a second whose last attempt was promised and in time."""
    begin_s = min(WARM_UP_S, lasts_s / 3)
    returns = [each for each in requests.returns if begin_s < each.at_s <= lasts_s]
    came_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    promised = ~np.isnan(requests.promised_s)
    kept = promised & attained(requests, stages(requests), TPOTMetric.MEAN)
    inside = (came_s > begin_s) & (came_s <= lasts_s)
    told_s = [each.told_s for each in returns]
    return {
        "returns": float(len(returns)),
        "held": float(sum(each.promised for each in returns)),
        "retry_after_p95": float(np.percentile(told_s, 95)) if returns else nan,
        "promised": float(promised.mean()),
        "goodput": float((kept & inside).sum()) / (lasts_s - begin_s),
    }


def _moments(rows: Rows) -> list[str]:
    again = having(rows, {"clients": AGAIN})
    returns, held = (sum(float(row[each]) for row in again) for each in ("returns", "held"))
    holds = "yes" if held >= WANTED * returns else "NO"
    share = f"{held / returns:.3f}" if returns else "-"
    shown = [estimate(again, each).shown(2) for each in ("retry_after_p95", "promised", "goodput")]
    return [f"{returns:.0f}", share, holds if returns >= MIN_RETURNS else "-", *shown]


def _costs(rows: Rows) -> list[str]:
    kept, none = (mean(having(rows, {"clients": each}), "goodput") for each in (GONE, NOT_RESERVED))
    return [f"{kept:.2f}", f"{none:.2f}", f"{kept / none:.3f}" if none else "-"]


moments = Lines(
    f"All clients retry, and {WANTED:g} of the retries are to be guaranteed",
    ("workload", "load"),
    ("retries", "held", "holds", "retry-after, P95, s", "promised", "goodput, 1/s"),
    _moments,
    f"-: fewer than {MIN_RETURNS} retries. Promised: share of all requests, in the end.",
)
"""How good the retry times are."""

costs = Lines(
    "No client retries: goodput, requests a second",
    ("workload", "load"),
    ("reserved", "not reserved", "ratio"),
    _costs,
)
"""What unused reservations cost."""

EXPERIMENT = Experiment(
    "retry_after",
    "ours; reservation with backfilling is Lifka 1995",
    "Is a refused request guaranteed when it retries at its Retry-After, and what does the "
    "capacity reserved for it cost?",
    setting=f"{REPLICAS} replicas, default policies; what cannot be promised is refused. {AGAIN}: "
    f"exactly at Retry-After, up to {COME_BACKS[AGAIN]} times, under one id; {GONE}: never, which "
    f"the controller has to learn; {NOT_RESERVED}: the same, each request with its own API key, so "
    "that no new request respects a reservation.",
    grids=[
        Product(
            measure,
            {
                "workload": first({name: GENERATED[name] for name in WORKLOADS}),
                "load": first((0.9, 1.2, 1.5)),
                "clients": tuple(COME_BACKS),
            },
            {"span": Scaled(Span(6.0, 20, 60), Span(60.0, 200, 4_000))},
        )
    ],
    tables=(moments, costs),
)
