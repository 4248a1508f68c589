"""vLLM's own server for each of two models, and Sluice in front of both models."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from sluice.benchmarks.live.systems import (
    VLLM_ENVIRONMENT,
    spawned,
    vllm_command,
    wait_until_ready,
)
from sluice.deploy.ray_start import free_port
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from tests.e2e.conftest import PATIENT, system, wait_until
from tests.known_profile import known_profile

_SHARED: Final[dict[str, Any]] = {"max-model-len": 4096, "seed": 0}
_CHAT: Final = {
    **_SHARED,
    "structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
}
_EMBED: Final = {**_SHARED, "runner": "pooling"}
# What Sluice sets on a machine without GPUs.
_ON_CPUS: Final = {"dtype": "float32", "enforce-eager": True, "kv-cache-memory-bytes": 128 << 20}
_TOOLS: Final = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}

_START_S: Final = 300.0


@contextmanager
def servers(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Sluice's address, and that of vLLM's server for each model."""
    model = local_model(EngineConfig().cache_dir.expanduser())
    engine = {"latency_profile": str(known_profile(folder)), "grammar_check_s": 0}
    fields = {
        "controller": PATIENT,
        "replica": {"count": 1},
        "models": {
            "local": {"engine": {**engine, "vllm_args": _CHAT}},
            "embedder": {"engine": {**engine, "vllm_args": _EMBED}},
        },
    }
    stock: dict[str, str] = {}
    with ExitStack() as stack:
        started = []
        for name, args in (("local", {**_CHAT, **_TOOLS}), ("embedder", _EMBED)):
            port, log = free_port(), folder / f"{name}.log"
            command = vllm_command(model, name, port, {**args, **_ON_CPUS})
            process = stack.enter_context(spawned(command, log, os.environ | VLLM_ENVIRONMENT))
            stock[name] = f"http://127.0.0.1:{port}"
            started.append((process, f"{stock[name]}/health", log))
        sluice = stack.enter_context(system(fields))
        for process, url, log in started:
            wait_until_ready(process, url, log, _START_S, threading.Event())
        url = f"{sluice.url}/v1/models"
        wait_until(lambda: len(httpx.get(url, timeout=120).json()["data"]) == 2, "both are listed")
        yield sluice.url, stock
