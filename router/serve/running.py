"""The number of replicas that run, as Serve's request router knows it.

Serve constructs the request router, and everything else has only a handle; both are in one process
and share only this.
"""

from __future__ import annotations

from typing import Final

from ray.serve._private.common import DeploymentID


class Running:
    """Numbers of running replicas by deployment. Bounded by the number of deployments."""

    def __init__(self) -> None:
        self._counts: dict[DeploymentID, int] = {}

    def note(self, deployment: DeploymentID, count: int) -> None:
        """``count`` replicas of a deployment run."""
        self._counts[deployment] = count

    def any(self, deployment: DeploymentID) -> bool:
        """Whether a replica of the deployment is known to run."""
        return self._counts.get(deployment, 0) > 0


RUNNING: Final = Running()
"""Of this process."""
