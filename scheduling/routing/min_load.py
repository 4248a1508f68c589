"""Min-load: the replica with the fewest requests."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import requests_at
from sluice.scheduling.routing.base import Job, RoutingPolicy


class MinLoad(RoutingPolicy):
    """Takes the replica with the fewest requests: waiting, running and on their way. Ties go to the
    first in the list. ``O(replicas)``."""

    name = "min_load"
    source = "join the shortest queue, in requests; the baseline of ProServe §5.2"
    passed_over = "it has more requests"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the fewest requests."""
        return int(np.argmin(requests_at(fleet.figures[job.rows])))
