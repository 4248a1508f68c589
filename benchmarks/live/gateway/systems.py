"""The systems that ``sluice bench gateway`` compares. To add one, extend :data:`SYSTEMS`."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sluice.benchmarks.live.gateway.client import STATED
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.benchmarks.live.gateway.peers import ROUTERS, Router, environment
from sluice.benchmarks.live.gateway.processes import serving
from sluice.benchmarks.live.stock_server import server_command, server_environment
from sluice.deploy.haproxy import DIRECT_VARIABLE
from sluice.deploy.ray_settings import free_port
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model

REPLICAS = 2
"""Engines behind each gateway, and replicas of Sluice."""

ENGINES = "replicas"
"""The kind of engine processes; everything but them, :data:`sluice.benchmarks.live.resources.CORES`
and the client is the gateway's."""

_START_LIMIT_S = 120.0
_RAY_START_LIMIT_S = 900.0


class System(NamedTuple):
    """A system that takes requests.

    Attributes:
        urls: of its servers, without ``/v1``; clients take them in turn.
        processes: processes, and the kind of each and of all processes below it; empty where it
            follows from their titles. See
            :func:`sluice.benchmarks.live.gateway.processes.processor_seconds`.
        also: further fields of each request to it.
    """

    urls: tuple[str, ...]
    processes: Mapping[int, str]
    also: Mapping[str, Any] = MappingProxyType({})


class Bench(NamedTuple):
    """Inputs that all systems share.

    Attributes:
        engines: process id and address of each engine that computes nothing.
        folder: for logs and configurations.
        say: prints progress.
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
            command = [
                sys.executable,
                "-m",
                "sluice.benchmarks.live.gateway.engine",
                "--port",
                str(port),
            ]
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
    """Sluice in front of simulated engines with this step time."""
    times = {"step_s": step_ms / 1e3, "token_s": 0.0, "context_token_s": 0.0}
    return {
        "engine": {"kind": "simulated", "model": MODEL, "simulated": times},
        "replica": {"count": REPLICAS, "num_cpus": 0.1},
        "router": {"port": port},
    }


def sluice(name: str, program: Path, direct: bool = False, vllm: bool = False) -> Start:
    """A function that starts ``program serve``.

    Args:
        direct: whether HAProxy fetches streams from the replicas.
        vllm: whether there is one vLLM engine instead of two simulated ones.
    """
    variables = {DIRECT_VARIABLE: "1"} if direct else {}

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = bench.folder / f"{name}.json"
        asked = vllm_config(port) if vllm else sluice_config(port, bench.step_ms)
        config.write_text(json.dumps(asked))
        command: list[str | Path] = [program, "serve", "--config", config]
        # Other commands must not mistake it for the user's application.
        state = os.environ | {"XDG_STATE_HOME": str(bench.folder)} | variables
        log = bench.folder / f"{name}.log"
        with serving(command, url, log, _RAY_START_LIMIT_S, bench.stop, state) as pid:
            yield System((url,), {pid: ""}, STATED if vllm else {})

    return start


_VLLM_ARGS = {"max-model-len": 2048, "max-num-seqs": 64, "kv-cache-memory-bytes": 256 << 20}


def vllm_config(port: int) -> dict[str, Any]:
    """Sluice in front of one engine of vLLM with the local model."""
    return {
        "engine": {"served_model_name": MODEL, "vllm_args": _VLLM_ARGS},
        "replica": {"count": 1, "num_cpus": 0.1},
        "router": {"port": port},
    }


@contextmanager
def _vllm(bench: Bench) -> Iterator[System]:
    """vLLM's own server, with the engine of :func:`vllm_config`."""
    model = local_model(EngineConfig().cache_dir)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = server_command(model, MODEL, port, _VLLM_ARGS)
    log = bench.folder / "vllm.log"
    with serving(command, url, log, _START_LIMIT_S, bench.stop, server_environment()) as pid:
        yield System((url,), {pid: ""}, STATED)


@contextmanager
def _serve_llm(bench: Bench) -> Iterator[System]:
    """Ray Serve LLM with the installed Ray. One package that it imports is not installed here."""
    python = environment("pyarrow==26.0.1", bench.say)
    extra = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--replicas", str(REPLICAS), "--step-ms", str(bench.step_ms)]
    command = [sys.executable, "-m", "sluice.benchmarks.live.gateway.serve_llm", *options]
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
    "sluice-direct": sluice("sluice-direct", _SLUICE, direct=True),
    "vllm": _vllm,
    "sluice-vllm": sluice("sluice-vllm", _SLUICE, vllm=True),
    "sluice-direct-vllm": sluice("sluice-direct-vllm", _SLUICE, direct=True, vllm=True),
}
"""The function that starts each system."""

REAL: Final = ("vllm", "sluice-vllm", "sluice-direct-vllm")
"""Systems with a real engine, to compare the usage of the processes around it."""
