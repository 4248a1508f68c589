"""An application that a benchmark serves on this machine: its configuration, its address, and the
counters on its page of metrics."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from sluice.benchmarks.live.client import Outcome, replay
from sluice.benchmarks.live.resources import Meter, Usage
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.deploy.local import base_url, running, stop_signals
from sluice.deploy.ray_settings import free_port
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Workload

SIMULATED = "simulated"
"""Name of the model of simulated engines."""

_POLL_S = 0.5


class Application(NamedTuple):
    """A running application: its root URL, its model's name, and an event that is set when this
    process is to end."""

    url: str
    model: str
    stop: threading.Event

    @property
    def completions(self) -> str:
        """URL of the completions endpoint."""
        return f"{self.url}/v1/completions"

    def send(self, workload: Workload, **options: Any) -> list[Outcome]:
        """The outcomes of a workload, see :func:`sluice.benchmarks.live.client.replay`."""
        return asyncio.run(replay(self.completions, self.model, workload, **options))

    def send_metered(self, workload: Workload, **options: Any) -> tuple[list[Outcome], Usage]:
        """The same, and the usage until the last arrival."""
        meter = Meter()
        return self.send(workload, on_sent=meter.stop, **options), meter.usage

    def until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``done`` returns true; ``False`` after a timeout or when stopped."""
        deadline_s = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline_s or self.stop.wait(_POLL_S):
                return False
        return True


@contextmanager
def application(config: SluiceConfig) -> Iterator[Application]:
    """Serve ``config`` until the block ends, whose standard output is standard error: Ray's own
    messages must not stand between the lines of the JSON."""
    say = Console(stderr=True).print
    with redirect_stdout(sys.stderr), stop_signals() as stop, running(config, stop, say):
        yield Application(base_url(config), config.engine.model, stop)


def simulated(
    engine: Mapping[str, Any],
    replicas: int,
    classes: Mapping[str, ServiceClass] | None = None,
    router: Mapping[str, Any] | None = None,
    latency_profile: Path | None = None,
    **parts: Any,
) -> SluiceConfig:
    """An application of simulated engines with fields of ``engine.simulated``, service classes by
    name, further fields of the router, and further parts of the configuration. Planners believe the
    profile of a file, by default the real one."""
    believed = {"latency_profile": str(latency_profile)} if latency_profile is not None else {}
    return parse_config(
        {
            "engine": {"kind": "simulated", "model": SIMULATED, "simulated": engine, **believed},
            "replica": {"count": replicas, "num_cpus": 0.1},
            "router": router_fields(classes) | dict(router or {}),
            **parts,
        }
    )


def router_fields(classes: Mapping[str, ServiceClass] | None = None) -> dict[str, Any]:
    """A router on a free port with these service classes."""
    named = {name: entry.model_dump() for name, entry in (classes or {}).items()}
    return {"port": free_port(), **({"classes": named} if named else {})}


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
