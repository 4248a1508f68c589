"""The replicas that run and those that are chosen, as Serve's request router knows them; all else
has only a handle. Serve copies its request router's module by value, so what that shares with the
process stands here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ray.serve._private.common import DeploymentID

from sluice.scheduling.placement.cold_start import LATE_PART


class Running:
    """Unique ids of the running replicas by deployment. Bounded by the number of replicas."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ids: dict[DeploymentID, frozenset[str]] = {}
        # Of a deployment without a replica, since when; and how long its last start took.
        self._none_since_s: dict[DeploymentID, float] = {}
        self._took_s: dict[DeploymentID, float] = {}

    def note(self, deployment: DeploymentID, replica_ids: Collection[str]) -> None:
        """These replicas of a deployment run, and no others."""
        now_s, ids = self._clock(), frozenset(replica_ids)
        if ids and not self.of(deployment):
            since_s = self._none_since_s.pop(deployment, self._began_s)
            self._took_s[deployment] = now_s - since_s
        elif not ids:
            self._none_since_s.setdefault(deployment, now_s)
        self._ids[deployment] = ids

    def of(self, deployment: DeploymentID) -> frozenset[str]:
        """The replicas of the deployment that are known to run."""
        return self._ids.get(deployment, frozenset())

    def starts_in_s(self, deployments: Sequence[DeploymentID], startup_s: float) -> float | None:
        """Predicted seconds until the first replica runs; ``None``: one runs. ``startup_s``: until
        a whole start was measured."""
        if any(map(self.of, deployments)):
            return None
        left_s = []
        for deployment in deployments:
            took_s = self._took_s.get(deployment, startup_s)
            since_s = self._none_since_s.get(deployment, self._began_s)
            left_s.append(max(since_s + took_s - self._clock(), LATE_PART * took_s))
        return min(left_s)


CHOSEN: Final[dict[str, Callable[[str], None]]] = {}
"""Of this process, by the id of an open request: called with each replica chosen for it, before
that answers."""

RUNNING: Final = Running()  # of this process
