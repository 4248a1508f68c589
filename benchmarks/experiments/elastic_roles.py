"""Roles that follow the load, against every fixed split, on a day whose mix changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.disaggregation import (
    SETTING,
    SETUP,
    of_scenario,
    paced,
    split_in,
)
from sluice.benchmarks.experiments.grid import Experiment, Plan, Product, Scaled
from sluice.benchmarks.experiments.loads import Make, full_load_rate
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, System, colocated
from sluice.benchmarks.experiments.tables import Lines, Rows, estimate
from sluice.scheduling.autoscaling.role_shares import RoleShares, RoleSharesOptions
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.workload import merged

REPLICAS = 4
NERVOUS = RoleSharesOptions(gain=0.01, least_load=0.0, hold_s=1.0, smoothing_s=2.5, ahead_s=0.0)


class Fleet(NamedTuple):
    """The replicas at the start, and how their roles change; ``None``: not at all."""

    label: str
    layout: systems.Layout
    roles: RoleSharesOptions | None = None


FIXED = (colocated(REPLICAS), split_in(3, 1), split_in(2, 2), split_in(1, 3))
FLEETS = (
    *(Fleet(layout.name, layout) for layout in FIXED),
    Fleet("elastic", colocated(REPLICAS), RoleSharesOptions()),
    Fleet("elastic without hysteresis", colocated(REPLICAS), NERVOUS),
)


def measure(
    seed: int, pace: tuple[float, float], fleet: Fleet, parts: Sequence[Make], seconds: float
) -> Mapping[str, float]:
    """The figures of a day of ``parts``, of ``seconds`` each, at a TPOT and a load."""
    tpot_s, load = pace
    made = []
    for number, part in enumerate(parts):
        make = partial(paced, part, tpot_s)
        rate = load * REPLICAS * full_load_rate(make, SETUP)
        own = make(SETUP, rate, round(rate * seconds), seed)
        later = (
            each._replace(arrival_s=each.arrival_s + number * seconds) for each in own.arrivals
        )
        made.append(replace(own, arrivals=tuple(later)))
    served = System(ROUTER, DEFAULT, ADMISSION)
    roles = None if fleet.roles is None else RoleShares(fleet.roles)
    done = systems.run_cluster(
        merged("a day", made), served, SETUP, fleet.layout, seed, roles=roles
    )
    requests = done.result.requests
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    ends = np.cumsum([len(own) for own in made])[:-1]
    by_part = {f"part {n}": own.mean() for n, own in enumerate(np.split(met, ends), 1)}
    counts = [[size.replicas for size in own] for own in done.result.sizes.values()]
    changes = sum(np.abs(np.diff(own)).sum() for own in counts) / 2
    return {**systems.cluster_figures(done), **by_part, "changes": float(changes)}


def _parts(plan: Plan) -> Sequence[Make]:
    return [*loads.recorded_stretched(plan.traces).values()] or [
        of_scenario(name) for name in ("coder", "chatbot", "summarizer")
    ]


_SHOWN = {"attainment_mean": "attainment", "tdg": "TDG ratio", "split": "by pairs"}
_PARTS = ("part 1", "part 2", "part 3")


def _shown(rows: Rows) -> list[str]:
    figures = [estimate(rows, figure).shown(4) for figure in (*_SHOWN, *_PARTS)]
    return [*figures, estimate(rows, "changes").shown(1)]


EXPERIMENT = Experiment(
    "elastic_roles",
    "ours; ProServe appendix A",
    "Do roles that follow the load beat the best fixed split?",
    seeds=1,
    setting={
        **SETTING,
        "Arrivals": "a third of the day each: the traces by name, stretched, or coder, chatbot and "
        "summarizer, generated",
        "Replicas": f"{REPLICAS} behind the default router and admission; elastic: mixed at first",
        "Load": "as everywhere, of all replicas, in each third",
    },
    grids=[
        Product(
            measure,
            {
                "pace": Scaled(
                    {"15 ms": (0.015, 1.0)}, {"15 ms": (0.015, 1.0), "50 ms": (0.05, 0.9)}
                ),
                "fleet": Scaled((FLEETS[1], FLEETS[-1]), FLEETS),
            },
            {"parts": _parts, "seconds": Scaled(10.0, 150.0)},
        )
    ],
    tables=(
        Lines(
            "A day by fleet",
            ("pace", "fleet"),
            (*_SHOWN.values(), *_PARTS, "role changes"),
            _shown,
        ),
    ),
)
