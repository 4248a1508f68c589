"""The processes of an engine: they end with their parent, and have CPU cores."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys

logger = logging.getLogger(__name__)


def on_cpu() -> bool:
    """Whether vLLM computes on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def bind_workers(number: int, first: int | None) -> None:
    """On CPUs, bind each of several workers with one thread to a core that this process may use.
    vLLM would give each worker a NUMA node, and most machines have one."""
    if number > 1 and on_cpu() and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        place = cores.index(first) if first in cores else 0
        bound = [str(cores[(place + worker) % len(cores)]) for worker in range(number)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(bound))


def core_of(worker: int) -> int:
    """The core for a host's ``worker``-th worker, of those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:  # missing on some systems
        cores = list(range(os.cpu_count() or 1))
    return cores[worker % len(cores)]


def pin_thread(core: int, rank: int = 0) -> None:
    """Pin this thread to ``core``, that of rank 0, or for another rank to one of the next cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if core in allowed:
        os.sched_setaffinity(0, {allowed[(allowed.index(core) + rank) % len(allowed)]})
    else:
        logger.warning("not pinned to core %d: this process may use %s", core, allowed)


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when its parent ends. The parent must have made it in a thread
    that lives as long as the parent.

    vLLM's workers check for their parent only where they can: one that waits for another worker or
    for a GPU that does not answer would keep the GPU from its successor."""
    if parent is None:
        known = multiprocessing.parent_process()
        parent = None if known is None else known.pid
    if sys.platform != "linux" or parent is None:
        return
    # prctl(2): PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already


EXTENSION = "sluice.replica.processes.WorkerExtension"
"""Its name for vLLM's argument ``worker-extension-cls``."""


class WorkerExtension:
    """Methods for vLLM's worker, by its ``collective_rpc``."""

    def end_with_engine(self) -> None:
        """End with the engine's process, also while this worker waits for another one or for a
        device: vLLM's own watch cannot end it there. An actor of Ray ends with its job."""
        end_with_parent()
