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
)
from sluice.benchmarks.experiments.grid import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(default_policy.EXPERIMENT, default_policy.LENGTH, default_policy.AGEING),
        best_effort.EXPERIMENT,
        *(proserve.POLICIES, proserve.ABLATION, proserve.WEIGHTS),
        *(proserve.DISAGGREGATED, proserve.COLOCATED, proserve.LARGE),
        *(disaggregation.LAYOUTS, disaggregation.RATIO),
        *(fairbatching.PEAK, fairbatching.LATENCY, fairbatching.OBJECTIVES),
        *(fairbatching.STEPS, fairbatching.CLUSTER),
        *(slos_serve.CAPACITY, slos_serve.SCALING, slos_serve.ABLATION, slos_serve.LENGTHS),
        annealing.EXPERIMENT,
        *(flowprefill.SYSTEMS, flowprefill.PARTS),
        *(flowprefill.BOUNDS, flowprefill.ADMISSION),
        *(routers.COLOCATED, routers.DISAGGREGATED),
        *(routers.STALE, routers.HETEROGENEOUS, routers.SLOW, routers.ADMISSION),
        promises.EXPERIMENT,
        retry_after.EXPERIMENT,
        fair_shares.EXPERIMENT,
        autoscaling.EXPERIMENT,
    )
}
