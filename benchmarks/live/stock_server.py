"""Stock vLLM's own server on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.benchmarks.live.processes import serving
from sluice.deploy.ray_settings import free_port

_START_LIMIT_S = 300.0


@contextmanager
def stock_server(model: Path, name: str, args: Mapping[str, Any], log: Path) -> Iterator[str]:
    """The server's address, until the block ends.

    Args:
        model: the model's directory.
        name: the model's name in requests.
        args: vLLM's arguments by command-line name without dashes.
        log: file for its output.

    Raises:
        LeftOutError: the server did not start; the message has the end of its log.
    """
    port = free_port()
    command, url = server_command(model, name, port, args), f"http://127.0.0.1:{port}"
    with serving(command, url, log, _START_LIMIT_S, environment=server_environment()):
        yield url


def server_command(model: Path, name: str, port: int, args: Mapping[str, Any]) -> list[str]:
    """The server's command; the arguments are those of :func:`stock_server`."""
    # Not `vllm serve`: it does not start from vLLM's build for CPUs, which has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    for key, value in args.items():
        if isinstance(value, bool):
            command.append(f"--{key}" if value else f"--no-{key}")
        else:
            command += [f"--{key}", str(value)]
    return command


def server_environment() -> dict[str, str]:
    """The environment in which the server starts."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
