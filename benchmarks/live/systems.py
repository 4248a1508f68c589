"""How the live benchmarks start what they measure: engines, vllm-router, Ray Serve LLM, and Sluice.

Each runs in processes of its own; :mod:`sluice.benchmarks.live.resources` says what these use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sluice.benchmarks.live.gateway.client import chat_body
from sluice.benchmarks.live.processes import LeftOutError, spawned, wait_until_ready
from sluice.deploy.ray_settings import free_port

REPLICAS = 2
"""Engines behind each gateway, and replicas of Sluice."""

ENGINES = "replicas"
"""The kind of engine processes."""

START_LIMIT_S: Final = 900.0
"""How long a system with Ray or vLLM may take to start, seconds."""

_INSTALL_LIMIT_S = 600.0
_SHOWN = 300


class System(NamedTuple):
    """A system that takes requests: the URLs of its servers, without ``/v1``, and its processes
    (:func:`sluice.benchmarks.live.resources.processes`)."""

    urls: tuple[str, ...]
    processes: Mapping[int, str]


class Bench(NamedTuple):
    """Inputs that all systems share: the engines that compute nothing, by process id, a folder for
    logs and configurations, what prints progress, an event that is set when this process is to end,
    and the time between two tokens of an engine, milliseconds."""

    engines: Mapping[int, str]
    folder: Path
    say: Callable[[str], None]
    stop: threading.Event
    step_ms: float


class Server(NamedTuple):
    """How a system's server starts: its command, variables in addition to this process's, how long
    it may take, seconds, the kind of its processes (empty: by their titles), and whether it is in
    front of the engines of :class:`Bench`."""

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
    """The running systems by name, until the block ends, and why the others do not run.

    Raises:
        LeftOutError: the engines do not start.
    """
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
    """A function that starts a server on a port and waits until it answers a chat completion: a
    router may listen before it knows its engines."""

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
    """Process ids of servers by name, each with its port, that start together and answer.

    Raises:
        LeftOutError: one does not start.
    """
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
            asked = urllib.request.Request(f"{url}/v1/chat/completions", chat_body(1), head)
            wait_until_ready(running[name], asked, logs[name], server.limit_s, bench.stop)
        yield [process.pid for process in running.values()]


def _nothing_on(bench: Bench, port: int, number: int) -> Server:
    """An engine that computes nothing."""
    program = [sys.executable, "-m", "sluice.benchmarks.live.gateway.engine"]
    return Server([*program, "--port", f"{port}", "--step-ms", f"{bench.step_ms}"])


@contextmanager
def engines(
    bench: Bench,
    server_on: Callable[[Bench, int, int], Server] = _nothing_on,
    count: int = REPLICAS,
) -> Iterator[dict[int, str]]:
    """Process id and address of ``count`` engines, until the block ends; by default of those that
    compute nothing. ``server_on`` has the port and the number of the engine.

    Raises:
        LeftOutError: one does not start.
    """
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
    """The Python of the environment with ``package``; created and filled if missing.

    Raises:
        LeftOutError: it could not be created, or the package could not be installed.
    """
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
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
        )
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
    command = [sys.executable, "-m", "sluice.benchmarks.live.gateway.serve_llm"]
    command += ["--port", str(port), *options]
    return Server(command, {"PYTHONPATH": path}, START_LIMIT_S)
