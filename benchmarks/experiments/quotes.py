"""Quotes and offers: do the quoted times cover their levels, and are offers promised that clients
take up?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import (
    Experiment,
    Lines,
    Product,
    Rows,
    Scaled,
    first,
    means,
)
from sluice.benchmarks.experiments.loads import GENERATED, QUICK, Conditions, Make, Span
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    System,
    colocated,
)
from sluice.benchmarks.report import Table
from sluice.scheduling.placement.quotes import LEVELS
from sluice.scheduling.request.objective import OBJECTIVES
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests

REPLICAS, SETUP = 2, SETUPS["8b"]

LEARNED: float = 0.2
"""This first part of a run's requests teaches, and does not count."""

COVERED = {
    f"{name}_{100 * level:g}": (f"{name} {level:g}", 3) for name in OBJECTIVES for level in LEVELS
}


def cover(requests: Requests) -> dict[str, float]:
    """The share of the requests of which each quoted time was at least what it became."""
    measured = stages(requests)
    arrived_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    last_s = requests.emitted_s[requests.offsets[requests.first_stage[1:]] - 1]
    seen = measured.ttft_s, measured.tpot_s[TPOTMetric.MEAN], last_s - arrived_s
    keys = [key for key, times in requests.quoted.items() if times]
    keys = [key for key in keys if key >= LEARNED * len(requests)]
    found = {}
    for place, name in enumerate(OBJECTIVES):
        took_s = seen[place][keys]
        quoted_s = np.array([requests.quoted[key][place] for key in keys]).reshape(-1, len(LEVELS))
        known = took_s > 0.0  # neither unanswered nor a single token
        for level, times_s in zip(LEVELS, quoted_s.T, strict=True):
            below = took_s[known] <= times_s[known]
            found[f"{name}_{100 * level:g}"] = float(below.mean()) if len(below) else nan
    return found


def measure_cover(seed: int, workload: Make, load: float, span: Span) -> Mapping[str, float]:
    """Every request is quoted, and then sent."""
    layout = colocated(REPLICAS, quotes=True)
    rate = load * Conditions(workload, SETUP, layout).full_rate
    made = workload(SETUP, rate, span.requests(rate), seed)
    system = System(ROUTER, DEFAULT, ADMISSION, "reject")
    return cover(systems.run_cluster(made, system, SETUP, layout, seed).result.requests)


def measure_offers(
    seed: int, workload: Make, load: float, accepting: float, span: Span
) -> Mapping[str, float]:
    """``taken``: offers taken up, ``held``: promised ones; shares of all requests: ``as_stated``:
    promised and kept as first stated, ``kept``: also as offered; ``later``: median TTFT of the
    offers over the stated one."""
    layout = colocated(REPLICAS, accepting=accepting)
    rate = load * Conditions(workload, SETUP, layout).full_rate
    made = workload(SETUP, rate, span.requests(rate), seed)
    system = System(ROUTER, DEFAULT, ADMISSION, "reject")
    requests = systems.run_cluster(made, system, SETUP, layout, seed).result.requests
    kept = attained(requests, stages(requests), TPOTMetric.MEAN) & ~np.isnan(requests.promised_s)
    taken = [each.key for each in requests.retries]
    stated = np.ones(len(requests), np.bool_)
    stated[taken] = False
    later = [
        requests.arrivals[key].slo.columns[0] / made.arrivals[key].slo.columns[0]
        for key in taken
        if made.arrivals[key].slo.ttft_s is not None
    ]
    return {
        "taken": float(len(taken)),
        "held": float(np.mean([each.promised for each in requests.retries])) if taken else nan,
        "later": float(np.median(later)) if later else nan,
        "as_stated": float((kept & stated).mean()),
        "kept": float(kept.mean()),
    }


def _of(figure: str, table: Lines) -> Callable[[Rows], Table]:
    """The table of the rows with a figure."""
    return lambda rows: table([row for row in rows if figure in row])


WORKLOADS = {name: GENERATED[name] for name in ("proserve sharegpt", "chat and code")}
SPAN = {"span": Scaled(QUICK, Span(200.0, 1_000, 4_000))}

EXPERIMENT = Experiment(
    "quotes",
    "ours; adaptive conformal inference is Gibbs and Candès 2021",
    "Do quoted times cover their levels, and are offers promised that clients take up?",
    setting=f"{REPLICAS} replicas, default policies; what cannot be promised is refused. Cover: "
    "share of the requests that took at most the time quoted just before, after the first "
    f"{100 * LEARNED:g} %. Offers: a share of the refused clients takes up its offer after half a "
    "second.",
    grids=[
        Product(
            measure_cover, {"workload": first(WORKLOADS), "load": first((0.7, 1.0, 1.3))}, SPAN
        ),
        Product(
            measure_offers,
            {
                "workload": first(WORKLOADS),
                "load": first((1.2, 1.5)),
                "accepting": (0.0, 0.3, 1.0),
            },
            SPAN,
        ),
    ],
    tables=(
        _of(
            "ttft_50",
            means("Share of the requests within each quoted time", ("workload", "load"), COVERED),
        ),
        _of(
            "taken",
            means(
                "Offers that are taken up, and what they cost the others",
                ("workload", "load", "accepting"),
                {
                    "taken": ("taken up", 0),
                    "held": ("of these promised", 3),
                    "later": ("TTFT over the stated", 1),
                    "as_stated": ("kept as stated", 3),
                    "kept": ("kept", 3),
                },
            ),
        ),
    ),
)
