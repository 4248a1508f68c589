"""Every metric that the processes of the application have, from their real registries."""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from sluice.controller.actor import Controller
from sluice.controller.cell_client import CallMetrics
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.instruments import families, refused_metrics
from sluice.controller.observability.metrics import controller_age, controller_up
from sluice.deploy.shadow import ShadowMetrics
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.gpus import GpuUse
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.batches.lines import BatchMetrics
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.metrics.page import ControllerMetricsPage
from sluice.router.tenancy.auth import KeyMetrics
from sluice.router.tenancy.tokens import IssuerMetrics


class Family(NamedTuple):
    """A metric as it stands in the documents: a counter's name ends in ``_total``."""

    kind: str
    labels: frozenset[str]


def catalogue() -> dict[str, Family]:
    """Every metric by its name. Those of replicas are gauges with that label, as of a real one."""
    router = RouterMetrics().registry
    BatchMetrics(router)
    KeyMetrics(router)
    IssuerMetrics(router)
    CallMetrics(router)
    engine = SimulatedEngine(EngineConfig(kind="simulated"), "r", 8)
    rank = Replica("r", "node", engine, ReplicaConfig(), None)  # type: ignore[arg-type]
    replica = CollectorRegistry(auto_describe=False)
    gpus = [GpuUse(0.5, 1, 2)]
    replica.register(ReplicaCollector([rank], lambda: 1, gpus=lambda: gpus))
    page = ControllerMetricsPage(None, None, CollectorRegistry())  # type: ignore[arg-type]
    known: dict[str, Family] = {}
    found = [
        each
        for registry in (router, replica, page._status, ShadowMetrics().registry)
        for collector in registry._collector_to_names
        for each in _families(collector)
    ]
    for name, family in [*found, *(_family(each) for each in _of_controller())]:
        assert name not in known, f"two processes have {name}"
        known[name] = family
    return known


def _families(collector: Any) -> list[tuple[str, Family]]:
    own = getattr(collector, "_labelnames", None)
    return [_family(metric, own) for metric in collector.collect()]


def _family(metric: Any, labels: Any = None) -> tuple[str, Family]:
    name = metric.name + "_total" if metric.type == "counter" else metric.name
    return name, Family(metric.type, frozenset(metric._labelnames if labels is None else labels))


def _of_controller() -> list[Any]:
    figures = Controller(ControllerConfig()).figures()
    try:
        figures.send(None)
    except StopIteration as stop:
        own = [*families(stop.value, "p"), refused_metrics(0, 0)]
        return [*own, controller_up(up=True), controller_age(0)]
    raise AssertionError("the controller waited in the middle of a call")


def series_of(families: dict[str, Family]) -> dict[str, frozenset[str]]:
    """The labels of every series that a query can name."""
    series: dict[str, frozenset[str]] = {}
    for name, (kind, labels) in families.items():
        if kind == "histogram":
            series[f"{name}_bucket"] = labels | {"le"}
            series[f"{name}_sum"] = series[f"{name}_count"] = labels
        else:
            series[name] = labels
    return series
