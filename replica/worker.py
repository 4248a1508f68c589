"""Runs Ray's worker in a process that has imported vLLM: ``python -m sluice.replica.worker WORKER
ARGUMENTS...``. The engine's processes fork from it while it has one thread, and share the memory
of what is imported."""

import importlib
import os
import runpy
import shlex
import sys
from contextlib import suppress

from sluice.replica.processes import fork_fork_server


def command() -> str:
    """What Ray's runtime environment takes as ``py_executable``: it is a part of a shell's line,
    and a node may have its Python elsewhere."""
    python = f"$(command -v {shlex.quote(sys.executable)} || command -v python3)"
    return f"{python} -P -m {__name__}"


def _import() -> None:
    """Import what a replica needs."""
    # libgomp reads it as it is loaded. Ray sets it later, unless it is set, by the actor's CPUs.
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    importlib.import_module("sluice.replica.deployment")
    importlib.import_module("sluice.replica.vllm.preload")
    if unset:
        del os.environ["OMP_NUM_THREADS"]


if __name__ == "__main__":
    with suppress(Exception):  # the replica says what is missing
        _import()
        fork_fork_server()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
