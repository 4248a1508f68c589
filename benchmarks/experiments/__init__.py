"""Experiments by name. Adding one: its file and one line here."""

from __future__ import annotations

from sluice.benchmarks.experiments import (
    annealing,
    autoscaling,
    best_effort,
    default_policy,
    disaggregation,
    fair_shares,
    fairbatching,
    flowprefill,
    promises,
    proserve,
    retry_after,
    routers,
    slos_serve,
    speculation,
)
from sluice.benchmarks.experiments.grid import Experiment

_MODULES = (
    *(default_policy, best_effort, proserve, disaggregation, fairbatching, slos_serve, annealing),
    *(speculation, flowprefill, routers, promises, retry_after, fair_shares, autoscaling),
)

EXPERIMENTS: dict[str, Experiment] = {
    found.name: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, Experiment)
}
