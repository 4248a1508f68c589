"""Runs an application in processes that it watches: the side of ``sluice serve`` that never
blocks. It starts Ray's driver (``deploy.driver``), obeys signals within a fraction of a second
at every stage, and leaves no process and no file."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sluice.deploy import driver
from sluice.deploy.config import SluiceConfig
from sluice.deploy.driver import Event
from sluice.deploy.leftovers import Cleaner
from sluice.deploy.local import (
    REASON_S,
    RayEndedError,
    StartError,
    StoppedError,
    StopSignals,
    state_folder,
)
from sluice.deploy.progress import Progress
from sluice.deploy.ray_start import PHASES_FILE
from sluice.replica.private_dir import make_private_dir
from sluice.replica.processes import end_with_parent
from sluice.replica.vllm_args import by_option
from sluice.telemetry.phases import Phases

_POLL_S = 0.2

_SILENCE_S = 300.0
"""Longest time without news from the driver while it starts, seconds. Its longest step, Ray's
start, is bounded by 30 s, and on a busy machine all takes several times as long."""

_END_S = 20.0
"""How long an orderly end may take after the drain, seconds."""

_REASON_OF_START_S = 3.0
"""How long the driver may take to say why a part has ended while Ray starts, seconds."""

_KEPT_BYTES = 4 << 20
"""Of each log of a start that failed."""

_TRIES = 5
"""How often all is started where Ray is too slow."""

_TOO_SLOW = re.compile(
    r"^\[.* [EFC] .*("
    r"Timed out waiting for file|"  # an agent took 15 s to say on which port it listens
    r"agent timed out|"  # an agent took 30 s to answer
    r"marked as dead by the GCS|"  # the raylet did not answer its health checks
    r"Failed to connect to GCS)",
    re.MULTILINE,
)
"""Why the raylet ends by itself where the machine is too busy for its time limits, as its log has
it. They cannot all be set."""

_VITAL = ("gcs_server", "raylet")
"""Ray's processes without which it does not work, and which nothing starts again."""

_PARTS = re.compile(
    r"ray::(Serve(?!Replica)\w+|Detached\w+|\w*Proxy\w*|\w+Agent)\b|(VLLM::\w+)"
    r"|\S*python\S* .*/ray/\S*(runtime_env/agent)\S*\.py\b"  # without a title yet
)
"""Command lines of the processes that a start needs from when they begin to its end. Not those of
Serve's replicas: Serve ends and replaces one that does not answer, and tells the driver."""


class _Message(NamedTuple):
    event: Event
    text: str


class _TooSlowError(RayEndedError):
    """The machine is too busy for Ray's time limits."""


class Supervised:
    """An application that is served by processes of its own. Not for several threads."""

    def __init__(self, config: SluiceConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        # So long this process has computed, which is nearly all that it has done so far.
        self._zero_s = time.monotonic() - time.process_time()
        self._compiler = _fork(_compile_ahead, config)
        self._begin()

    def _begin(self) -> None:
        self._parts: dict[int, tuple[psutil.Process, str]] = {}
        self._local_dir = make_private_dir()
        self._cleaner = Cleaner(self._local_dir)
        self._phases = Phases(self._local_dir / PHASES_FILE, self._zero_s)
        self._connection, its = multiprocessing.Pipe()
        self._driver = _fork(driver.start, self._config, self._local_dir, its)
        its.close()

    def start(self, stop: StopSignals) -> None:
        """Return once the application answers; starts all again where Ray is too slow. Raises
        StartError: it cannot be served; RayEndedError: a part has ended; StoppedError: a signal."""
        for left in reversed(range(_TRIES)):
            try:
                self._start(stop)
                self._compiler.join(0.0)
                return self._progress.ready(self._elapsed_s())
            except (StartError, RayEndedError) as error:
                if not isinstance(error, _TooSlowError) or not left:
                    self._show_phases()
                    if phases := self._phases.unfinished():
                        error.args = (f"{error} (in: {phases})",)
                    if (log := self._keep_logs()) is not None:
                        error.args = (f"{error}; log: {log}",)
                    raise
                self._progress.line(f"this machine is busy: {error}; starting it again")
                self.end()
                self._begin()
            finally:
                self._progress.clear()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _keep_logs(self) -> Path | None:
        """Copy Ray's logs, in place of those of the last start that failed, and return the log of
        the phase that has failed, or else their folder; ``None``: there are none."""
        logs = self._local_dir / "ray" / "session_latest" / "logs"
        kept = None
        with suppress(OSError, RuntimeError):  # no home, or a full disk
            target = state_folder() / "failed_start"
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.mkdir(mode=0o700)
            # With the modes of all in it.
            shutil.copytree(logs, target / "logs", symlinks=True, copy_function=_copy_end)
            kept = target / "logs"
            for pid in self._phases.failed_in():
                kept = next(iter(kept.glob(f"worker-*-{pid}.err")), kept)
        return kept

    def _start(self, stop: StopSignals) -> None:
        """The same, once. Raises _TooSlowError: the machine is too busy for Ray."""
        last_s = dead_s = time.monotonic()
        dead: list[str] = []
        ray_runs = False
        while True:
            if stop.is_set():
                raise StoppedError("stopped before the application was ready")
            message = self._next_message()
            self._show_phases()
            self._progress.show(self._elapsed_s(), self._phases.running())
            now_s = time.monotonic()
            if message is not None:
                last_s = now_s
                if message.event == "ready":
                    return
                if message.event == "slow":
                    raise _TooSlowError(message.text)
                if message.event == "failed":
                    lost = [name for name in self._ended() if name in _VITAL]
                    if lost:  # the rest follows from that
                        raise self._end_of(lost)
                    raise StartError(message.text)
                if message.event == "report":
                    self._progress.doing(message.text)
                elif message.event == "ray":
                    ray_runs = True
                continue
            self._look()
            if not dead and (dead := self._ended()):
                dead_s = now_s
            if dead and now_s - dead_s > self._patience_s(dead, ray_runs):
                raise self._end_of(self._ended())
            if now_s - last_s > _SILENCE_S:
                raise StartError(
                    f"Ray has not answered for {_SILENCE_S:.0f} s: one of its processes hangs"
                )

    def _patience_s(self, dead: list[str], ray_runs: bool) -> float:
        """How long the driver gets to say why these parts have ended."""
        if not self._driver.is_alive() or (dead[0] in _VITAL and ray_runs):
            return 0.0
        if dead[0] in _VITAL and self._ray_gave_up():
            return 0.0
        return REASON_S + 1 if ray_runs else _REASON_OF_START_S

    def _end_of(self, dead: list[str]) -> RayEndedError:
        kind = _TooSlowError if dead[0] == "raylet" and self._ray_gave_up() else RayEndedError
        return kind(f"{_named(dead)} before the application was ready")

    def _ray_gave_up(self) -> bool:
        """Whether the raylet says that it ended since the machine is too busy."""
        logs = self._local_dir.glob("ray/session_latest/logs/raylet.*")
        return any(_TOO_SLOW.search(log.read_text(errors="replace")) for log in logs)

    def wait(self, stop: StopSignals) -> None:
        """Return at a signal. Raises RayEndedError: a part has ended without which nothing can be
        served."""
        vital = {pid: part for pid, part in self._parts.items() if part[1] in _VITAL}
        self._parts = vital
        while not stop.wait(_POLL_S):
            self._show_phases()  # of a further replica
            dead = self._ended()
            if dead:
                raise RayEndedError(
                    f"{_named(dead)}, and nothing can be served without it: everything was "
                    "stopped; start again"
                )

    def stop(self, drain_s: float, stop: StopSignals) -> None:
        """Refuse new requests, let others run for at most ``drain_s`` seconds, and stop. A further
        signal ends that at once."""
        self._progress.line("stopping")
        with suppress(OSError):  # it has ended, which is seen below
            self._connection.send(drain_s)
        limit_s = time.monotonic() + drain_s + _END_S
        while time.monotonic() < limit_s and not stop.again:
            message = self._next_message()
            if message is not None and message.event == "stopped":
                return
            if message is not None and message.event == "report":
                self._progress.line(message.text)
            # The driver would wait for an answer of a dead control store.
            if not self._driver.is_alive() or _VITAL[0] in self._ended():
                return

    def end(self) -> None:
        """End every process, and remove all files."""
        for process in self._descendants():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for child in (self._driver, self._compiler):
            child.kill()
            child.join()
        self._phases.close()
        self._cleaner.clean()

    def _next_message(self) -> _Message | None:
        # Not by a queue: `SimpleQueue.get` may wait forever where a signal comes near its timeout.
        try:
            return _Message(*self._connection.recv()) if self._connection.poll(_POLL_S) else None
        except (EOFError, OSError):  # the driver has ended
            time.sleep(_POLL_S)
            return None

    def _show_phases(self) -> None:
        for ended in self._phases.news():
            self._progress.phase(ended)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _look(self) -> None:
        """Find the parts that have begun."""
        for process in self._descendants():
            if process.pid not in self._parts:
                try:
                    name = _part(process)
                except psutil.Error:
                    continue
                if name is not None:
                    self._parts[process.pid] = (process, name)

    def _ended(self) -> list[str]:
        """The parts that have ended, Ray's own first."""
        ended = [name for process, name in self._parts.values() if not _runs(process)]
        ended.sort(key=lambda name: _VITAL.index(name) if name in _VITAL else len(_VITAL))
        if not ended and not self._driver.is_alive():
            ended = ["the process that talks to Ray"]
        return ended


def _fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    # A fork has imported what it needs; a collection would copy the memory that they share.
    gc.freeze()
    child = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    child.start()
    return child


def _compile_ahead(config: SluiceConfig) -> None:
    """Compile what the engines' plans run, unless it is cached: they begin with that once all is
    imported, each on one core, and a controller compiles for itself beside the imports."""
    end_with_parent()
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the supervisor
    from sluice.replica.scheduler import row_counts

    for engine in (pool.engine for fleet in config.fleets for pool in fleet.pools):
        if engine.kind == "vllm":
            drafts = "speculative-config" in by_option(engine.vllm_args)
            row_counts.compile_now(engine.policy, engine.policy_options, drafts)


def _copy_end(source: str, target: str) -> None:
    """Copy a log, of a long one the end."""
    with open(source, "rb") as log, open(target, "wb") as copy:  # noqa: PTH123
        log.seek(max(0, os.fstat(log.fileno()).st_size - _KEPT_BYTES))
        copy.write(log.read(_KEPT_BYTES))
    shutil.copystat(source, target)


def _part(process: psutil.Process) -> str | None:
    """The name of a part for people; ``None``: not one that a start needs."""
    if process.name() in _VITAL:
        return process.name()
    found = _PARTS.match(" ".join(process.cmdline()[:3]))
    return found and next(filter(None, found.groups()))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _named(dead: list[str]) -> str:
    names = ", ".join(dict.fromkeys(dead))
    return f"{names} has ended" if len(dead) == 1 else f"{names} have ended"
