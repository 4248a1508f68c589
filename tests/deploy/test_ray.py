from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from sluice.deploy import ray_start
from sluice.deploy.ray_start import TRIES, TUNED, start_ray
from sluice.replica.private_dir import make_private_dir
from tests.documents import ROOT
from tests.own_ray import shared_ray

SLOW = "The current node timed out during startup. This could happen because"


class SlowRay:
    """What Ray does on a machine that is too busy: so many starts leave processes and fail."""

    def __init__(self, failures: int, words: str = SLOW) -> None:
        self.failures = failures
        self.words = words
        self.given: list[dict[str, Any]] = []
        self.left: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        self.given.append(options)
        if len(self.given) <= self.failures:
            code = "import time; time.sleep(600)"
            folder = f"--session-dir={options['_temp_dir']}/session_1"
            self.left.append(subprocess.Popen([sys.executable, "-c", code, folder]))
            raise Exception(self.words)


def replace(monkeypatch: pytest.MonkeyPatch, slow: SlowRay) -> None:
    monkeypatch.setattr("ray.init", slow.init)
    monkeypatch.setattr("ray.shutdown", lambda: None)


def test_a_start_that_took_too_long_is_tried_again_without_its_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowRay(TRIES - 1)
    replace(monkeypatch, slow)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start_ray(tmp_path, num_cpus=2)
        assert other.poll() is None, "somebody else's"
        other.kill()
    expected = {"address": "local", "_temp_dir": str(tmp_path), "num_cpus": 2}
    for given in slow.given:
        assert expected.items() <= given.items()
    assert len(slow.given) == TRIES
    assert len(slow.left) == TRIES - 1
    assert not any(psutil.pid_exists(process.pid) for process in slow.left)


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        (SLOW, TRIES),
        ("Timed out waiting for file /tmp/gcs_server_port", TRIES),
        ("Failed to start GCS. Last 0 lines", TRIES),
        ("no such folder", 1),
    ],
)
def test_what_does_not_pass_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, tries: int
) -> None:
    slow = SlowRay(TRIES, words)
    replace(monkeypatch, slow)
    with pytest.raises(Exception, match=words):
        start_ray(tmp_path)
    assert len(slow.given) == tries
    assert not any(psutil.pid_exists(process.pid) for process in slow.left)


# Ray settings.


def test_vllm_s_sockets_are_in_the_folder_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    folder = make_private_dir()
    try:
        ray_start.apply(folder)
        sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
        assert sockets.parent == folder
        assert sockets.is_dir()
        # 36 characters of vLLM's; a socket's path may have 107.
        assert len(str(sockets)) + 37 < 100
    finally:
        shutil.rmtree(folder)


# What processes choose, none of which is this one: it would keep all that it claims.

CHOICE = """
from sluice.deploy import ray_start

"""


@contextmanager
def choosing(code: str) -> Iterator[Callable[[], set[int]]]:
    """A process that runs ``code`` after :data:`CHOICE`, and stays; each call is a line of it."""
    theirs = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", CHOICE + code + "\ninput()"]
    with subprocess.Popen(
        command, env=theirs, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        out = process.stdout
        assert out is not None
        yield lambda: set(map(int, out.readline().split()))
        process.communicate("\n")
        assert process.returncode == 0


def test_no_connection_takes_a_port_between_its_choice_and_its_use() -> None:
    code = """
import socket
ports = [ray_start.free_port() for _ in range(200)]
print(*ports)
with socket.socket() as listener:
    listener.bind(("", ports[0]))
    print(ports[0], flush=True)
    print(*(ray_start.free_port() for _ in range(1_800)), flush=True)
"""
    with choosing(code) as line:
        ports, taken, others = line(), line(), line()
    assert len(ports) == 200
    assert max(ports) < 32_768  # Linux gives those from here on to connections
    assert not taken & others


@pytest.mark.skipif(sys.platform != "linux", reason="claims are of Linux")
def test_no_process_gets_a_port_that_another_has_chosen_and_not_used_yet() -> None:
    first = "print(*(ray_start.free_port() for _ in range(100)), flush=True)"
    second = "print(*(ray_start.free_port() for _ in range(1_000)), flush=True)"
    with choosing(first) as one, choosing(second) as other:
        ports = one()
        assert len(ports) == 100
        assert not ports & other()


@pytest.mark.ray
def test_workers_have_the_priority_of_other_programs() -> None:
    shared_ray.start()

    @ray.remote(num_cpus=0)
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=120) == os.nice(0)


# Ray up.


FILES = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
_NOT_SERVE = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def read(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def starts(config: dict[str, Any]) -> dict[str, str]:
    """The command that starts Ray, on the head and on workers."""
    found = {}
    for kind in ("head", "worker"):
        (command,) = [each for each in config[f"{kind}_start_ray_commands"] if "ray start" in each]
        found[kind] = command
    return found


@cache
def environment(before: str) -> dict[str, str]:
    """What ``before`` the start of Ray sets, as the shell of a node has it then."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euc", f"{before} env"],
        env={"PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in pairs if name.startswith("RAY_")}


def test_there_is_a_file_for_each_provider() -> None:
    assert [path.stem for path in FILES] == ["aws", "gcp", "local"]
    assert all(read(path)["provider"]["type"] == path.stem for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rays_own_loader_accepts_it(path: Path) -> None:
    validate_config(prepare_config(read(path)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rays_own_loader_sees_a_typo(path: Path) -> None:
    with pytest.raises(ValidationError, match="head_start_ray_comands"):
        validate_config(prepare_config({**read(path), "head_start_ray_comands": []}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_node_has_the_settings(path: Path) -> None:
    for command in starts(read(path)).values():
        before, _, _ = command.partition("ulimit")
        assert environment(before) == {**TUNED, **_NOT_SERVE}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_head_takes_no_work_and_its_dashboard_is_not_on_the_network(path: Path) -> None:
    head = starts(read(path))["head"]
    assert "--num-cpus=0" in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--autoscaling-config=" in head


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_token_reaches_every_node_and_is_not_in_the_file(path: Path) -> None:
    assert "~/.ray/auth_token" in read(path)["file_mounts"]
    assert "RAY_AUTH_TOKEN=" not in path.read_text(encoding="utf-8")


def test_its_image_is_linted_and_ends_without_root() -> None:
    path = ROOT / "deploy" / "ray" / "Dockerfile"
    users = [
        line.split()[1] for line in path.read_text("utf-8").splitlines() if line[:5] == "USER "
    ]
    base = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert users[0] == "0:0"
    assert f"USER {users[-1]}\n" in base, "the user is not that of the image below"
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists() and not os.environ.get("CI"):
        pytest.skip("hadolint is not installed")
    assert subprocess.run([linter, path], check=False).returncode == 0
