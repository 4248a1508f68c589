"""Resource usage of a cluster's processes on this machine, by kind of process.

Covers the calling process and all its descendants: Ray's processes are its children.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
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
    ("ServeController", "Serve controller"),
    ("ProxyActor", "Serve"),
)
"""Part of a process's title -> its kind; the first match applies."""

OWN = "client"
REST = "Ray"


class Used(NamedTuple):
    """Processor time in cores and in seconds, and resident memory at the end, MiB."""

    cores: float
    memory_mib: float
    cpu_s: float = 0.0


class Usage(NamedTuple):
    """Usage between two moments: by kind of process, and the busy share of the machine's processor
    time, including other programs."""

    kinds: dict[str, Used]
    machine_busy: float


class Process(NamedTuple):
    """What a process has used and holds now: processor time, seconds, resident memory, MiB, and the
    part of it that is not shared through files, such as libraries and the object store."""

    kind: str
    cpu_s: float
    resident_mib: float
    own_mib: float


class Meter:
    """Measures :func:`processes` of these ``roots`` from its creation to :meth:`stop`. Processes
    that ended in between do not count."""

    def __init__(self, roots: Mapping[int, str] | None = None) -> None:
        self._roots = roots
        self._begun = processes(roots)
        self._begun_s = time.monotonic()
        psutil.cpu_percent()

    def stop(self) -> Usage:
        """The usage since the meter was created."""
        busy = psutil.cpu_percent() / 100
        elapsed_s = time.monotonic() - self._begun_s
        now = processes(self._roots)
        memory: dict[str, float] = defaultdict(float)
        for each in now.values():
            memory[each.kind] += each.resident_mib
        kinds = {
            kind: Used(round(seconds / elapsed_s, 3), round(memory[kind], 1), seconds)
            for kind, seconds in sorted(spent(self._begun, now).items())
        }
        return Usage(kinds, round(busy, 3))


def processes(roots: Mapping[int, str] | None = None) -> dict[int, Process]:
    """Processes by id, now: this one and all below it, or those of ``roots``, with the kind of each
    and of all below it; where that is empty, it follows from their titles."""
    found: dict[int, Process] = {}
    own = psutil.Process().pid
    for root, kind in ({own: ""} if roots is None else roots).items():
        with suppress(psutil.Error):
            first = psutil.Process(root)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):  # it ended while we looked
                    named = OWN if roots is None and process.pid == own else kind
                    found[process.pid] = _look(process, named)
    return found


def _look(process: psutil.Process, kind: str) -> Process:
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        return Process(
            kind or kind_of(" ".join(process.cmdline())),
            times.user + times.system,
            memory.rss / 2**20,
            (memory.rss - getattr(memory, "shared", 0)) / 2**20,
        )


def spent(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, float]:
    """Processor seconds between two moments, by kind of process. A process that ended in between is
    not counted."""
    sums: dict[str, float] = {}
    for pid, each in after.items():
        begun_s = before[pid].cpu_s if pid in before else 0.0
        sums[each.kind] = sums.get(each.kind, 0.0) + each.cpu_s - begun_s
    return sums


def kind_of(title: str) -> str:
    """The kind of a cluster's process, by its title."""
    return next((kind for part, kind in _KINDS if part in title), REST)
