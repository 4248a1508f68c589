"""How the live benchmarks start engines, vllm-router, Ray Serve LLM and Sluice, in processes, and
send loads to them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import click
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from sluice.benchmarks.live.client import Body, Json, LoadError, Outcome, replay, saturated
from sluice.benchmarks.live.engine import MODEL, chat_body
from sluice.benchmarks.live.report import Meter, Run, Usage
from sluice.deploy.local import StoppedError, StopSignals, stop_signals
from sluice.deploy.ray_start import free_port
from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.simulation.traces import TraceError
from sluice.simulation.workload import Arrival, Workload

# Servers under test in processes of their own: started, and ended whatever happens.
#
# All of them stay in this process's session: Linux shares the processor between sessions first, so
# a client in another session would wait for the processor beside busy servers.

VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
"""In which vLLM's own server starts."""

POLL_S = 0.1
_END_LIMIT_S = 90.0
"""For `sluice serve`, which shuts down a Ray instance; the others end at once."""
_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that Linux ends with this process; see prctl(2). A program, as gRPC's threads can
crash a child that runs Python between fork and exec."""


class LeftOutError(RuntimeError):
    """A system that cannot be measured here; the message says why."""


@contextmanager
def spawned(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    answer: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process until the block ends, and all below it; ``log`` gets its output."""
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
    request: str | urllib.request.Request,
    log: Path,
    limit_s: float,
    stop: StopSignals,
) -> None:
    """Wait until a server answers a URL or a request; raises :class:`LeftOutError` with the end of
    its log after ``limit_s``, and :class:`StoppedError` if ``stop`` was set before."""
    deadline_s = time.monotonic() + limit_s
    while True:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5):
            return
        if server.poll() is not None or time.monotonic() > deadline_s:
            tail = click.unstyle(log.read_text(errors="replace"))[-600:].strip()
            what = f"is not ready after {limit_s:g} s" if server.returncode is None else "has ended"
            raise LeftOutError(f"it {what}: {tail}")
        if stop.wait(POLL_S):
            raise StoppedError("stopped before every system was ready")


def _end(server: subprocess.Popen[bytes]) -> None:
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
    """The command of vLLM's server; ``args`` by command-line name without dashes."""
    # Not `vllm serve`: it does not start from vLLM's build for CPUs, which has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    for key, value in args.items():
        if isinstance(value, bool):
            command.append(f"--{key}" if value else f"--no-{key}")
        else:
            command += [f"--{key}", str(value)]
    return command


def until(done: Callable[[], bool], limit_s: float, stop: StopSignals) -> bool:
    """Wait until ``done`` returns true; ``False`` after a timeout or when stopped."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s or stop.wait(POLL_S):
            return False
    return True


# Applications that benchmarks serve: their configuration, and the counters on their metrics page.


def simulated(
    port: int,
    engine: Mapping[str, Any],
    replicas: int,
    classes: Mapping[str, ServiceClass] | None = None,
    **parts: Any,
) -> Json:
    """An application's configuration with ``engine.simulated`` fields; the first class is the
    default."""
    return {
        "engine": {"kind": "simulated", "model": MODEL, "simulated": engine},
        "replica": {"count": replicas, "num_cpus": 0.1},
        "router": router(port, classes or {}),
        **parts,
    }


def router(port: int, classes: Mapping[str, ServiceClass]) -> Json:
    """A router with these service classes, the first of which is the default."""
    fields: Json = {"port": port}
    if classes:
        named = {name: entry.model_dump(mode="json") for name, entry in classes.items()}
        fields |= {"classes": named, "default_class": next(iter(named))}
    return fields


def objectives(classes: Mapping[str, ServiceClass]) -> dict[str, SLO]:
    """The objective of each class, as a router reads it."""
    return {name: entry.objective(name) for name, entry in classes.items()}


def metrics(url: str, timeout_s: float = 10.0, **labels: str) -> dict[str, float]:
    """:func:`sums` of the page of the application at ``url``; raises :class:`OSError`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as answer:
        return sums(answer.read().decode(), **labels)


def sums(page: str, **labels: str) -> dict[str, float]:
    """The sum of each metric on a page, over its samples with these labels, by their name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


REPLICAS = 2
"""Engines behind each gateway, and replicas of Sluice."""

ENGINES = "replicas"
"""The kind of engine processes."""

START_LIMIT_S: Final = 900.0
"""How long a system with Ray or vLLM may take to start, seconds."""

_SHOWN = 300


class System(NamedTuple):
    """A system that takes requests: its servers' URLs, without ``/v1``, and its processes."""

    urls: tuple[str, ...]
    processes: Mapping[int, str]


class Bench(NamedTuple):
    """Inputs that all systems share: engines by process id, a folder for logs, output, what ends
    this process, and milliseconds between tokens."""

    engines: Mapping[int, str]
    folder: Path
    say: Callable[[str], None]
    stop: StopSignals
    step_ms: float


class Server(NamedTuple):
    """How a server starts: command, variables, limit in seconds, kind of its processes (empty: by
    title), and whether it is in front of the engines."""

    command: Sequence[str | Path]
    environment: Mapping[str, str] = MappingProxyType({})
    limit_s: float = 120.0
    kind: str = ""
    engines: bool = False


Start = Callable[[Bench], AbstractContextManager[System]]


@contextmanager
def started(
    starts: Mapping[str, Start], bench: Bench
) -> Iterator[tuple[dict[str, System], dict[str, str]]]:
    """The running systems, and why others do not run; raises :class:`LeftOutError`."""
    with ExitStack() as stack:
        bench = bench._replace(engines=stack.enter_context(engines(bench)))
        systems, left_out = {}, {}
        for name, start in starts.items():
            bench.say(f"starting {name}")
            try:
                systems[name] = stack.enter_context(start(bench))
            except LeftOutError as error:
                left_out[name] = str(error)
                bench.say(f"{name} is left out: {error}")
        yield systems, left_out


def served(name: str, server_on: Callable[[Bench, int], Server]) -> Start:
    """Starts a server and waits for a chat: a router may listen before it knows its engines."""

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        port = free_port()
        server = server_on(bench, port)
        with together(bench, {name: (port, server)}) as (pid,):
            others = dict.fromkeys(bench.engines, ENGINES) if server.engines else {}
            yield System((f"http://127.0.0.1:{port}",), {**others, pid: server.kind})

    return start


@contextmanager
def together(bench: Bench, servers: Mapping[str, tuple[int, Server]]) -> Iterator[list[int]]:
    """Process ids of servers that start together and answer; raises :class:`LeftOutError`."""
    with ExitStack() as stack:
        logs = {name: bench.folder / f"{name}.log" for name in servers}
        running = {
            name: stack.enter_context(
                spawned(server.command, logs[name], os.environ | dict(server.environment))
            )
            for name, (_, server) in servers.items()
        }
        for name, (port, server) in servers.items():
            url, head = f"http://127.0.0.1:{port}", {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", chat_body(1), head)
            wait_until_ready(running[name], request, logs[name], server.limit_s, bench.stop)
        yield [process.pid for process in running.values()]


def _nothing_on(bench: Bench, port: int, number: int) -> Server:
    """An engine that computes nothing."""
    program = [sys.executable, "-m", "sluice.benchmarks.live.engine"]
    return Server([*program, "--port", f"{port}", "--step-ms", f"{bench.step_ms}"])


@contextmanager
def engines(
    bench: Bench,
    server_on: Callable[[Bench, int, int], Server] = _nothing_on,
    count: int = REPLICAS,
) -> Iterator[dict[int, str]]:
    """Process id and address of ``count`` engines until the block ends; by default of those that
    compute nothing. Raises :class:`LeftOutError`."""
    ports = [free_port() for _ in range(count)]
    servers = {f"engine-{n}": (port, server_on(bench, port, n)) for n, port in enumerate(ports)}
    with together(bench, servers) as pids:
        yield {pid: f"http://127.0.0.1:{port}" for pid, port in zip(pids, ports, strict=True)}


# Programs from PyPI, each in a virtual environment in the user's cache, created if missing.

VLLM_ROUTER: Final = "vllm-router==0.1.17"


def vllm_router(bench: Bench, port: int, policy: str = "power_of_two") -> Server:
    """:data:`VLLM_ROUTER` with a policy in front of the engines of ``bench``."""
    python = environment(VLLM_ROUTER, bench.say)
    places = ["--host", "127.0.0.1", "--port", f"{port}"]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", f"{free_port()}"]
    rest = ["--policy", policy, "--log-level", "error", "--worker-urls", *bench.engines.values()]
    command = [str(python), "-m", "vllm_router.launch_router", *places, *metrics, *rest]
    return Server(command, kind="routers", engines=True)


def environment(package: str, say: Callable[[str], None]) -> Path:
    """The Python of ``package``'s environment, created if missing; raises :class:`LeftOutError`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "bench"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{package.replace('==', '-')}-python{version}"
    if not folder.exists():
        say(f"installing {package} into {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        # Made beside it and renamed, so that an existing folder is complete.
        draft = Path(tempfile.mkdtemp(dir=cache, prefix="."))
        try:
            _run([sys.executable, "-m", "venv", str(draft)])
            pip = [str(draft / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
            # Nothing is built here: that would take longer than all the rest.
            _run([*pip, "install", "--quiet", "--only-binary", ":all:", package])
            if not folder.exists():  # another run may have been faster
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder / "bin" / "python"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LeftOutError(f"cannot install it: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-_SHOWN:]
        raise LeftOutError(f"cannot install it: {said}")


# Sluice, and Ray Serve LLM.

SLUICE: Final = Path(sys.executable).with_name("sluice")
"""The installed program."""


def sluice(name: str, config_on: Callable[[Bench, int], Mapping[str, Any]]) -> Start:
    """A function that starts ``sluice serve`` with the configuration for a port."""

    def server_on(bench: Bench, port: int) -> Server:
        config = bench.folder / f"{name}.json"
        config.write_text(json.dumps(config_on(bench, port)))
        # Other commands must not mistake it for the user's application.
        variables = {"XDG_STATE_HOME": str(bench.folder)}
        return Server([SLUICE, "serve", "--config", config], variables, START_LIMIT_S)

    return served(name, server_on)


def serve_llm(bench: Bench, port: int, *options: str) -> Server:
    """Ray Serve LLM with the installed Ray. One package that it imports is not installed here."""
    python = environment("pyarrow==26.0.1", bench.say)
    extra = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), extra)))
    command = [sys.executable, "-m", "sluice.benchmarks.live.serve_llm"]
    command += ["--port", str(port), *options]
    return Server(command, {"PYTHONPATH": path}, START_LIMIT_S)


# Loads that are sent to a system.

IN_FLIGHT = 16
"""Concurrent requests that saturate an engine."""

T = TypeVar("T")


@contextmanager
def campaign(step_ms: float = 0.0) -> Iterator[Bench]:
    """What systems are started with, until the block ends; its errors are those of a command."""
    # What servers say may look like markup.
    say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
    try:
        with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            yield Bench({}, Path(folder), say, stop, step_ms)
    except (LeftOutError, LoadError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except StoppedError:
        raise click.Abort from None


def run(
    bench: Bench,
    system: System,
    labels: Mapping[str, Any],
    seconds: float,
    workload: Workload,
    roots: Mapping[int, str] | None = None,
    **options: Any,
) -> Run:
    """One run of ``seconds`` of arrivals, with the usage of the processes of ``roots``."""
    gc.collect()
    meter = Meter(roots)

    async def measured() -> tuple[list[Outcome], Usage]:
        sent = replay(completions(system), MODEL, workload, **options)
        return await until_stopped(bench, sent), meter.stop()

    return Run(labels, seconds, *asyncio.run(measured()))


def capacity(
    bench: Bench,
    system: System,
    arrivals: Iterator[Arrival],
    body: Body,
    in_flight: int,
    *times: Any,
) -> float:
    """Requests a second, see :func:`sluice.benchmarks.live.client.saturated`."""
    load = saturated(completions(system), MODEL, arrivals, body, in_flight, *times)
    return asyncio.run(until_stopped(bench, load))


async def until_stopped(bench: Bench, load: Coroutine[Any, Any, T]) -> T:
    """The result of a load; raises :class:`StoppedError` if this process is to end before."""
    task = asyncio.create_task(load)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        if bench.stop.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise StoppedError("stopped in the middle of a run")
    return task.result()


def completions(system: System) -> str:
    """URL of the completions endpoint."""
    return f"{system.urls[0]}/v1/completions"
