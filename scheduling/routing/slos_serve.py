"""SLOs-Serve's sequential routing over virtual replicas."""

from __future__ import annotations

import numpy as np
from pydantic import Field, field_validator

from sluice.scheduling.admission import POLICIES as ADMISSION
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.routing.base import Job, RoutingPolicy
from sluice.scheduling.routing.inner import Inner, make_inner
from sluice.scheduling.routing.round_robin import RoundRobin


class SLOsServeOptions(PolicyOptions):
    """Options of :class:`SLOsServe`."""

    hops: int = Field(
        default=4,
        ge=1,
        le=4096,
        description="Maximum number of replicas tested before the backup policy decides. The paper "
        "gives no number; its largest fleet has 4.",
    )
    virtual: str = Field(
        default="slos_serve",
        description="The admission policy that models a replica's scheduler, with its default "
        "options.",
    )
    backup: Inner = Field(
        default="least_tokens", description="Policy that decides after `hops` replicas declined."
    )

    @field_validator("virtual")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ADMISSION:
            raise ValueError(f"unknown admission policy {name!r}; known: {sorted(ADMISSION)}")
        return name


class SLOsServe(RoutingPolicy):
    """Tests one replica after the other for whether it can meet the request's objective.

    The first replica is the next in turn (:mod:`sluice.scheduling.routing.round_robin`). If its
    scheduler, run on its mirrored state (the paper's virtual execution), declines, the next one in
    the list is tested, up to ``hops`` replicas; then the backup policy decides among all of them.
    The paper's backup declines the request or moves it to a lower tier: here admission does that,
    and a request that reaches routing is served.

    ``O(log replicas)`` and at most ``hops`` tests.
    """

    name = "slos_serve"
    source = "SLOs-Serve §4.2 (one-shot sequential routing)"
    passed_over = "it was asked later, or declined"
    Options = SLOsServeOptions

    def __init__(self, options: SLOsServeOptions | None = None) -> None:
        options = options or SLOsServeOptions()
        super().__init__(options)
        self._hops = options.hops
        self._virtual = ADMISSION[options.virtual]()
        self._first = RoundRobin()
        self._backup = make_inner(options.backup)

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The first tested replica that can meet the objective, or the backup policy's choice."""
        count = len(job.rows)
        first = self._first.choose(job, fleet)
        for hop in range(min(self._hops, count)):
            place = (first + hop) % count
            asked = job.of(np.array([place]))
            if self._virtual.promises(asked, fleet).holds[0]:
                return place
        return self._backup.choose(job, fleet)
