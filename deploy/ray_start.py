"""Starts a Ray instance from this process, even if the machine is too busy for Ray's time limit,
and reports whether it still runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.ray_constants import PROCESS_TYPE_LOG_MONITOR
from ray.job_config import JobConfig

from sluice.deploy.leftovers import end_processes

TRIES = 5
"""How often Ray is started. It gives its node 30 s, and its node's agents 15 s of them, times that
cannot be set; the next try finds the files of its processes in memory."""

_TOO_SLOW = "timed out during startup"

_VITAL = ("gcs_server", "raylet")
"""Ray's processes without which it does not work, and which nothing starts again."""


def start_ray(temp_dir: Path, again: Callable[[], None] = lambda: None, **options: Any) -> None:
    """Start a Ray instance of this process's own, never the one that the environment may name. It
    has no dashboard, and prints nothing of its workers here.

    Args:
        temp_dir: a folder for its files, which no other instance uses.
        again: is called when a start has failed, before its processes are ended.
        options: of ``ray.init``.

    Raises:
        Exception: what ``ray.init`` raised; where Ray took too long to start, that of the last of
            :data:`TRIES`. No process of the instance is left.
    """
    for left in reversed(range(TRIES)):
        try:
            # Ray puts the driver's working folder on its workers' path, unless the driver is a
            # remote client. A file there must not stand in for one of our modules.
            ray.init(
                address="local",
                _temp_dir=str(temp_dir),
                job_config=JobConfig(_client_job=True),
                include_dashboard=False,
                log_to_driver=False,
                **options,
            )
            _end_log_monitor()
            return
        except Exception as error:
            again()
            slow = _TOO_SLOW in str(error)
            if slow:  # else it may be that this process has another Ray
                ray.shutdown()
            end_processes(temp_dir)
            if not (slow and left):
                raise


def _end_log_monitor() -> None:
    """End the process of Ray that looks for new lines in every log file ten times a second, for
    drivers that print them. This one does not."""
    node = ray._private.worker._global_node
    if node is not None:
        node._kill_process_type(PROCESS_TYPE_LOG_MONITOR, check_alive=False, wait=True)


def dead_process() -> str | None:
    """The name of a process that has ended of the Ray instance that this process started, and
    without which the instance does not work; ``None`` while all of them run."""
    node = ray._private.worker._global_node
    ended = [] if node is None else [name for name, _ in node.dead_processes()]
    return next((name for name in _VITAL if name in ended), None)
