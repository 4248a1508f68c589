"""What ``sluice bench gateway`` compares. Another system is one entry of :data:`SYSTEMS`."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gateway_engine import MODEL
from benchmarks.gateway_peers import ROUTERS, Router, environment
from benchmarks.gateway_processes import serving
from deploy.haproxy import DIRECT_VARIABLE
from deploy.ray_settings import free_port

REPLICAS = 2
"""Engines behind each gateway, and replicas of Sluice."""

ENGINES = "replicas"
"""What the processes of engines are called; everything else is the gateway's."""

_START_LIMIT_S = 120.0
_RAY_START_LIMIT_S = 900.0


class System(NamedTuple):
    """A system that takes requests.

    Attributes:
        urls: of its servers, without ``/v1``; clients take them in turn.
        processes: processes, and what they and all below them are; empty where their titles say
            it. See :func:`benchmarks.gateway_processes.processor_seconds`.
    """

    urls: tuple[str, ...]
    processes: Mapping[int, str]


class Bench(NamedTuple):
    """What the systems share.

    Attributes:
        engines: process id and address of each engine that computes nothing.
        folder: for logs and configurations.
        say: tells what goes on.
        stop: set when this process is to end.
        step_ms: time between two tokens of an engine, milliseconds.
    """

    engines: Mapping[int, str]
    folder: Path
    say: Callable[[str], None]
    stop: threading.Event
    step_ms: float


Start = Callable[[Bench], AbstractContextManager[System]]


@contextmanager
def engines(folder: Path, stop: threading.Event, step_ms: float) -> Iterator[dict[int, str]]:
    """Process id and address of :data:`REPLICAS` engines that compute nothing, until the
    block ends.

    Raises:
        LeftOutError: one does not start.
    """
    with ExitStack() as stack:
        found = {}
        for number in range(REPLICAS):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "benchmarks.gateway_engine", "--port", str(port)]
            command += ["--step-ms", str(step_ms)]
            log = folder / f"engine-{number}.log"
            found[stack.enter_context(serving(command, url, log, _START_LIMIT_S, stop))] = url
        yield found


@contextmanager
def _direct(bench: Bench) -> Iterator[System]:
    yield System(tuple(bench.engines.values()), dict.fromkeys(bench.engines, ENGINES))


def _router(name: str, router: Router) -> Start:
    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        python = environment(router.package, bench.say)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        workers = tuple(bench.engines.values())
        command = router.command(python, port, free_port(), workers)
        log = bench.folder / f"{name}.log"
        with serving(command, url, log, _START_LIMIT_S, bench.stop) as pid:
            yield System((url,), dict.fromkeys(bench.engines, ENGINES) | {pid: "routers"})

    return start


def sluice_config(port: int, step_ms: float = 0.0) -> dict[str, Any]:
    """Sluice in front of simulated engines whose steps take so long."""
    times = {"step_s": step_ms / 1e3, "token_s": 0.0, "context_token_s": 0.0}
    return {
        "engine": {"kind": "simulated", "model": MODEL, "simulated": times},
        "replica": {"count": REPLICAS, "num_cpus": 0.1},
        "router": {"port": port},
    }


def sluice(name: str, program: Path, **variables: str) -> Start:
    """What starts ``program serve`` in front of simulated engines, with these variables in its
    environment."""

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = bench.folder / f"{name}.json"
        config.write_text(json.dumps(sluice_config(port, bench.step_ms)))
        command: list[str | Path] = [program, "serve", "--config", config]
        # Other commands must not take it for what the user serves.
        state = os.environ | {"XDG_STATE_HOME": str(bench.folder)} | variables
        log = bench.folder / f"{name}.log"
        with serving(command, url, log, _RAY_START_LIMIT_S, bench.stop, state) as pid:
            yield System((url,), {pid: ""})

    return start


@contextmanager
def _serve_llm(bench: Bench) -> Iterator[System]:
    """Ray Serve LLM with the Ray that is here. Of what it imports, one package is not here."""
    python = environment("pyarrow==26.0.1", bench.say)
    extra = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--replicas", str(REPLICAS), "--step-ms", str(bench.step_ms)]
    command = [sys.executable, "-m", "benchmarks.gateway_serve_llm", *options]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), extra)))
    log = bench.folder / "ray-serve-llm.log"
    with serving(
        command, url, log, _RAY_START_LIMIT_S, bench.stop, os.environ | {"PYTHONPATH": path}
    ) as pid:
        yield System((url,), {pid: ""})


_SLUICE: Final = Path(sys.executable).with_name("sluice")

SYSTEMS: Final[Mapping[str, Start]] = {
    "direct": _direct,
    **{name: _router(name, router) for name, router in ROUTERS.items()},
    "ray-serve-llm": _serve_llm,
    "sluice": sluice("sluice", _SLUICE),
    "sluice-direct": sluice("sluice-direct", _SLUICE, **{DIRECT_VARIABLE: "1"}),
}
"""What starts each. The others are compared with the first."""
