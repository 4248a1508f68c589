"""The default: among the replicas of about the maximum gain, the one whose queue is done first."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import numpy as np
from pydantic import Field

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_SHARES, MIN_RATE, PREFILL_S, FleetArrays
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import Job, Numbers
from sluice.scheduling.request.kernels import Floats, Ints, compiled
from sluice.scheduling.routing.base import RoutingPolicy
from sluice.scheduling.routing.go_routing import gains

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
    is done first; if no replica gains, the first done among all. Ties go to the first in the list.

    Gain and time are GoRouting's, with SlideBatching's order assumed everywhere and without
    best-effort requests; its packing, which keeps idle replicas free, is left out. The time is in
    seconds, so faster replicas take more requests, and one with the prompt's prefix is chosen until
    its queue is longer by what the cache saves. A prefill replica counts as one without decodes
    (``phi_p``), plus the time from the end of the prompt to the first token.

    Complexity as GoRouting's. Of more than ``NEAREST`` replicas only this many, with the least
    predicted time until its prefill is done, are compared if one of them can promise the request.
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
        done_s = done_after_s(fleet.figures, job.rows, job.work_s, job.lead_s)
        near = done_s.argpartition(NEAREST)[:NEAREST]
        near.sort()
        return near

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The candidate that is done first."""
        return int(choose(fleet.arrays, job[1:], self._alpha))


@compiled
def choose(fleet: FleetArrays, job: Numbers, alpha: float) -> int:
    """The place of the candidate that is done first; of all, if none gains."""
    _, done_s, delta = gains(fleet, job, 1.0, False)
    done_s += job[3]
    least = alpha * delta.max()
    chosen = -1
    for place in range(delta.shape[0]):
        able = least <= 0.0 or delta[place] >= least
        if able and (chosen < 0 or done_s[place] < done_s[chosen]):
            chosen = place
    return chosen


@compiled
def done_after_s(figures: Floats, rows: Ints, work_s: Floats, lead_s: Floats) -> Floats:
    """Predicted time until a prefill of ``work_s[i]`` behind those of each of ``rows`` is done, by
    the share of each second that decodes leave, and ``lead_s[i]`` more. ``O(rows)``."""
    done = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        rate = max(MIN_RATE, 1.0 - figures[row, DECODE_SHARES])
        done[place] = (figures[row, PREFILL_S] + work_s[place]) / rate + lead_s[place]
    return done
