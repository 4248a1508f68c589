"""Stock vLLM's own server on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_LIMIT_S = 300.0
_END_LIMIT_S = 30.0
_POLL_S = 0.25
_LOG_TAIL = 2_000


@contextmanager
def stock_server(
    model: Path, name: str, port: int, args: Mapping[str, Any], log: Path
) -> Iterator[str]:
    """The server's address, until the block ends.

    Args:
        model: the model's directory.
        name: the model's name in requests.
        port: a free one.
        args: vLLM's arguments by command-line name without dashes.
        log: file for its output.

    Raises:
        RuntimeError: the server did not start; the message has the end of its log.
    """
    command = server_command(model, name, port, args)
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=server_environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait(server, f"{url}/health", log)
            yield url
        finally:
            _end(server)


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


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > limit_s:
                tail = log.read_text(errors="replace")[-_LOG_TAIL:]
                raise RuntimeError(f"stock vLLM did not start:\n{tail}") from None
        time.sleep(_POLL_S)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all processes that it started."""
    for number, limit_s in ((signal.SIGTERM, _END_LIMIT_S), (signal.SIGKILL, None)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(limit_s)
        except subprocess.TimeoutExpired:
            continue
    server.wait()
