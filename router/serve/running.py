"""The replicas that run, as Serve's request router knows them.

Serve constructs the request router, and everything else has only a handle; both are in one process
and share only this.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ray.serve._private.common import DeploymentID


class Running:
    """Unique ids of the running replicas by deployment. Bounded by the number of replicas."""

    def __init__(self) -> None:
        self._ids: dict[DeploymentID, frozenset[str]] = {}

    def note(self, deployment: DeploymentID, replica_ids: Collection[str]) -> None:
        """These replicas of a deployment run, and no others."""
        self._ids[deployment] = frozenset(replica_ids)

    def of(self, deployment: DeploymentID) -> frozenset[str]:
        """The replicas of the deployment that are known to run."""
        return self._ids.get(deployment, frozenset())


RUNNING: Final = Running()
"""Of this process."""
