"""The default: among the replicas of about the maximum gain, the one whose queue is done first."""

from __future__ import annotations

from math import inf

import numpy as np
from pydantic import Field

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_SHARES, LEAST_RATE, PREFILL_S
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.routing.base import Job, RoutingPolicy
from sluice.scheduling.routing.go_routing import gains_of

NEAREST = 64
"""How many replicas of a larger fleet are tested first."""


class MostGainOptions(PolicyOptions):
    """Options of :class:`MostGain`."""

    alpha: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Candidates are the replicas with at least this share of the maximum gain.",
    )


class MostGain(RoutingPolicy):
    """Among the replicas with about the maximum gain, takes the one whose queue, with the request,
    is done first; if no replica gains, the first done among all replicas.

    Gain and time are GoRouting's (:mod:`sluice.scheduling.routing.go_routing`): the priorities of
    the prefills that end in time with the request in the queue, minus the same without it. So a
    replica where the request would be late, or would make requests of greater worth late, is chosen
    only if there is no better one. GoRouting's packing, which keeps idle replicas free for later
    requests, is left out. SlideBatching's order is assumed of every replica, and best-effort
    requests do not count.

    The time is in seconds and includes the request itself. So a faster replica takes more requests,
    one that has become slow takes fewer, and one with the prompt's prefix in its cache is chosen
    until its queue is longer by the time that the cache saves. Ties go to the first in the list.

    A prefill replica counts as one without decodes (GoRouting's ``phi_p``), with the time by which
    the prompt must be done there as deadline; the time from then to the first token is added to its
    time.

    Complexity as GoRouting's. Of more than :data:`NEAREST` replicas, only this many are compared if
    one of them can guarantee the request: those with the least predicted time until its prefill is
    done, by the sum of the prefills there and the share of each second that decodes leave.
    """

    name = "most_gain"
    source = "ours, after ProServe §4.3"
    passed_over = "the request gains less there, or is done later"
    Options = MostGainOptions

    def __init__(self, options: MostGainOptions | None = None) -> None:
        options = options or MostGainOptions()
        super().__init__(options)
        self._alpha = options.alpha

    def nearest(self, job: Job, fleet: Fleet) -> Ints | None:
        """The :data:`NEAREST` replicas that are done first. ``O(replicas)``."""
        if len(job.rows) <= NEAREST:
            return None
        figures, rows = fleet.figures, job.rows
        rates = np.maximum(LEAST_RATE, 1.0 - figures[rows, DECODE_SHARES])
        done_s = (figures[rows, PREFILL_S] + job.work_s) / rates + job.lead_s
        return np.sort(np.argpartition(done_s, NEAREST)[:NEAREST])

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The candidate that is done first."""
        _, with_s, delta = gains_of(job, fleet)
        with_s += job.lead_s
        most = delta.max()
        if most <= 0:
            return int(np.argmin(with_s))
        return int(np.argmin(np.where(delta >= self._alpha * most, with_s, inf)))
