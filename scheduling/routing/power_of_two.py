"""Power of two choices: the less busy one of two replicas drawn at random."""

from __future__ import annotations

import random

from pydantic import Field

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import requests_at
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.routing.base import Job, RoutingPolicy


class PowerOfTwoOptions(PolicyOptions):
    """Options of :class:`PowerOfTwo`."""

    seed: int | None = Field(
        default=None, description="Seed of the draws; default: from the operating system."
    )


class PowerOfTwo(RoutingPolicy):
    """Draws two different replicas and takes the one with fewer requests. ``O(1)``.

    Requests are those waiting, running and on their way; on a tie the first one drawn wins.
    """

    name = "power_of_two"
    source = "Mitzenmacher, The power of two choices in randomized load balancing (TPDS 2001)"
    passed_over = "it was not drawn, or has more requests"
    Options = PowerOfTwoOptions

    def __init__(self, options: PowerOfTwoOptions | None = None) -> None:
        options = options or PowerOfTwoOptions()
        super().__init__(options)
        # Spreads load; not used for secrets.
        self._random = random.Random(options.seed)

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The less busy one of two random replicas."""
        count = len(job.rows)
        if count == 1:
            return 0
        first = self._random.randrange(count)
        second = self._random.randrange(count - 1)
        if second >= first:
            second += 1
        at_first, at_second = requests_at(fleet.figures[job.rows[[first, second]]])
        return second if at_second < at_first else first
