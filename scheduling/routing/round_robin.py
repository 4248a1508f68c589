"""Round robin: every replica in turn, whatever its load."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.routing.base import Job, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Takes the replicas in turn, in the order of their rows: the next eligible one after the last
    choice. ``O(log replicas)``."""

    name = "round_robin"
    source = "folklore; the first hop of SLOs-Serve §4.2"
    passed_over = "it was not its turn"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica whose turn it is."""
        place = next_in_turn(job.rows, self.turn)
        self.turn = int(job.rows[place])
        return place


def next_in_turn(rows: Ints, last: int) -> int:
    """Index in ``rows``, ascending, of the row whose turn it is after the row ``last``."""
    return int(np.searchsorted(rows, last, side="right")) % len(rows)
