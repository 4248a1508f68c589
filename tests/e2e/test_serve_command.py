from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from sluice.deploy.commands.options import Exit
from sluice.deploy.ray_start import free_port
from tests.documents import ROOT, section
from tests.e2e.conftest import wait_until
from tests.processes import the_one

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]

SLUICE = Path(sys.executable).with_name("sluice")
BODY = {"model": "local", "prompt": "Hello.", "max_tokens": 3}
FAST = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1", "OMP_NUM_THREADS": "1"}


class Serving:
    """A running ``sluice serve``; ``family`` is every process that it had when it was ready."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.home = folder / "home"
        self.home.mkdir()
        self.environment = environment() | {"HOME": str(self.home)}
        self.environment.pop("XDG_STATE_HOME", None)
        self._out, self._err = folder / "home" / "out", folder / "home" / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = psutil.Popen(
                [*(words or (SLUICE,)), "serve", "--port", str(self.port), "--engine", "simulated"],
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.err
            return "Ctrl-C stops" in self.err

        wait_until(ready, "sluice serve is ready", 300, lambda: self.err, every_s=0.2)
        self.family = self.process.children(recursive=True)

    def one(self, name: str) -> psutil.Process:
        return the_one(self.family, name)

    def wait_end(self) -> int:
        code: int = self.process.wait(timeout=120)

        def gone() -> bool:
            return not any(map(runs, self.family)) and _is_free(self.port)

        def left() -> object:
            return [each for each in self.family if runs(each)]

        wait_until(gone, "all of it has ended", 60, left)
        return code


def environment() -> dict[str, str]:
    """Without what the tests have set for a Ray in their own process."""
    theirs = ("RAY_", "PYTHON", "SLUICE_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(theirs)}
    return kept | FAST


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


SHADOWS = ("telemetry.py", "scheduling.py", "random.py", "router/__init__.py", "ray/__init__.py")
"""Files with names of modules of ours, of Ray's and of Python's, in the working folder."""

AS_MODULE = (sys.executable, "-m", "sluice.deploy.cli")


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Serving]:
    """A command that answers, started in a folder with :data:`SHADOWS`."""
    for name in SHADOWS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('a file of the working folder was imported')\n")
    it = Serving(folder, *words)
    try:
        it.wait_ready()
        assert httpx.post(f"{it.url}/v1/completions", json=BODY, timeout=120).status_code == 200
        assert _token(it).stat().st_mode & 0o777 == 0o600
        yield it
        assert not (it.home / ".ray").exists()
    finally:
        for process in (it.process, *it.family):
            if runs(process):
                process.kill()


def _token(it: Serving) -> Path:
    return Path(it.one("raylet").environ()["RAY_AUTH_TOKEN_PATH"])


@pytest.mark.release
def test_the_end_of_ray_ends_all_of_it_in_one_line(tmp_path: Path) -> None:
    with serving(tmp_path, *AS_MODULE) as it:
        shown = it.out
        it.one("gcs_server").kill()
        assert it.wait_end() == Exit.FAILED
        (line,) = it.err.partition("Ctrl-C stops\n")[2].splitlines()
        assert line.startswith("Error: ") and "gcs_server" in line
        assert it.out == shown


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as it:
        token = _token(it)
        status = subprocess.run([SLUICE, "status"], env=it.environment, cwd="/", check=False)
        assert status.returncode == Exit.OK, "the address and the key are found"
        shown = it.out
        # As a terminal sends SIGINT, and a service manager SIGTERM.
        (os.killpg if number == signal.SIGINT else os.kill)(it.process.pid, number)
        assert it.wait_end() == Exit.OK
        assert it.err.partition("Ctrl-C stops\n")[2] == "sluice: stopping\n"
        assert it.out == shown
        assert not token.parent.exists()


@pytest.mark.release
def test_it_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as it:
        files = it.home / ".local" / "state" / "sluice" / "batches" / str(it.port)
        assert files.is_dir() and f"files and batches: {files}" in it.err.replace("\n", "")
        assert httpx.get(f"{it.url}/v1/files", timeout=120).json()["data"] == []
        folder = _token(it).parent
        assert folder.is_dir()
        it.process.kill()
        assert it.wait_end() == -signal.SIGKILL
        wait_until(lambda: not folder.exists(), "its folder is removed", 60)


def check_ports(processes: Iterable[psutil.Process]) -> None:
    """Every socket that listens is in the table, and every row of the table has one."""
    table = section(ROOT / "SECURITY.md", "Ports")
    allowed: dict[tuple[str, bool], str] = {}
    for port, owners, where, _ in re.findall(r"(?m)^\| (.*) \| (.*) \| (.*) \| (.*) \|$", table):
        if " only " not in port and where != "listens on":
            for process in re.findall(r"`([^`]+)`", owners):
                allowed[process, where != "every interface"] = port
    seen = {}
    for process in processes:
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                here = each.laddr.ip.removeprefix("::ffff:").startswith("127.")
                seen[_label(process), here] = each.laddr
    assert seen.keys() - allowed.keys() == set(), seen
    # Another instance on the machine may have the ports of Ray's metrics, no worker be idle, and
    # the driver has left Ray.
    may_lack = {
        (name, True) for name in ("monitor.py", "dashboard.py", "ray::IDLE", "sluice-driver")
    }
    assert allowed.keys() - seen.keys() <= may_lack


def _label(process: psutil.Process) -> str:
    words = process.cmdline()
    scripts = [Path(word).name for word in words[:3] if word.endswith(".py")]
    title = words[0].split(".")[0] if words[0].startswith("ray::") else ""
    actor = re.match(r"ray::\w+", title)
    return actor[0] if actor else next(iter(scripts), process.name())
