"""Servers under test in processes of their own: started, and ended whatever happens.

All of them stay in this process's session: Linux shares the processor between sessions first, so a
client in another session would wait for the processor beside busy servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil

from sluice.deploy.local import StoppedError

VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
"""In which vLLM's own server starts."""

POLL_S = 0.1
_END_LIMIT_S = 90.0
"""For `sluice serve`, which shuts down a Ray instance; the others end at once."""
_LOG_TAIL = 600
_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command, which Linux ends with this process, however this one ends; see prctl(2). It
is a program, not a function that Python calls between fork and exec: where Ray is in this process,
the threads of gRPC can crash such a child."""


class LeftOutError(RuntimeError):
    """A system that cannot be measured here; the message says why."""


@contextmanager
def spawned(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    answer: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, which may not answer yet, until the block ends; then it and every process
    below it end. ``log`` gets its output, ``answer`` its standard output if given."""
    if sys.platform == "linux":
        command = [sys.executable, "-c", _WITH_PARENT, *command]
    with log.open("wb") as said, (answer or Path(os.devnull)).open("wb") as printed:
        output = printed if answer else said
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=said)
    try:
        yield server
    finally:
        _end(server)


def wait_until_ready(
    server: subprocess.Popen[bytes],
    asked: str | urllib.request.Request,
    log: Path,
    limit_s: float,
    stop: threading.Event,
) -> None:
    """Wait until a server answers ``asked``, a URL or a request.

    Raises:
        LeftOutError: it did not within ``limit_s``; the message has the end of its log.
        StoppedError: ``stop`` was set before.
    """
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


def vllm_command(model: Path | str, name: str, port: int, args: Mapping[str, Any]) -> list[str]:
    """The command of vLLM's own server, for a model under a name; ``args`` are
    vLLM's by command-line name without dashes."""
    # Not `vllm serve`: it does not start from vLLM's build for CPUs, which has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    for key, value in args.items():
        if isinstance(value, bool):
            command.append(f"--{key}" if value else f"--no-{key}")
        else:
            command += [f"--{key}", str(value)]
    return command


def until(done: Callable[[], bool], limit_s: float, stop: threading.Event) -> bool:
    """Wait until ``done`` returns true; ``False`` after a timeout or when stopped."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s or stop.wait(POLL_S):
            return False
    return True
