"""vLLM's own balancer between data-parallel engines."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import RESERVED, RUNNING, WAITING
from sluice.scheduling.routing.base import Job, RoutingPolicy

WAITING_WEIGHT = 4


class VLLM(RoutingPolicy):
    """Takes the replica with the least ``4 * waiting + running``. ``O(replicas)``.

    A request on its way counts as waiting. Ties go to the first in the list.
    """

    name = "vllm"
    source = "vLLM v1, the load balancer of its data-parallel client"
    passed_over = "it has more requests"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the least score."""
        figures = fleet.figures[job.rows]
        waiting = figures[:, WAITING] + figures[:, RESERVED]
        return int(np.argmin(WAITING_WEIGHT * waiting + figures[:, RUNNING]))
