"""PAB load balancing: the replica that can take the most additional prefill and meet its SLOs."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import PAB, requests_at
from sluice.scheduling.routing.base import Job, RoutingPolicy


class PABBalancing(RoutingPolicy):
    """Takes the replica with the largest prefill admission budget. ``O(replicas)``.

    The paper sends a request to "a suitable node with sufficient budget" and leaves open which node
    if several suffice, and what happens if none does. We take the replica with the most budget left
    in both cases: if any replica suffices, this one does, and the choice keeps the head-room
    balanced; if none does, this one is late by the least. Tokens of the prompt in a replica's cache
    count as budget. Ties go to fewer requests, then to the first in the list. The caller subtracts
    the prompt from the chosen budget at once.
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
