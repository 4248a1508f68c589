"""A node of several dies with all that runs on it, or nothing comes through to it and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from sluice.deploy.commands.options import Exit
from tests.e2e.cluster import HEAD, START_S, Cluster
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.operators import ADMIN, OperatorTrial
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Setting, Trial
from tests.wire import can_cut

WORKERS = ("first", "second", "third")
_EDGE = {"sluice/role": "edge"}


class ClusterTrial(OperatorTrial):
    """An application on a cluster."""

    def __init__(self, cluster: Cluster, fields: dict[str, Any]) -> None:
        self.cluster = cluster
        super().__init__(fields, cluster.url)

    def routers(self) -> int:
        rows = self.cluster.dashboard.ask("GET", "/api/serve/applications/")["applications"]
        found = rows[self.app]["deployments"]["Router"]["replicas"]
        return sum(each["state"] == "RUNNING" for each in found)


class ClusterSetting(Setting):
    """A head without work, a node with the routers on this machine's network, and other nodes."""

    @contextmanager
    def open(self) -> Iterator[Trial]:
        cluster = Cluster()
        # Ray takes the node of which the smallest part is in use, not the one that asks.
        cluster.environment["RAY_scheduler_spread_threshold"] = "0"
        try:
            cluster.start()
            (label,) = (f"{name}={value}" for name, value in _EDGE.items())
            # Too small for a replica, and of all nodes the one with the largest part in use.
            cluster.add_node("edge", f"--labels={label}", cpus=1)
            for name in WORKERS:
                _add_worker(cluster, name)
            fields = {**self.fields, "router": {**self.fields["router"], "port": cluster.port}}
            path = cluster.folder / "sluice.yaml"
            path.write_text(yaml.safe_dump(fields))
            done = cluster.sluice("deploy", "--config", str(path), "--timeout", f"{START_S}")
            assert done.returncode == Exit.OK, done.stderr
            yield ClusterTrial(cluster, fields)
        finally:
            cluster.close()


NODES = ClusterSetting(
    {
        **FLEET.fields,
        "name": "sluice",
        "replica": {"count": 3, "num_cpus": 2},
        "router": {**FLEET.fields["router"], "admin": ADMIN, "node_labels": _EDGE},
    }
)
"""The fleet of the other scenarios on three nodes, and its routers on a fourth."""


def node_killed(trial: Trial) -> Callable[[], bool]:
    """The node with the controller ends, and with it a replica or more."""
    assert isinstance(trial, ClusterTrial)
    name, lost = _with_controller(trial)
    trial.cluster.kill_node(name)
    _add_worker(trial.cluster, name + " again")
    return trial.replaced(*lost)


def node_cut_off(trial: Trial) -> Callable[[], bool]:
    """Every packet to and from the controller's node is lost, without an error, for a time."""
    assert isinstance(trial, ClusterTrial)
    name, lost = _with_controller(trial)
    wire = trial.cluster.wires[name]
    trial.undo.callback(wire.mend)

    def streams() -> bool:
        rows = trial.snapshot()["replicas"]
        return any(row["decodes"] >= 2 for row in rows if row["replica_id"] in lost)

    wait_until(streams, "it has streams under way", show=trial.snapshot)
    wire.cut()
    return trial.replaced(*lost)


def _add_worker(cluster: Cluster, name: str) -> None:
    cluster.add_node(name, cpus=40, apart=can_cut())


def _with_controller(trial: ClusterTrial) -> tuple[str, list[str]]:
    node = trial.cluster.node_of_actor(f"{trial.app}-controller")
    assert node is not None
    there = [row["replica_id"] for row in trial.snapshot()["replicas"] if row["node_id"] == node]
    name = trial.cluster.node_names()[node]
    assert name not in (HEAD, "edge") and there, (name, there)
    return name, there


SCENARIOS = (
    Scenario(
        "a node of three killed, with the controller",
        NODES,
        node_killed,
        Load(rate=4.0),
        may_fail=True,
        forgets=True,
        quick=False,
    ),
    Scenario(
        "a node of three cut off, with the controller",
        NODES,
        node_cut_off,
        Load(rate=4.0),
        may_fail=True,
        forgets=True,
        longer_s=60.0,
        quick=False,
        missing=lambda: "" if can_cut() else "no network can be cut here, which needs root",
    ),
)
