"""The processes of ``sluice bench gateway``: started, ended whatever happens, and their processor
time.

All of them stay in this process's session: Linux shares the processor between sessions first, so a
client in another session would wait for the processor beside busy servers.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import psutil

from sluice.benchmarks.live.gateway.client import chat_body
from sluice.benchmarks.live.resources import kind_of
from sluice.deploy.local import StoppedError

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
    stop: threading.Event,
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """A server's process id, until the block ends; then it and every process below it end.

    Args:
        command: starts the server.
        url: its address, without ``/v1``. It is ready once it answers a chat completion.
        log: file for its output.
        limit_s: how long it may take to start, seconds.
        stop: set when this process is to end.

    Raises:
        LeftOutError: the server did not start; the message has the end of its log.
        StoppedError: ``stop`` was set before it was ready.
    """
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, preexec_fn=_end_with_parent()
        )
    try:
        _wait(server, url, log, limit_s, stop)
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
    server: subprocess.Popen[bytes], url: str, log: Path, limit_s: float, stop: threading.Event
) -> None:
    deadline_s = time.monotonic() + limit_s
    head = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", chat_body(1), head)
    while True:
        # A router may listen before it knows its engines.
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
