from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from sluice.deploy.commands.options import Exit
from sluice.scheduling.fleet.ranks import rank_of, replica_of
from tests.e2e.cluster import START_S, Cluster
from tests.e2e.conftest import LENIENT
from tests.e2e.test_workers import hurt, load
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]

GPUS = {"first": 4, "second": 2}
PAIR = {"left": 3, "right": 1}
"""Room for a replica with two workers on one node, and for another one on both."""

RACK = "sluice-tests/rack"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster()
    # Serve says after this time that a replica finds no place.
    it.environment["RAY_SERVE_SLOW_STARTUP_WARNING_S"] = "5"
    try:
        it.start()
        for name, gpus in GPUS.items():
            it.add_node(name, f"--num-gpus={gpus}", f"--labels={RACK}={name}")
        yield it
    finally:
        it.close()


def spanning(workers: int, **replica: Any) -> dict[str, Any]:
    """A model with one replica of so many workers, each an actor of Ray."""
    arguments = {"tensor-parallel-size": workers, "distributed-executor-backend": "ray"}
    return {
        "engine": {"vllm_args": arguments},
        "replica": {"count": 1, "num_gpus": workers, **replica},
    }


def deploy(cluster: Cluster, models: dict[str, Any], timeout_s: float = START_S) -> tuple[int, str]:
    """Have just these models on the cluster. Returns the exit status and the last error."""
    path = cluster.folder / "sluice.yaml"
    data = {
        "controller": {**LENIENT, "policy": "round_robin"},
        "engine": {"kind": "simulated"},
        "replica": {"num_cpus": 0.5, "drain_timeout_s": 1},
        "router": {"replicas": 1, "port": cluster.port},
        "models": models,
    }
    path.write_text(yaml.safe_dump(data))
    done = cluster.sluice("deploy", "--config", str(path), "--timeout", f"{timeout_s}")
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def placed(cluster: Cluster) -> dict[str, Counter[str]]:
    """The placement groups that have got their resources: id -> number of bundles on each node."""
    names = cluster.node_names()
    return {
        key: Counter(names[each["node_id"]] for each in group["bundles"])
        for key, group in cluster.placement_groups().items()
        if group["state"] == "CREATED"
    }


def test_bundles_are_packed_and_where_their_labels_say(cluster: Cluster) -> None:
    models = {
        "large": spanning(4, placement_strategy="STRICT_PACK"),
        "labelled": spanning(2, node_labels={RACK: "second"}),
        "ranked": {"engine": {"vllm_args": {"data-parallel-size": 2}}, "replica": {"count": 1}},
    }
    status, line = deploy(cluster, models)
    assert status == Exit.OK, line
    groups = placed(cluster).values()
    assert sorted(groups, key=Counter.total) == [{"second": 2}, {"first": 4}]
    bundles = sorted(
        tuple(sorted(each["unit_resources"].items()))
        for group in cluster.placement_groups().values()
        for each in group["bundles"]
    )
    assert bundles == [(("CPU", 0.5), ("GPU", 1.0))] * 2 + [(("GPU", 1.0),)] * 4


def test_requests_go_to_the_rank_that_is_chosen(cluster: Cluster) -> None:
    """By the application of the test above."""
    served: set[str] = set()

    def both() -> bool:
        body = {"model": "ranked", "prompt": "word", "max_tokens": 1}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        served.add(answer.headers["x-sluice-replica"])
        return {rank_of(each) for each in served} == {0, 1}

    cluster.wait(both, "both ranks serve")
    assert len(set(map(replica_of, served))) == 1


def test_a_replica_spans_nodes_and_its_group_ends_with_it(cluster: Cluster) -> None:
    before = set(cluster.placement_groups())
    status, line = deploy(cluster, {"large": spanning(6)})
    assert status == Exit.OK, line
    ((first, nodes),) = placed(cluster).items()
    assert nodes == GPUS
    assert first not in before, "those of the replicas that ended are removed"
    (replica,) = cluster.actors("ServeReplica:sluice:Replica-large")
    bundle = cluster.placement_groups()[first]["bundles"][0]
    assert replica["node_id"] == bundle["node_id"], "the replica is in the first bundle"

    os.kill(replica["pid"], signal.SIGKILL)
    cluster.wait(lambda: first not in cluster.placement_groups(), "its group is removed")
    cluster.wait(lambda: list(placed(cluster).values()) == [GPUS], "another replica has a group")


def test_what_does_not_fit_is_said(cluster: Cluster) -> None:
    status, line = deploy(cluster, {"large": spanning(6, placement_strategy="STRICT_PACK")}, 40)
    assert status == Exit.TIMED_OUT
    assert "replica-large 0/1" in line
    assert "a replica of Replica-large needs 6 GPUs on one node" in line
    assert placed(cluster) == {}


@pytest.fixture(scope="module")
def real_engine(cluster: Cluster) -> dict[str, Any]:
    """The configuration of a vLLM engine, and nodes on which its workers may be actors of Ray."""
    plugin = cluster.folder / "stated_gpus-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: stated-gpus\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nstated_gpus = stated_gpus:register\n"
    )
    shutil.copy(Path(__file__).with_name("stated_gpus.py"), cluster.folder)
    cluster.environment["PYTHONPATH"] = str(cluster.folder)
    for name, gpus in PAIR.items():
        cluster.add_node(name, f"--num-gpus={gpus}", f"--labels={RACK}=pair")
    return {
        "kind": "vllm",
        "latency_profile": str(known_profile(cluster.folder)),
        "grammar_check_s": 0,
        "vllm_args": {"max-model-len": 2048, "block-size": 32},
    }


@pytest.mark.parametrize("option", ["tensor-parallel-size", "pipeline-parallel-size"])
def test_workers_on_two_nodes_write_what_one_does_and_one_that_ends_costs_no_request(
    cluster: Cluster, real_engine: dict[str, Any], option: str
) -> None:
    arguments = {**real_engine["vllm_args"], option: 2, "distributed-executor-backend": "ray"}
    models = {
        "one": {"engine": real_engine, "replica": {"count": 1}},
        "pair": {
            "engine": {**real_engine, "vllm_args": arguments},
            "replica": {"count": 2, "num_gpus": 2, "node_labels": {RACK: "pair"}},
        },
    }
    status, line = deploy(cluster, models)
    assert status == Exit.OK, line
    apart = [{"left": 2}, {"left": 1, "right": 1}]

    def workers() -> dict[int, str]:
        names, rows = cluster.node_names(), cluster.actors("RayWorkerProc")
        return {row["pid"]: names[row["node_id"]] for row in rows}

    assert sorted(placed(cluster).values(), key=len) == apart
    whole = asyncio.run(load(cluster.url, "one", []))
    assert asyncio.run(load(cluster.url, "pair", [])) == whole
    before = workers()
    assert Counter(before.values()) == PAIR
    (killed,) = (pid for pid, node in before.items() if node == "right")
    found, begun = asyncio.run(hurt(cluster.url, "pair", psutil.Process(killed)))
    assert found == whole
    assert len(set(begun)) == 2, "both replicas had streams"
    cluster.wait(
        lambda: Counter(workers().values()) == PAIR and len(workers().keys() - before) == 2,
        "another replica has workers in the same places",
    )
