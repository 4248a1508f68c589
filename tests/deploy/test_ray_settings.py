from __future__ import annotations

import os
import shutil
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from deploy import ray_settings


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


def test_no_connection_takes_a_port_between_its_choice_and_its_use() -> None:
    ports = [ray_settings.free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert max(ports) < 32_768  # Linux gives those from here on to connections
    with socket.socket() as listener:
        listener.bind(("", ports[0]))
        assert ports[0] not in {ray_settings.free_port() for _ in range(1_800)}
