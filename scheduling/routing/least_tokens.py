"""Least tokens: the replica with the least prefill work ahead."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import CONTEXT, RUNNING, TOKENS
from sluice.scheduling.routing.base import Job, RoutingPolicy


class LeastTokens(RoutingPolicy):
    """Takes the replica with the fewest tokens to prefill, including the tokens of this prompt that
    are not in its cache. ``O(replicas)``.

    Ties go to fewer running requests, then to less decode context, then to the first in the list.
    """

    name = "least_tokens"
    source = "join the shortest queue, in units of prefill tokens"
    passed_over = "more tokens are ahead there"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the least prefill work ahead."""
        figures = fleet.figures[job.rows]
        tokens = figures[:, TOKENS] - job.cached_tokens
        least = np.flatnonzero(tokens == tokens.min())
        if len(least) == 1:
            return int(least[0])
        return int(least[np.lexsort((figures[least, CONTEXT], figures[least, RUNNING]))[0]])
