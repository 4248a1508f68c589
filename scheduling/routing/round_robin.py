"""Round robin: every replica in turn, whatever its load."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.routing.base import Job, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Takes the replicas in turn, in the order of their rows: the next eligible one after the last
    choice. ``O(log replicas)``."""

    name = "round_robin"
    source = "folklore; the first hop of SLOs-Serve §4.2"
    passed_over = "it was not its turn"

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._last = -1

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica whose turn it is."""
        return self.next_of(job.rows)

    def next_of(self, rows: Ints) -> int:
        """Index in ``rows``, ascending, of the row whose turn it is."""
        place = int(np.searchsorted(rows, self._last, side="right")) % len(rows)
        self._last = int(rows[place])
        return place
