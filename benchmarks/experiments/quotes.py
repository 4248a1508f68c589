"""Quotes and offers: do the quoted times cover their levels, and are offers promised that clients
take up?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan

import numpy as np
from numpy.typing import ArrayLike

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import Experiment, Product, Scaled, first, means
from sluice.benchmarks.experiments.loads import GENERATED, QUICK, Conditions, Make, Span
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    System,
    colocated,
)
from sluice.scheduling.placement.quotes import LEVELS
from sluice.scheduling.request.objective import OBJECTIVES
from sluice.simulation.metrics import TPOTMetric, attained, stages

REPLICAS, SETUP = 2, SETUPS["8b"]

LEARNED: float = 0.2
"""This first part of a run's requests teaches, and does not count."""

Times = Sequence[float]


def counted(arrived_s: ArrayLike, ended_s: ArrayLike) -> slice:
    """The requests of a run that count: after those that teach, up to the first one that had not
    ended when the last one arrived. Quotes foresee a load that lasts, as a service's does."""
    arrived_s = np.asarray(arrived_s)
    unended = np.flatnonzero(np.asarray(ended_s) > arrived_s.max())
    return slice(round(LEARNED * len(arrived_s)), int(unended[0]) if len(unended) else None)


def cover(pairs: Iterable[tuple[Times, Sequence[Times]]]) -> dict[str, float]:
    """Of requests, each with its times by objective and what was quoted at the levels: the shares
    within what was quoted. A time of 0 or less was not seen."""
    found = {}
    pairs = list(pairs)
    for place, name in enumerate(OBJECTIVES):
        known = [(seen[place], quoted[place]) for seen, quoted in pairs if seen[place] > 0.0]
        for number, level in enumerate(LEVELS):
            within = [seen <= quoted[number] for seen, quoted in known]
            found[f"{name}_{100 * level:g}"] = float(np.mean(within)) if within else nan
    return found


def measure(
    seed: int, workload: Make, load: float, accepting: float, span: Span
) -> Mapping[str, float]:
    """Every request is quoted, and then sent. ``taken``: offers taken up, ``held``: promised ones;
    shares of all requests: ``as_stated``: promised and kept as first stated, ``kept``: also as
    offered; ``later``: median TTFT of the offers over the stated one."""
    layout = colocated(REPLICAS, quotes=True, accepting=accepting)
    rate = load * Conditions(workload, SETUP, layout).full_rate
    made = workload(SETUP, rate, span.requests(rate), seed)
    system = System(ROUTER, DEFAULT, ADMISSION, "reject")
    requests = systems.run_cluster(made, system, SETUP, layout, seed).result.requests
    measured = stages(requests)
    kept = attained(requests, measured, TPOTMetric.MEAN) & ~np.isnan(requests.promised_s)
    taken = [each.key for each in requests.retries]
    stated = np.ones(len(requests), np.bool_)
    stated[taken] = False
    objectives = [(requests.arrivals[key].slo, made.arrivals[key].slo) for key in taken]
    later = [own.ttft_s / was.ttft_s for own, was in objectives if own.ttft_s and was.ttft_s]
    last_s = requests.emitted_s[requests.offsets[requests.first_stage[1:]] - 1]
    arrived_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    seen = np.nan_to_num(
        [measured.ttft_s, measured.tpot_s[TPOTMetric.MEAN], last_s - arrived_s], nan=-1.0
    ).T
    keys = range(len(requests))[counted(arrived_s, last_s)]
    pairs = ((seen[key], requests.quoted.get(key)) for key in keys)
    return {
        **cover((seen, quoted) for seen, quoted in pairs if quoted),
        "taken": float(len(taken)),
        "held": float(np.mean([each.promised for each in requests.retries])) if taken else nan,
        "later": float(np.median(later)) if later else nan,
        "as_stated": float((kept & stated).mean()),
        "kept": float(kept.mean()),
    }


WORKLOADS = {name: GENERATED[name] for name in ("proserve sharegpt", "chat and code")}
DOWN = "workload", "load", "accepting"

EXPERIMENT = Experiment(
    "quotes",
    "ours; adaptive conformal inference is Gibbs and Candès 2021",
    "Do quoted times cover their levels, and are offers promised that clients take up?",
    setting=f"{REPLICAS} replicas, default policies; what cannot be promised is refused. Cover: "
    "share of the requests that took at most the time quoted just before, after the first "
    f"{100 * LEARNED:g} %, up to the first request that had not ended when the last one arrived. "
    "Offers: a share of the refused clients takes up its offer after half a second. Full: 14,000 "
    "requests in place of 4,000.",
    grids=[
        Product(
            measure,
            {
                "workload": first(WORKLOADS),
                "load": first((0.7, 1.0, 1.3, 1.5)),
                "accepting": (0.0, 0.3, 1.0),
            },
            # Above load 1 answers take up to a minute, and a run begins without a queue.
            {"span": Scaled(QUICK, Span(200.0, 1_000, 4_000), Span(2_000.0, 1_000, 14_000))},
        ),
    ],
    tables=(
        means(
            "Share of the requests within each quoted time",
            DOWN,
            {f"{o}_{100 * level:g}": (f"{o} {level:g}", 3) for o in OBJECTIVES for level in LEVELS},
        ),
        means(
            "Offers that are taken up, and what they cost the others",
            DOWN,
            {
                "taken": ("taken up", 0),
                "held": ("of these promised", 3),
                "later": ("TTFT over the stated", 1),
                "as_stated": ("kept as stated", 3),
                "kept": ("kept", 3),
            },
        ),
    ),
)
