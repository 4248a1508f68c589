"""The default: where the request adds most gain, and of those where the queue is done first."""

from __future__ import annotations

from math import inf

import numpy as np
from pydantic import Field

from scheduling.fleet import Fleet
from scheduling.policy import PolicyOptions
from scheduling.routing.base import Job, RoutingPolicy
from scheduling.routing.go_routing import gains_of


class MostGainOptions(PolicyOptions):
    """Options of :class:`MostGain`."""

    alpha: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Candidates are the replicas that gain at least this share of the most that "
        "any gains.",
    )


class MostGain(RoutingPolicy):
    """Takes, of the replicas where the request adds about the most gain, the one whose queue is
    done first with it; where it adds none, that of all replicas.

    Gain and time are GoRouting's (:mod:`scheduling.routing.go_routing`): the priorities of the
    prefills that end in time with the request in the queue, less those without it. So a replica
    where it would be late, or make others late that are worth more, is passed over while there is
    another. What is left out is the packing, which keeps idle replicas free for requests to come.

    The time is in seconds and counts the request itself. So a faster replica takes more, one that
    has become slow takes less, and one that has the prompt's beginning in its cache is taken until
    its queue is longer by what the cache saves. Ties go to the first in the list.

    A prefill replica is weighed as one that has no decodes (GoRouting's ``phi_p``), by when the
    prompt must be done there, and the time from then to the first token counts as its own.

    Complexity as GoRouting's.
    """

    name = "most_gain"
    source = "ours, after ProServe §4.3"
    passed_over = "the request gains less there, or is done later"
    Options = MostGainOptions

    def __init__(self, options: MostGainOptions | None = None) -> None:
        options = options or MostGainOptions()
        super().__init__(options)
        self._alpha = options.alpha

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The candidate that is done first."""
        _, with_s, delta = gains_of(job, fleet)
        with_s += job.lead_s
        most = delta.max()
        if most <= 0:
            return int(np.argmin(with_s))
        return int(np.argmin(np.where(delta >= self._alpha * most, with_s, inf)))
