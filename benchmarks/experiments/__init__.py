"""Experiments by name. Adding one: its file and one line here."""

from __future__ import annotations

from benchmarks.experiments import (
    annealing,
    default_policy,
    duration,
    fairbatching,
    flowprefill,
    proserve,
    routers,
    slos_serve,
    uneven,
)
from benchmarks.experiments.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        default_policy.EXPERIMENT,
        duration.LENGTH,
        duration.AGEING,
        proserve.POLICIES,
        proserve.ABLATION,
        proserve.WEIGHTS,
        fairbatching.PEAK,
        fairbatching.LATENCY,
        fairbatching.OBJECTIVES,
        fairbatching.STEPS,
        slos_serve.CAPACITY,
        slos_serve.SCALING,
        slos_serve.ABLATION,
        annealing.EXPERIMENT,
        flowprefill.SYSTEMS,
        flowprefill.PARTS,
        routers.COLOCATED,
        routers.DISAGGREGATED,
        uneven.STALE,
        uneven.HETEROGENEOUS,
        uneven.SLOW,
    )
}
