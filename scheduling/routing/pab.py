"""PAB load balancing: the replica that can take the most additional prefill and meet its SLOs."""

from __future__ import annotations

from math import inf

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import requests_at, spare_after_s
from sluice.scheduling.routing.base import Job, RoutingPolicy


class PABBalancing(RoutingPolicy):
    """Takes the replica with the largest prefill admission budget. ``O(replicas log n)``, with
    ``n`` requests at a replica.

    The paper sends a request to "a suitable node with sufficient budget" and leaves open which node
    if several suffice, and what happens if none does. We take the replica with the most time left
    after the request's own prefill in both cases: if any replica suffices, this one does, and the
    choice keeps the head-room balanced; if none does, this one is late by the least. So tokens of
    the prompt in a replica's cache count, and the speed of each replica. The horizon is the
    request's own TTFT, or 1 s where it states none. Ties go to fewer
    requests, then to the first in the list. The caller counts the prompt at the chosen replica at
    once.
    """

    name = "pab"
    source = "FairBatching §3.4 (PAB-LB)"
    passed_over = "its prefill budget is smaller"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the largest prefill admission budget."""
        due_s = job.due_s if job.due_s < inf else job.now_s + fleet.settings.reference_ttft_s
        left_s = spare_after_s(fleet.arrays, job.rows, job.now_s, due_s, job.lead_s, job.work_s)
        most = np.flatnonzero(left_s == left_s.max())
        if len(most) == 1:
            return int(most[0])
        return int(most[np.argmin(requests_at(fleet.figures[job.rows[most]]))])
