from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from tests.e2e.cluster import BIN, START_S, Cluster
from tests.e2e.conftest import wait_until
from tests.helm.chart import Release, render
from tests.helm.test_options import run_test_pod

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]

KEYS = {kind: f"some-{kind}-key-of-the-tests" for kind in ("api", "admin", "metrics")}
VALUES = {
    **{f"{kind}Keys": {"entries": [key]} for kind, key in KEYS.items()},
    "config": {
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 1},
        "router": {"replicas": 1},
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs and a worker, as the chart has them."""
    it = Cluster()
    try:
        it.start()
        it.add_node("worker")
        wait_until(lambda: len(it.node_names()) == 2, "both nodes are there", START_S)
        yield it
    finally:
        it.close()


def on_this_machine(release: Release, cluster: Cluster) -> dict[str, Any]:
    """The Serve configuration with the cluster's port, and with the Secrets in its folder."""
    config = release.serve_config
    router = config["applications"][0]["args"]["router"]
    router |= {"host": "127.0.0.1", "port": cluster.port}
    secrets = {
        secret["metadata"]["name"].split("-")[-2]: secret["data"]["keys.yaml"]
        for secret in release.of("Secret")
    }
    for kind, part in (("api", router), ("admin", router["admin"]), ("metrics", router["metrics"])):
        name = "api_keys_file" if kind == "api" else "keys_file"
        path = cluster.folder / Path(part[name]).relative_to("/")
        path.parent.mkdir(parents=True)
        path.write_bytes(base64.b64decode(secrets[kind]))
        part[name] = str(path)
    return config


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    """A client of the application, once it serves."""
    config = on_this_machine(render(VALUES), cluster)
    cluster.dashboard.ask("PUT", "/api/serve/applications/", config)
    with httpx.Client(base_url=cluster.url, timeout=120) as it:
        wait_until(lambda: status(it, "/v1/models", "api") == 200, "a client is served", START_S)
        yield it


def holding(kind: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[kind]}"}


def status(client: httpx.Client, path: str, kind: str | None = None) -> int:
    """Status of the answer to who holds a key, or none; 0 without an answer."""
    try:
        return client.get(path, headers=holding(kind) if kind else {}).status_code
    except httpx.TransportError:
        return 0


def test_who_has_a_key_is_served(client: httpx.Client) -> None:
    # What KubeRay's probe of a worker looks for.
    assert "success" in client.get("/-/healthz").text
    assert status(client, "/health") == 200
    opened = {"/v1/models": "api", "/admin/v1/fleet": "admin", "/metrics": "metrics"}
    for path, needed in opened.items():
        answers = {kind: status(client, path, kind) for kind in (*KEYS, None)}
        assert answers.pop(needed) == 200, path
        assert set(answers.values()) <= {401, 403}, path


def test_the_test_pod_is_served(client: httpx.Client) -> None:
    release = render({**VALUES, "test": {"apiKey": {"existingSecret": "client"}}})
    done = run_test_pod(release, str(client.base_url).rstrip("/"), KEYS["api"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: x-sluice-admission is guaranteed" in done.stdout


def test_a_worker_that_is_to_end_hands_over_first(cluster: Cluster, client: httpx.Client) -> None:
    """The only replica and the only router are on the node, with an answer on its way."""
    cluster.add_node("other")
    wait_until(lambda: len(cluster.node_names()) == 3, "the other node is there", START_S)

    def stream() -> str:
        body = {"model": "sim", "prompt": "word", "max_tokens": 3_000, "stream": True}
        url, key = f"{cluster.url}/v1/completions", holding("api")
        with httpx.stream("POST", url, json=body, headers=key, timeout=START_S) as answer:
            return answer.read().decode()

    def replicas() -> list[dict[str, Any]]:
        answer = client.get("/admin/v1/fleet", headers=holding("admin"))
        rows: list[dict[str, Any]] = answer.json()["replicas"] if answer.is_success else []
        return rows

    (before,) = replicas()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream)
        wait_until(lambda: any(row["running"] for row in replicas()), "the answer has begun")
        names = cluster.node_names()
        hook = end_worker(cluster, names[before["node_id"]], before["node_id"])

        def handed_over() -> bool:
            fresh = [row for row in replicas() if row["condition"] == "fresh"]
            taking = {names[row["node_id"]] for row in fresh if row["drain"] is None}
            return taking == {"other"}

        wait_until(handed_over, "a replica elsewhere has taken over", START_S)
        text = answer.result()
        assert hook.wait(START_S) == 0
    assert text.rstrip().endswith("data: [DONE]") and '"error"' not in text
    assert status(client, "/v1/models", "api") == 200


def end_worker(cluster: Cluster, name: str, node_id: str) -> subprocess.Popen[bytes]:
    """The hook of a worker's pod, which would know the node and see its processes alone."""
    (container,) = render(VALUES).pods[1]["spec"]["containers"]
    shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    folder = cluster.folder / "pod"
    (folder / "proc").mkdir(parents=True)
    for process in psutil.Process(cluster.nodes[name].pid).children(recursive=True):
        (folder / "proc" / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    address = f"{ray.util.get_node_ip_address()}:{cluster.gcs_port}"
    command = folder / "ray"
    command.write_text(f'#!/bin/sh\nexec {BIN}/ray "$@" --node-id {node_id} --address {address}\n')
    command.chmod(0o755)
    environment = {**cluster.environment, "PATH": f"{folder}:{os.environ['PATH']}"}
    own = script.replace("/proc/", f"{folder}/proc/")
    return subprocess.Popen([shell, option, own], env=environment)
