"""Ray in this process: one that tests share, as starting it takes long, or one of a test's own."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from sluice.controller.discovery import NAMESPACE
from sluice.deploy import local
from sluice.deploy.config import SluiceConfig
from sluice.deploy.leftovers import Cleaner
from sluice.deploy.ray_start import start_ray
from sluice.replica.private_dir import make_private_dir


class SharedRay:
    """Ray with Serve, started by the first test that asks for it."""

    def __init__(self) -> None:
        self._folder = ""

    def start(self) -> None:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="sluice-")
            _start(num_cpus=32, folder=self._folder)
            local.start_serve()

    def clear(self) -> None:
        for name in serve.status().applications:
            serve.delete(name)
        _end_controllers()

    def end(self) -> None:
        if self._folder:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


shared_ray = SharedRay()


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Ray on this machine until the block ends; its workers can import the tests."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        _start(num_cpus, folder)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def running(
    config: SluiceConfig, stop: local.StopSignals, report: Callable[[str], None]
) -> Iterator[None]:
    """Serve ``config`` until the block ends, on a Ray of this process with its environment."""
    local.check(config)
    local.check_models(config)
    folder = make_private_dir()
    cleaner = Cleaner(folder)
    try:
        local.start_ray_for(config, folder, report)
        local.start_application(config, stop, report)
        yield
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cleaner.clean()


def _start(num_cpus: int, folder: str) -> None:
    start_ray(Path(folder), num_cpus=num_cpus, object_store_memory=80 << 20)


def _end_controllers() -> None:
    deadline = time.monotonic() + 120
    while True:
        named = ray.util.list_named_actors(all_namespaces=True)
        left = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        if not left:
            return
        assert time.monotonic() < deadline, f"actors do not end: {left}"
        for name in left:
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                continue  # gone
        time.sleep(0.05)
