from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from sluice.deploy import ray_start
from sluice.replica.private_dir import make_private_dir
from tests.own_ray import shared_ray


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
