"""Least work: the replica with the least predicted prefill time ahead, given its prefix cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import (
    BEGUN_S,
    DECODE_S,
    FIXED_S,
    LEAST_RATE,
    PACE_S,
    PREFILL_S,
    RUNNING,
    WAITING,
    requests_at,
)
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.routing.base import Job, RoutingPolicy


class LeastWork(RoutingPolicy):
    """Takes the replica where this prompt's prefill is done first, if all prefill there is served
    in order of arrival; with a separate decode replica, the time of the KV transfer counts too.
    ``O(replicas)``.

    The score is the predicted time of the prefills ahead, minus the work done since the report,
    plus the time of this prompt, over the share of the time that the decodes leave. It is a time,
    not a number of tokens: a faster replica, or one with fewer decodes, takes more requests. It
    includes prefix affinity: a replica with the prompt's prefix in its cache saves that time, and
    is chosen while its queue is longer than the others' by at most that time.

    Ties go to fewer requests, then to the first in the list.
    """

    name = "least_work"
    source = "join the shortest queue, in predicted seconds; ours"
    passed_over = "more work is ahead there"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica where the prefill is done first."""
        figures = fleet.figures[job.rows]
        left_s = np.maximum(0.0, figures[:, PREFILL_S] - done_s(figures, job.now_s)) + job.work_s
        ahead_s = left_s / prefill_share(figures) + job.lead_s
        least = np.flatnonzero(ahead_s == ahead_s.min())
        return int(least[np.argmin(requests_at(figures[least]))])


def prefill_share(figures: Floats) -> Floats:
    """The share of each replica's time that is left for prefill if all guaranteed decodes run one
    step per shortest TPOT; ``figures`` is ``float64[n, FIGURES]``."""
    step_s = figures[:, FIXED_S] + figures[:, DECODE_S]
    # An infinite pace: no decode limits the share.
    return np.clip(1.0 - step_s / figures[:, PACE_S], LEAST_RATE, 1.0)


def done_s(figures: Floats, now_s: float) -> Floats:
    """Prefill work done since the report. A replica that reported no requests has done none: the
    requests on their way to it count in full."""
    busy: NDArray[np.bool_] = figures[:, WAITING] + figures[:, RUNNING] > 0
    since_s = np.maximum(0.0, now_s - figures[:, BEGUN_S])
    done: Floats = np.where(busy, since_s * prefill_share(figures), 0.0)
    return done
