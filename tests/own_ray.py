"""A Ray instance of the tests' own, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

_ROOT = str(Path(__file__).parents[1])


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Ray on this machine until the block ends; its workers can import the tests."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=80 << 20,
            include_dashboard=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": _ROOT}},
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()
