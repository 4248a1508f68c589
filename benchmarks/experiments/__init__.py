"""Experiments by name. Adding one: its file and its name here."""

from __future__ import annotations

from importlib import import_module

from sluice.benchmarks.experiments.grid import Experiment

_MODULES = (
    *("default_policy", "proserve", "disaggregation", "fairbatching", "slos_serve", "annealing"),
    *("flowprefill", "routers", "promises", "quotes", "autoscaling"),
    *("agents", "consent", "shadow", "simulator_speed"),
)

EXPERIMENTS: dict[str, Experiment] = {
    found.name: found
    for module in _MODULES
    for found in vars(import_module(f"{__name__}.{module}")).values()
    if isinstance(found, Experiment)
}
