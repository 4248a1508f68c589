"""A node of several dies with all that runs on it, or nothing comes through to it and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from sluice.deploy.commands.exits import Exit
from tests.e2e.cluster import HEAD, START_S, Cluster
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.operators import ADMIN, OperatorTrial
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Setting, Trial
from tests.wire import can_cut

WORKERS = ("first", "second", "third")


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
    """A head that does no work but to take the connections, and nodes that do all the rest."""

    @contextmanager
    def open(self) -> Iterator[Trial]:
        cluster = Cluster()
        try:
            cluster.start()
            for name in WORKERS:
                cluster.add_node(name, apart=can_cut())
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
        "replica": {"count": 3, "num_cpus": 1},
        "router": {**FLEET.fields["router"], "admin": ADMIN},
    }
)
"""The fleet of the other scenarios on three nodes."""


def node_killed(trial: Trial) -> Callable[[], bool]:
    """The node with the controller ends, and with it a replica or more and perhaps a router."""
    assert isinstance(trial, ClusterTrial)
    name, lost = _with_controller(trial)
    trial.cluster.kill_node(name)
    trial.cluster.add_node(name + " again", apart=can_cut())
    return trial.replaced(*lost)


def node_cut_off(trial: Trial) -> Callable[[], bool]:
    """Every packet to and from the node with the controller is lost, and nobody is told. What runs
    there goes on by itself; later the cable is whole again, and Ray ends what it has replaced."""
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


def _with_controller(trial: ClusterTrial) -> tuple[str, list[str]]:
    """The name of the node with the controller, and the replicas on it."""
    node = trial.cluster.node_of_actor(f"{trial.app}-controller")
    assert node is not None
    there = [row["replica_id"] for row in trial.snapshot()["replicas"] if row["node_id"] == node]
    name = trial.cluster.node_names()[node]
    assert name != HEAD and there
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
