"""Applications that benchmarks serve: their configuration, with simulated engines, and the counters
on their page of metrics.

Client, cluster and engines share the machine, so simulated engines are slow: steps of tens of
milliseconds, which cost no processor time. Objectives are longer in proportion.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO

ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.06,
    "token_s": 0.0005,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 8192,
    "max_batch_tokens": 2048,
    "max_sequences": 64,
}
"""The simulated engine: about the steps of a model of 70B parameters on two older GPUs. None of it
was measured."""


def simulated(
    port: int,
    engine: Mapping[str, Any],
    replicas: int,
    classes: Mapping[str, ServiceClass] | None = None,
    **parts: Any,
) -> Json:
    """The configuration of an application of simulated engines with fields of ``engine.simulated``,
    service classes by name, the first of which is the default, and further parts."""
    return {
        "engine": {"kind": "simulated", "model": MODEL, "simulated": engine},
        "replica": {"count": replicas, "num_cpus": 0.1},
        "router": router(port, classes or {}),
        **parts,
    }


def router(port: int, classes: Mapping[str, ServiceClass]) -> Json:
    """A router with these service classes, the first of which is the default."""
    fields: Json = {"port": port}
    if classes:
        named = {name: entry.model_dump(mode="json") for name, entry in classes.items()}
        fields |= {"classes": named, "default_class": next(iter(named))}
    return fields


def objectives(classes: Mapping[str, ServiceClass]) -> dict[str, SLO]:
    """The objective of each class, as a router reads it."""
    return {name: entry.objective(name) for name, entry in classes.items()}


def metrics(url: str, timeout_s: float = 10.0, **labels: str) -> dict[str, float]:
    """:func:`sums` of the page of the application at ``url``.

    Raises:
        OSError: there is no answer.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as answer:
        return sums(answer.read().decode(), **labels)


def sums(page: str, **labels: str) -> dict[str, float]:
    """The sum of each metric on a page, over its samples with these labels, by their name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
