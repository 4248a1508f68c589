"""PAB load balancing: the replica that can still take the most prefill within its objectives."""

from __future__ import annotations

import numpy as np

from scheduling.fleet import Fleet
from scheduling.fleet_rows import PAB, requests_at
from scheduling.routing.base import Job, RoutingPolicy


class PABBalancing(RoutingPolicy):
    """Takes the replica with the largest prefill admission budget. ``O(replicas)``.

    The paper sends a request to "a suitable node with sufficient budget" and leaves open which
    node, if several suffice, and what happens if none does. We take the one with the most budget
    left in both cases: if any suffices, that one does, and it keeps the others' head-room even; if
    none does, it is the one that will be late by least. What a replica has of the prompt in its
    cache counts as budget. Ties go to fewer requests, then to the first in the list. The caller
    subtracts the prompt from the chosen budget at once.
    """

    name = "pab"
    source = "FairBatching §3.4 (PAB-LB)"
    passed_over = "its prefill budget is smaller"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the largest prefill admission budget."""
        budget = fleet.figures[job.rows, PAB] + job.cached_tokens
        most = np.flatnonzero(budget == budget.max())
        if len(most) == 1:
            return int(most[0])
        return int(most[np.argmin(requests_at(fleet.figures[job.rows[most]]))])
