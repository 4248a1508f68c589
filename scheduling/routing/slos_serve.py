"""SLOs-Serve's sequential routing over virtual replicas."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sluice.scheduling.admission.slos_serve.policy import SLOsServeAdmission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.routing.balancing import LeastTokens
from sluice.scheduling.routing.base import Job, RoutingPolicy


class SLOsServeRoutingOptions(PolicyOptions):
    """Options of :class:`SLOsServeRouting`."""

    hops: int = Field(
        default=4,
        ge=1,
        le=4096,
        description="Maximum number of replicas tested for a request. The paper gives no number; "
        "its largest fleet has 4.",
    )


class SLOsServeRouting(RoutingPolicy):
    """Tests one replica after the other, from the next in turn, at most ``hops``, for whether it
    can meet the objective (the paper's virtual execution). ``O(log replicas)`` for the turn.

    The admission policy, if any, makes all tests in one call, as they reserve nothing. If all
    decline, best effort goes to the one with the least work ahead; the paper's goes to the last.
    Without admission the paper's own tests, and then ``least_tokens`` decides among all."""

    name = "slos_serve"
    source = "SLOs-Serve §4.2 (one-shot sequential routing)"
    passed_over = "it was asked later, or declined"
    Options = SLOsServeRoutingOptions

    def __init__(self, options: SLOsServeRoutingOptions | None = None) -> None:
        options = options or SLOsServeRoutingOptions()
        super().__init__(options)
        self._hops = options.hops
        self._virtual = SLOsServeAdmission()
        self._backup = LeastTokens()

    def asked(self, rows: Ints) -> Ints:
        """The next ``hops`` rows in turn."""
        place, count = self.take_turn(rows), len(rows)
        if self._hops >= count:
            return rows
        return np.sort(rows[(place + np.arange(self._hops)) % count])

    def choose_able(self, job: Job, fleet: Fleet) -> int:
        """The first of them in turn."""
        return int(np.searchsorted(job.rows, self.turn)) % len(job.rows)

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The first tested replica that can meet the objective, or ``least_tokens``'s choice."""
        count = len(job.rows)
        first = self.take_turn(job.rows)
        for hop in range(min(self._hops, count)):
            place = (first + hop) % count
            asked = job.of(np.array([place]))
            if self._virtual.promises(asked, fleet).holds[0]:
                return place
        return self._backup.choose(job, fleet)
