"""On which CPU cores an engine computes, where vLLM computes on CPUs."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def on_cpu() -> bool:
    """Whether vLLM computes on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def bind_workers(number: int, first: int | None) -> None:
    """On CPUs, bind each of several workers with one thread to a core that this process may use:
    the first worker to the core ``first``, or any. vLLM by itself would give each worker a NUMA
    node, and most machines have one."""
    if number > 1 and on_cpu() and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        place = cores.index(first) if first in cores else 0
        bound = [str(cores[(place + worker) % len(cores)]) for worker in range(number)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(bound))


def pin_thread(core: int, rank: int = 0) -> None:
    """Pin this thread to ``core``, that of rank 0, or for another rank to one of the next cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if core in allowed:
        os.sched_setaffinity(0, {allowed[(allowed.index(core) + rank) % len(allowed)]})
    else:
        logger.warning("not pinned to core %d: this process may use %s", core, allowed)
