"""Session affinity: the requests of a session go to one replica while its load allows it."""

from __future__ import annotations

from hashlib import blake2b
from math import ceil

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import requests_at
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.routing.balancing import LeastTokens
from sluice.scheduling.routing.base import Job, RoutingPolicy


class SessionAffinityOptions(PolicyOptions):
    """Options of :class:`SessionAffinity`."""

    epsilon: float = Field(
        default=0.25,
        gt=0,
        le=100,
        description="A replica takes a session's request while it has at most 1 + epsilon times "
        "the mean of all replicas' requests.",
    )


class SessionAffinity(RoutingPolicy):
    """Takes the replica that ranks highest for the request's session and has capacity.
    ``O(replicas)``. ``least_tokens`` places a request without a session.

    The rank is a hash of session and replica name (rendezvous hashing): a restart keeps it, and a
    replica that leaves moves only its own sessions. Capacity is at most ``ceil((1 + epsilon) *
    mean)`` requests, this one included (bounded loads)."""

    name = "session_affinity"
    source = (
        "Thaler and Ravishankar (ToN 1998), rendezvous hashing; Mirrokni, Thorup and "
        "Zadimoghaddam (SODA 2018), bounded loads"
    )
    passed_over = "it ranks lower for the session, or has no room"
    Options = SessionAffinityOptions

    def __init__(self, options: SessionAffinityOptions | None = None) -> None:
        options = options or SessionAffinityOptions()
        super().__init__(options)
        self._share = 1.0 + options.epsilon
        self._otherwise = LeastTokens()
        # The replicas of the fleet's rows, and a hash of each.
        self._ids: list[str] = []
        self._hashes: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The highest ranked replica that has capacity."""
        session = job.query.session
        if not session:
            return self._otherwise.choose(job, fleet)
        requests = requests_at(fleet.figures[job.rows])
        most = ceil(self._share * (float(requests.sum()) + 1.0) / len(requests))
        rank = _mixed(self._of(fleet)[job.rows] ^ _mixed(np.array([session], np.uint64)))
        return int(np.argmax(np.where(requests + 1.0 <= most, rank | np.uint64(1), np.uint64(0))))

    def _of(self, fleet: Fleet) -> NDArray[np.uint64]:
        if fleet.ids != self._ids:
            self._ids = list(fleet.ids)
            hashes = [blake2b(name.encode(), digest_size=8).digest() for name in self._ids]
            self._hashes = np.frombuffer(b"".join(hashes), np.dtype("<u8")).astype(np.uint64)
        return self._hashes


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on every bit of the value: the finisher of SplitMix64 (Steele,
    Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
