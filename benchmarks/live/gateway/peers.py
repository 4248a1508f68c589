"""Other gateways of ``sluice bench gateway``: programs from PyPI, each in a virtual environment in
the user's cache, which is created if missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sluice.benchmarks.live.gateway.processes import LeftOutError

INSTALL_LIMIT_S = 600.0
_SHOWN = 300


class Router(NamedTuple):
    """A router in front of servers with vLLM's interface.

    Attributes:
        package: to install, with its version.
        module: to run.
    """

    package: str
    module: str

    def command(
        self, python: Path, port: int, metrics_port: int, workers: Sequence[str]
    ) -> list[str]:
        """The command that starts it on this machine in front of ``workers``."""
        places = ["--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        rest = ["--policy", "power_of_two", "--log-level", "error"]
        return [
            *(str(python), "-m", self.module, *places, *metrics, *rest),
            *("--worker-urls", *workers),
        ]


ROUTERS: Final = {
    "vllm-router": Router("vllm-router==0.1.17", "vllm_router.launch_router"),
    "sglang-router": Router("sglang-router==0.3.2", "sglang_router.launch_router"),
}


def cache_folder() -> Path:
    """Where the environments are."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sluice" / "bench"


def environment(package: str, say: Callable[[str], None]) -> Path:
    """The Python of the environment with ``package``; created and filled if missing.

    Raises:
        LeftOutError: it could not be created, or the package could not be installed.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache_folder() / f"{package.replace('==', '-')}-python{version}"
    if not folder.exists():
        say(f"installing {package} into {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it and renamed, so that an existing folder is complete.
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
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
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LeftOutError(f"cannot install it: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-_SHOWN:]
        raise LeftOutError(f"cannot install it: {said}")
