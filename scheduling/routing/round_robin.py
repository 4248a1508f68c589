"""Round robin: every replica in turn, whatever its load."""

from __future__ import annotations

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.routing.base import Job, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Takes the replicas in turn, in the order of their rows: the next eligible one after the last
    choice. ``O(log replicas)``."""

    name = "round_robin"
    source = "folklore; the first hop of SLOs-Serve §4.2"
    passed_over = "it was not its turn"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica whose turn it is."""
        return self.take_turn(job.rows)
