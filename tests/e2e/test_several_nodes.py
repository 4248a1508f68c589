from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sluice.deploy.commands.admin import AdminApi
from sluice.deploy.commands.options import Exit
from sluice.deploy.ray_start import free_port
from tests.e2e.cluster import HEAD, START_S, Cluster
from tests.e2e.conftest import LENIENT

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]

KEY = "an-admin-key-of-the-tests"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster()
    try:
        it.start()
        for name in ("first", "second"):
            it.add_node(name)
        yield it
    finally:
        it.close()


@pytest.fixture(scope="module")
def deployed(cluster: Cluster) -> Cluster:
    result = deploy(cluster, 2)
    assert result["deployments"]["Replica"] == {"running": 2, "wanted": 2, "status": "HEALTHY"}
    assert result["addresses"] == [f"http://127.0.0.1:{cluster.port}/v1"]
    cluster.wait(lambda: len(serving(cluster)) == 2, "both replicas report")
    return cluster


def configuration(cluster: Cluster, replicas: int, port: int | None = None) -> str:
    """Two routers and some simulated engines, in a file."""
    path = cluster.folder / "sluice.yaml"
    data = {
        "controller": LENIENT,
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {
            "count": replicas,
            "num_cpus": 0.5,
            "max_per_node": 1,
        },
        "router": {"replicas": 2, "port": port or cluster.port, "admin": {"keys": [KEY]}},
    }
    path.write_text(yaml.safe_dump(data))
    return str(path)


def deploy(cluster: Cluster, replicas: int) -> dict[str, Any]:
    path = configuration(cluster, replicas)
    done = cluster.sluice("deploy", "--config", path, "--json", "--timeout", f"{START_S}")
    assert done.returncode == Exit.OK, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    assert result["deployments"]["Replica"]["wanted"] == replicas
    assert result["deployments"]["Replica"]["running"] >= replicas
    return result


def serving(cluster: Cluster) -> dict[str, str]:
    """Replicas that take requests -> their node."""
    rows = AdminApi(cluster.url, KEY).fleet()["replicas"]
    return {row["replica_id"]: row["node_id"] for row in rows if row["condition"] == "fresh"}


def configured(cluster: Cluster) -> set[float]:
    """The numbers of replicas that there should be, by the metric of each."""
    families = text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics", timeout=120).text)
    return {
        sample.value
        for family in families
        if family.name == "sluice_configured_replicas"
        for sample in family.samples
    }


def served(url: str) -> bool:
    """Whether a streamed request ends whole."""
    body = {"model": "sim", "prompt": "word " * 20, "max_tokens": 5, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    whole = answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text
    return answer.status_code == 200 and whole


def test_replicas_routers_and_the_controller_are_spread_and_not_on_the_head(
    deployed: Cluster,
) -> None:
    names = deployed.node_names()
    assert {names[node] for node in serving(deployed).values()} == {"first", "second"}
    controller = deployed.node_of_actor("sluice-controller")
    assert controller is not None
    assert names[controller] != HEAD
    assert served(deployed.url)


def test_a_drained_replica_gets_nothing_until_it_is_taken_back(deployed: Cluster) -> None:
    one, other = sorted(serving(deployed))
    done = deployed.sluice("drain", one, "--json", SLUICE_ADMIN_KEY=KEY)
    assert json.loads(done.stdout) == {"replica_id": one, "draining": True, "left": 0}
    body = {"model": "sim", "prompt": "word", "max_tokens": 1}
    answers = [
        httpx.post(f"{deployed.url}/v1/completions", json=body, timeout=120) for _ in range(20)
    ]
    assert {answer.headers["x-sluice-replica"] for answer in answers} == {other}
    assert deployed.sluice("drain", one, "--undo", SLUICE_ADMIN_KEY=KEY).returncode == Exit.OK
    assert set(serving(deployed)) == {one, other}


@pytest.mark.parametrize(
    ("words", "environment", "code", "says"),
    [
        ((), {"RAY_AUTH_TOKEN": "0" * 64}, Exit.REFUSED, "RAY_AUTH_TOKEN"),
        (("--name", "other"), {}, Exit.FAILED, "/"),
    ],
)
def test_what_deploy_cannot_do_it_says_in_a_line(
    deployed: Cluster, words: tuple[str, ...], environment: dict[str, str], code: Exit, says: str
) -> None:
    path = configuration(deployed, 2)
    done = deployed.sluice("deploy", "--config", path, "--timeout", "60", *words, **environment)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert says in last


def test_another_number_of_replicas_is_reached_without_touching_the_others(
    deployed: Cluster,
) -> None:
    two = set(serving(deployed))
    deploy(deployed, 1)
    deployed.wait(lambda: len(serving(deployed)) == 1, "one is gone")
    one = set(serving(deployed))
    assert one < two
    deployed.wait(lambda: configured(deployed) == {1}, "it has heard of the other number")
    deploy(deployed, 2)
    deployed.wait(lambda: len(serving(deployed)) == 2, "there are two again")
    assert one < set(serving(deployed))
    deployed.wait(lambda: configured(deployed) == {2}, "both have")


def test_a_second_application_leaves_the_first_as_it_is(deployed: Cluster) -> None:
    before = set(serving(deployed))
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ("--name", "other", "--timeout", f"{START_S}")
    done = deployed.sluice("deploy", "--config", configuration(deployed, 1, port), *words)
    assert done.returncode == Exit.OK, done.stderr
    assert done.stdout.splitlines()[1:] == [f"{url}/v1"]
    assert served(url)
    assert set(serving(deployed)) == before


def test_a_port_is_not_shared_with_another_application(deployed: Cluster) -> None:
    words = ("--name", "third", "--timeout", f"{START_S}")
    done = deployed.sluice("deploy", "--config", configuration(deployed, 1), *words)
    assert done.returncode == Exit.FAILED
    assert f"cannot listen on port {deployed.port}" in done.stderr
