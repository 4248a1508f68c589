"""What the chart hands to KubeRay, run on a real Ray cluster as KubeRay would run it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import START_S, Cluster
from tests.e2e.conftest import wait_until
from tests.helm.chart import Release, render

pytestmark = pytest.mark.ray

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
    config["proxy_location"] = "HeadOnly"
    config["http_options"] = {"host": "127.0.0.1", "port": cluster.port}
    router = config["applications"][0]["args"]["router"]
    router["port"] = cluster.port
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


def test_the_application_of_the_chart_serves_who_has_a_key(cluster: Cluster) -> None:
    config = on_this_machine(render(VALUES), cluster)
    cluster.dashboard.ask("PUT", "/api/serve/applications/", config)
    with httpx.Client(base_url=cluster.url, timeout=30) as client:

        def status(path: str, kind: str | None = None) -> int:
            headers = {} if kind is None else {"authorization": f"Bearer {KEYS[kind]}"}
            try:
                return client.get(path, headers=headers).status_code
            except httpx.TransportError:
                return 0

        wait_until(lambda: status("/v1/models", "api") == 200, "a client is served", START_S)
        # What KubeRay's probe of a worker looks for.
        assert "success" in client.get("/-/healthz").text
        assert status("/health") == 200
        opened = {"/v1/models": "api", "/admin/v1/fleet": "admin", "/metrics": "metrics"}
        for path, needed in opened.items():
            answers = {kind: status(path, kind) for kind in (*KEYS, None)}
            assert answers.pop(needed) == 200, path
            assert set(answers.values()) <= {401, 403}, path
