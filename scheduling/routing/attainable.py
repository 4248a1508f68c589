"""The default: where the objective can be held, and of those where the prefill is done first."""

from __future__ import annotations

import numpy as np

from scheduling.admission.moore_hodgson import MooreHodgson, MooreHodgsonOptions
from scheduling.fleet import Fleet
from scheduling.policy import PolicyOptions
from scheduling.routing.base import Job, RoutingPolicy
from scheduling.routing.least_work import LeastWork


class Attainable(RoutingPolicy):
    """Takes, of the replicas that can hold the request's objective and all that they hold now, the
    one where its prefill is done first; where none can, that of all replicas.

    The test is that of :mod:`scheduling.admission.moore_hodgson` without head-room, as the engines
    of ``deadline_triage`` would keep the request or drop it; and the order is that of
    :mod:`scheduling.routing.least_work`, in seconds, so that unlike, slow and warm replicas count
    as what they are. Where admission is on, all candidates pass, and the order alone decides.

    ``O(replicas * log n)`` with ``n`` promised requests at each, and ``O(n)`` at those that are
    nearly full.
    """

    name = "attainable"
    source = "ours"

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._test = MooreHodgson(MooreHodgsonOptions(headroom=0.0))
        self._order = LeastWork()

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica that can hold it and is done first."""
        able = np.flatnonzero(self._test.promises(job, fleet).holds)
        if not len(able):
            return self._order.choose(job, fleet)
        return int(able[self._order.choose(job.of(able), fleet)])
