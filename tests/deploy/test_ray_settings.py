from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import ray

from sluice.deploy import ray_settings
from tests.own_ray import shared_ray


def ports_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> range:
    """What an instance's routers get, that Serve reads from the environment."""
    names = [f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT" for end in ("MIN", "MAX")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    folder = ray_settings.make_local_dir()
    try:
        ray_settings.apply(folder)
        return range(*(int(os.environ[name]) for name in names))
    finally:
        shutil.rmtree(folder)


def test_two_instances_on_a_machine_share_no_port_of_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they did, HAProxy could send one's requests to the other."""
    held: list[socket.socket] = []
    try:
        for _ in range(20):
            ports = ports_of_an_instance(monkeypatch)
            first_router = socket.socket()
            first_router.bind(("", ports.start))
            held.append(first_router)
            assert len(ports) >= 128
        begins = sorted(each.getsockname()[1] for each in held)
        assert all(after - before >= 128 for before, after in pairwise(begins))
    finally:
        for each in held:
            each.close()


def test_two_instances_on_a_machine_listen_at_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Serve fixes for the whole machine, each instance has for itself."""
    names = ray_settings.LOCAL_LISTENERS
    seen: list[str] = []
    for _ in range(2):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        ports_of_an_instance(monkeypatch)
        seen += [os.environ[name] for name in names]
    assert len(set(seen)) == 2 * len(names) == 8


def test_vllm_s_sockets_are_in_the_folder_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    folder = ray_settings.make_local_dir()
    try:
        ray_settings.apply(folder)
        sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
        assert sockets.parent == folder
        assert sockets.is_dir()
        # 36 characters of vLLM's; a socket's path may have 107.
        assert len(str(sockets)) + 37 < 100
    finally:
        shutil.rmtree(folder)


# What processes choose, none of which is this one: it would keep all that it claims.

CHOICE = """
import os
import shutil
from sluice.deploy import ray_settings

def routers():
    for end in ("MIN", "MAX"):
        os.environ.pop(f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT", None)
    folder = ray_settings.make_local_dir()
    ray_settings.apply(folder)
    shutil.rmtree(folder)
    return os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"]

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
ports = [ray_settings.free_port() for _ in range(200)]
print(*ports)
with socket.socket() as listener:
    listener.bind(("", ports[0]))
    print(ports[0], flush=True)
    print(*(ray_settings.free_port() for _ in range(1_800)), flush=True)
"""
    with choosing(code) as line:
        ports, taken, others = line(), line(), line()
    assert len(ports) == 200
    assert max(ports) < 32_768  # Linux gives those from here on to connections
    assert not taken & others


@pytest.mark.skipif(sys.platform != "linux", reason="claims are of Linux")
def test_no_process_gets_a_port_that_another_has_chosen_and_not_used_yet() -> None:
    first = "print(routers())\nprint(*(ray_settings.free_port() for _ in range(100)), flush=True)"
    second = (
        "print(*(routers() for _ in range(100)))\n"
        "print(*(ray_settings.free_port() for _ in range(1_000)), flush=True)"
    )
    with choosing(first) as one:
        routers, ports = one(), one()
        assert (len(routers), len(ports)) == (1, 100)
        with choosing(second) as other:
            assert not routers & other()
            assert not ports & other()


@pytest.mark.ray
def test_workers_have_the_priority_of_other_programs() -> None:
    shared_ray.serve_port()

    @ray.remote(num_cpus=0)
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=120) == os.nice(0)
