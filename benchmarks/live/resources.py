"""Resource usage of a cluster's processes on this machine, by kind of process.

Covers the calling process and all its descendants: Ray's processes are its children.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import psutil

CORES = "engine cores"
"""vLLM's processes that plan and compute."""

_KINDS = (
    ("VLLM::", CORES),
    ("vllm.entrypoints", "replicas"),
    ("ReplicaServer", "replicas"),
    (":Replica", "replicas"),
    (":Server:", "replicas"),
    (":Router", "routers"),
    (":OpenAiIngress", "routers"),
    ("DetachedController", "controller"),
    ("DetachedObserver", "observer"),
    ("haproxy", "HAProxy"),
    ("ServeController", "Serve"),
    ("ProxyActor", "Serve"),
    ("HAProxyManager", "Serve"),
)
"""Part of a process's title -> its kind; the first match applies."""

OWN = "client"
REST = "Ray"


class Used(NamedTuple):
    """Processor time in cores and resident memory in MiB."""

    cores: float
    memory_mib: float


class Held(NamedTuple):
    """Memory and handles of one process.

    Attributes:
        kind: of process.
        memory_mib: resident memory that it does not share through files, such as libraries and the
            object store, MiB.
        handles: open files, pipes and connections.
    """

    kind: str
    memory_mib: float
    handles: int
    threads: int


class Usage(NamedTuple):
    """Usage between two moments: by kind of process, and the busy share of the machine's processor
    time, including other programs."""

    kinds: dict[str, Used]
    machine_busy: float


class Meter:
    """Measures from its creation to :meth:`stop`. Processes that end in between do not count."""

    def __init__(self) -> None:
        self.usage = Usage({}, 0.0)
        """The usage, once stopped."""
        self._begun = {pid: seconds for pid, (_, seconds, _) in _processes().items()}
        self._begun_s = time.monotonic()
        psutil.cpu_percent()

    def stop(self) -> None:
        """Record the usage since the meter was created."""
        busy = psutil.cpu_percent() / 100
        elapsed_s = time.monotonic() - self._begun_s
        cores: dict[str, float] = defaultdict(float)
        memory: dict[str, float] = defaultdict(float)
        for pid, (kind, seconds, resident) in _processes().items():
            cores[kind] += (seconds - self._begun.get(pid, 0.0)) / elapsed_s
            memory[kind] += resident / 2**20
        kinds = {kind: Used(round(cores[kind], 3), round(memory[kind], 1)) for kind in cores}
        self.usage = Usage(dict(sorted(kinds.items())), round(busy, 3))


def _processes() -> dict[int, tuple[str, float, int]]:
    """Kind, processor seconds and resident bytes of each process, by its id."""
    found: dict[int, tuple[str, float, int]] = {}
    for process, kind in _found():
        try:
            with process.oneshot():
                times = process.cpu_times()
                found[process.pid] = (kind, times.user + times.system, process.memory_info().rss)
        except psutil.Error:
            continue
    return found


def held() -> dict[int, Held]:
    """What this process and each descendant holds now, by process id."""
    found: dict[int, Held] = {}
    for process, kind in _found():
        try:
            with process.oneshot():
                memory = process.memory_info()
                own_mib = (memory.rss - memory.shared) / 2**20
                found[process.pid] = Held(kind, own_mib, process.num_fds(), process.num_threads())
        except psutil.Error:
            continue
    return found


def _found() -> Iterator[tuple[psutil.Process, str]]:
    """This process and each descendant, with its kind."""
    own = psutil.Process()
    yield own, OWN
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            yield process, kind_of(" ".join(process.cmdline()))


def kind_of(title: str) -> str:
    """The kind of a cluster's process, by its title."""
    return next((kind for part, kind in _KINDS if part in title), REST)
