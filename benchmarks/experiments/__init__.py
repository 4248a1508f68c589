"""Experiments by name. Adding one: its file and one line here."""

from __future__ import annotations

from sluice.benchmarks.experiments import (
    admission,
    annealing,
    autoscaling,
    best_effort,
    default_policy,
    disaggregation,
    duration,
    fair_shares,
    fairbatching,
    fairbatching_cluster,
    flowprefill,
    flowprefill_bounds,
    promises,
    proserve,
    proserve_cluster,
    retry_after,
    routers,
    slos_serve,
    speculation,
    uneven,
)
from sluice.benchmarks.experiments.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        default_policy.EXPERIMENT,
        duration.LENGTH,
        duration.AGEING,
        best_effort.EXPERIMENT,
        proserve.POLICIES,
        proserve.ABLATION,
        proserve.WEIGHTS,
        proserve_cluster.DISAGGREGATED,
        proserve_cluster.COLOCATED,
        proserve_cluster.LARGE,
        disaggregation.LAYOUTS,
        disaggregation.RATIO,
        fairbatching.PEAK,
        fairbatching.LATENCY,
        fairbatching.OBJECTIVES,
        fairbatching.STEPS,
        fairbatching_cluster.EXPERIMENT,
        slos_serve.CAPACITY,
        slos_serve.SCALING,
        slos_serve.ABLATION,
        speculation.EXPERIMENT,
        annealing.EXPERIMENT,
        flowprefill.SYSTEMS,
        flowprefill.PARTS,
        flowprefill_bounds.BOUNDS,
        flowprefill_bounds.ADMISSION,
        routers.COLOCATED,
        routers.DISAGGREGATED,
        uneven.STALE,
        uneven.HETEROGENEOUS,
        uneven.SLOW,
        admission.EXPERIMENT,
        promises.EXPERIMENT,
        retry_after.EXPERIMENT,
        fair_shares.EXPERIMENT,
        autoscaling.EXPERIMENT,
    )
}
