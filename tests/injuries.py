"""Kills or freezes (SIGSTOP) the processes of an application's parts, found in Ray's own state."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from sluice.controller.discovery import NAMESPACE, controller_actor_name
from sluice.deploy.app import REPLICA_DEPLOYMENTS, ROUTER_DEPLOYMENT
from sluice.scheduling.roles import Role

_CALL_S = 10.0


class MissingError(LookupError):
    """The target of the fault is missing, or missing at the moment."""


class Process:
    """A process with all processes that it has started so far, itself last in ``members``."""

    def __init__(self, members: Sequence[psutil.Process]) -> None:
        self._members = members

    @classmethod
    def of(cls, pid: int) -> Process:
        try:
            process = psutil.Process(pid)
            return cls([*process.children(recursive=True), process])
        except psutil.NoSuchProcess:
            raise MissingError(f"process {pid} has ended") from None

    @property
    def pid(self) -> int:
        return int(self._members[-1].pid)

    @property
    def runs(self) -> bool:
        member = self._members[-1]
        with suppress(psutil.NoSuchProcess):
            return bool(member.is_running()) and member.status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def engine(self) -> Process:
        if len(self._members) == 1:
            raise MissingError(f"process {self.pid} has started no other: no engine of its own")
        return Process(self._members[:-1])

    def _send(self, what: signal.Signals) -> None:
        for member in self._members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(what)


def replica(replica_id: str) -> Process:
    """A replica by its name in ``x-sluice-replica``. Raises MissingError, as all of these do."""
    return _one(each for each in _actors("serve") if each["Name"].endswith(f"#{replica_id}"))


def replica_ids(app: str = "sluice", *roles: Role) -> list[str]:
    """The living replicas of an application with one model, of these roles or of all."""
    names = [REPLICA_DEPLOYMENTS[role] for role in roles or REPLICA_DEPLOYMENTS]
    begins = tuple(f"SERVE_REPLICA::{app}#{name}#" for name in names)
    named = (each["Name"] for each in _actors("serve"))
    return sorted(name.rpartition("#")[2] for name in named if name.startswith(begins))


def routers(app: str = "sluice") -> list[Process]:
    """The living router replicas of an application."""
    begins = f"SERVE_REPLICA::{app}#{ROUTER_DEPLOYMENT}#"
    found = [each for each in _actors("serve") if each["Name"].startswith(begins)]
    living = []
    for each in sorted(found, key=lambda each: str(each["Name"])):
        with suppress(MissingError):  # Ray has not noticed yet
            living.append(Process.of(each["Pid"]))
    return living


def controller(app: str = "sluice") -> Process:
    """The controller of an application with one model."""
    name = controller_actor_name(app)
    return _one(each for each in _actors(NAMESPACE) if each["Name"] == name)


def serve_controller() -> Process:
    """The controller of Ray Serve."""
    return _one(each for each in _actors("serve") if each["Name"] == "SERVE_CONTROLLER_ACTOR")


def drain(replica_id: str, drained: bool, app: str = "sluice") -> None:
    """Drain a replica, or undo that, as an operator does."""
    actor = ray.get_actor(controller_actor_name(app), namespace=NAMESPACE)
    ray.get(actor.drain.remote(replica_id, drained), timeout=_CALL_S)


@contextmanager
def drained(replica_id: str, app: str = "sluice") -> Iterator[None]:
    """Drain a replica until the block ends."""
    drain(replica_id, True, app)
    try:
        yield
    finally:
        drain(replica_id, False, app)


def scale(replicas: int, app: str = "sluice", role: Role = "mixed") -> None:
    """Have Serve start, or gracefully stop, replicas of a pool until there are ``replicas``."""
    target = DeploymentID(name=REPLICA_DEPLOYMENTS[role], app_name=app)
    serve = _get_global_client()._controller
    ray.get(serve.update_deployment_replicas.remote(target, replicas), timeout=_CALL_S)


def _actors(namespace: str) -> list[dict[str, Any]]:
    # Ray's public API for this needs the dashboard, which our application starts without.
    from ray._private.state import state

    named = ray.util.list_named_actors(all_namespaces=True)
    names = {each["name"] for each in named if each["namespace"] == namespace}
    rows = state.actor_table(None, None, "ALIVE").values()
    return [row for row in rows if row["Name"] in names]


def _one(found: Iterable[dict[str, Any]]) -> Process:
    rows = list(found)
    if len(rows) != 1:
        raise MissingError(f"{len(rows)} living actors match, expected one")
    return Process.of(rows[0]["Pid"])
