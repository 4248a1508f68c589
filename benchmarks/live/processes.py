"""Processes of servers: started, ended whatever happens, and their processor time.

All of them stay in this process's session: Linux shares the processor between sessions first, so a
client in another session would wait for the processor beside busy servers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import click
import psutil

from sluice.benchmarks.live.resources import kind_of
from sluice.deploy.local import StoppedError, stop_signals

POLL_S = 0.1
_END_LIMIT_S = 90.0
"""For `sluice serve`, which shuts down a Ray instance; the others end at once."""
_LOG_TAIL = 600
_ON_PARENTS_DEATH = 1
"""``PR_SET_PDEATHSIG``, prctl(2)."""


class LeftOutError(RuntimeError):
    """A system that cannot be measured here; the message says why."""


@contextmanager
def serving(
    command: Sequence[str | Path],
    url: str,
    log: Path,
    limit_s: float,
    stop: threading.Event | None = None,
    environment: Mapping[str, str] | None = None,
    ready: str | urllib.request.Request = "/health",
) -> Iterator[int]:
    """A server's process id, until the block ends; then it and every process below it end.

    Args:
        command: starts the server.
        url: its root.
        log: file for its output.
        limit_s: how long it may take to start, seconds.
        stop: set when this process is to end.
        environment: of the process; by default this one's.
        ready: a request that it answers once it is ready; a path is asked for by GET.

    Raises:
        LeftOutError: the server did not start; the message has the end of its log.
        StoppedError: ``stop`` was set before it was ready.
    """
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, preexec_fn=_end_with_parent()
        )
    try:
        asked = f"{url}{ready}" if isinstance(ready, str) else ready
        _wait(server, asked, log, limit_s, stop or threading.Event())
        yield server.pid
    finally:
        _end(server)


def _end_with_parent() -> Callable[[], object] | None:
    """A function for a new process to call, after which the kernel ends it with this process,
    however this one ends. Only on Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_ON_PARENTS_DEATH, signal.SIGTERM)


def _wait(
    server: subprocess.Popen[bytes],
    asked: str | urllib.request.Request,
    log: Path,
    limit_s: float,
    stop: threading.Event,
) -> None:
    deadline_s = time.monotonic() + limit_s
    while True:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(asked, timeout=5):
            return
        if server.poll() is not None or time.monotonic() > deadline_s:
            tail = click.unstyle(log.read_text(errors="replace"))[-_LOG_TAIL:].strip()
            what = f"is not ready after {limit_s:g} s" if server.returncode is None else "has ended"
            raise LeftOutError(f"it {what}: {tail}")
        if stop.wait(POLL_S):
            raise StoppedError("stopped before every system was ready")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End it, and kill the remaining processes below it."""
    below = []
    with suppress(psutil.Error):
        below = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for process in below:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(below, timeout=_END_LIMIT_S)


def processor_seconds(roots: Mapping[int, str]) -> dict[int, tuple[str, float]]:
    """Kind and processor time until now, seconds, of each process, by its id.

    Args:
        roots: processes, and the kind of each and of all processes below it; where it is empty,
            the kind follows from each process's title.
    """
    found: dict[int, tuple[str, float]] = {}
    for root, kind in roots.items():
        with suppress(psutil.Error):
            first = psutil.Process(root)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):  # it ended while we looked
                    times = process.cpu_times()
                    named = kind or kind_of(" ".join(process.cmdline()))
                    found[process.pid] = (named, times.user + times.system)
    return found


def used(
    before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]
) -> dict[str, float]:
    """Processor seconds between two moments, by kind of process. A process that ended in between is
    not counted."""
    sums: dict[str, float] = {}
    for pid, (kind, seconds) in after.items():
        begun = before.get(pid, (kind, 0.0))[1]
        sums[kind] = sums.get(kind, 0.0) + seconds - begun
    return sums


P = ParamSpec("P")
R = TypeVar("R")


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of ``function`` in a new process, which gets SIGTERM when this one is stopped.

    Ray and Serve read most of their settings once, when they are imported: a second cluster of the
    same process would look for the token, the ports and the sockets of the first.

    Function, arguments and result must be picklable. Exceptions of the function are raised here.

    Raises:
        Abort: the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with stop_signals() as stop, ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(function, *args, **kwargs)
        while not future.done():
            if stop.wait(POLL_S):
                for process in multiprocessing.active_children():
                    process.terminate()
                break
        try:
            return future.result()
        except BrokenProcessPool:
            raise click.Abort from None
