"""Whole systems for the end-to-end tests: real Ray, real Serve, real HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from sluice.controller.discovery import controller_actor_name
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import base_url, deploy
from sluice.deploy.ray_start import free_port
from sluice.scheduling.placement.cells import cell_of
from tests.own_ray import running, shared_ray

PATIENT = {"stale_after_s": 120}
"""Of a controller whose promises a test expects: reports come late on a busy machine."""

LENIENT = {"stale_after_s": 16}
"""The same where replicas also end without a word, and the controller is to notice."""

ASKING = {"decision_timeout_s": 3}
"""Of a router that waits for the controller's choice, however busy the machine."""


class System:
    """A running application, as a client and an operator see it."""

    def __init__(self, config: SluiceConfig) -> None:
        self.config = config
        self.url = base_url(config)

    def controller(self, replica_id: str = "") -> Any:
        cell = cell_of(replica_id, self.config.controller.cells) if replica_id else 0
        name = controller_actor_name(self.config.name, cell)
        return ray.get_actor(name, namespace="sluice")

    def observer(self) -> Any:
        return ray.get_actor(f"{self.config.name}-observer", namespace="sluice")

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] | None = ray.get(self.observer().snapshot.remote(), timeout=120)
        return found or {"epoch": None, "replicas": []}

    def live(self) -> int:
        return sum(each["waiting"] + each["running"] for each in self.snapshot()["replicas"])

    def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> httpx.Response:
        """An answer; ``_`` in the name of a header is a dash."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return httpx.post(f"{self.url}{path}", json=body, headers=named, timeout=240)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=120).text

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series with these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def scale(self, replicas: int) -> None:
        target = DeploymentID(name="Replica", app_name=self.config.name)
        serve_controller = _get_global_client()._controller
        ray.get(serve_controller.update_deployment_replicas.remote(target, replicas), timeout=120)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout_s: float = 120.0,
    show: Callable[[], object] = lambda: "",
    every_s: float = 0.1,
) -> None:
    """Return once ``condition`` holds; after ``timeout_s`` fail with what ``show`` says."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s in vain: {what} {show()}")
        time.sleep(every_s)


@contextmanager
def system(fields: dict[str, Any]) -> Iterator[System]:
    """Serve the configuration ``fields`` on the Ray that tests share until the block ends."""
    config = _configuration(fields)
    with on_the_shared_ray(config):
        yield System(config)


@contextmanager
def on_the_shared_ray(config: SluiceConfig, *_: object) -> Iterator[None]:
    """The same as ``running``, on the Ray that tests share."""
    shared_ray.start()
    try:
        deploy(config, threading.Event(), report=print)
        yield
    finally:
        shared_ray.clear()


@contextmanager
def system_alone(fields: dict[str, Any]) -> Iterator[System]:
    """The same as ``sluice serve`` does it, on a Ray of its own that takes this environment."""
    config = _configuration(fields)
    with running(config, threading.Event(), report=print):
        yield System(config)


def _configuration(fields: dict[str, Any]) -> SluiceConfig:
    return SluiceConfig.model_validate(
        {**fields, "router": {**fields.get("router", {}), "port": free_port()}}
    )
