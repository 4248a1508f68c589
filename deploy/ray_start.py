"""Starts Ray in this process, also where the machine is too busy for Ray's own patience."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import ray

TRIES = 3
"""How often Ray is started. It gives its node 30 s, a time that cannot be set; the next try finds
the files of its processes in memory."""

_TOO_SLOW = "timed out during startup"


def start_ray(temp_dir: Path, **options: Any) -> None:
    """Start a Ray instance of this process's own, never the one that the environment may name.

    Args:
        temp_dir: a folder for its files, which no other instance uses.
        options: of ``ray.init``.

    Raises:
        Exception: what ``ray.init`` raised; where Ray took too long to start, that of the last of
            :data:`TRIES`.
    """
    for left in reversed(range(TRIES)):
        try:
            ray.init(address="local", _temp_dir=str(temp_dir), **options)
            return
        except Exception as error:
            if _TOO_SLOW not in str(error) or not left:
                raise
            ray.shutdown()
            _end_processes(temp_dir)


def _end_processes(temp_dir: Path) -> None:
    """End what a start that was given up has left of this instance."""
    family = psutil.Process().children(recursive=True)
    left = [each for each in family if _names(each, temp_dir)]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=20)


def _names(process: psutil.Process, temp_dir: Path) -> bool:
    try:
        return any(str(temp_dir) in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
