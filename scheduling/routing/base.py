"""The contract of a routing policy: which replica serves a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import FREE_BLOCKS, NEEDED_BLOCKS
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import Job, RouteQuery, Tier
from sluice.scheduling.request.kernels import Ints

__all__ = ["Job", "RouteQuery", "RoutingPolicy", "Tier"]


class RoutingPolicy(ABC):
    """Picks a replica for each request, deterministic unless its options make it draw at random. It
    may keep state between decisions, but is called from one thread."""

    name: ClassVar[str]
    source: ClassVar[str]
    passed_over: ClassVar[str] = "the policy preferred another"
    """Human-readable reason for not choosing an eligible replica."""
    decode_passed_over: ClassVar[str] = "fewer KV blocks are free there"
    """The same for :meth:`choose_decode`."""
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()
        self.turn = -1
        """The row whose turn was last, where replicas are asked in turn."""

    def asked(self, rows: Ints) -> Ints:
        """The rows, ascending, at which admission tests a request; it goes to one of them. Default:
        all. Called once for such a request, before anything is tested."""
        return rows

    def nearest(self, job: Job, fleet: Fleet) -> Ints | None:
        """Indices in ``job.rows``, ascending, of the replicas that are tested first; the others
        only if none of these can promise the request. Default: ``None``, all."""
        return None

    def choose_able(self, job: Job, fleet: Fleet) -> int:
        """:meth:`choose` among replicas that all can promise the request. Default: the same."""
        return self.choose(job, fleet)

    def take_turn(self, rows: Ints) -> int:
        """Index in ``rows``, ascending, of the row whose turn it is after the last one. ``O(log
        rows)``."""
        place = int(np.searchsorted(rows, self.turn, side="right")) % len(rows)
        self.turn = int(rows[place])
        return place

    @abstractmethod
    def choose(self, job: Job, fleet: Fleet) -> int:
        """Index in ``job.rows`` of the replica that should serve ``job.query``, or only prefill it,
        where ``job.splits`` is set for that replica."""

    def choose_decode(self, job: Job, fleet: Fleet) -> int:
        """Index in ``job.rows`` of the decode replica. Default: the one with the most free KV
        blocks beyond those that requests on their way need, as in ProServe's Algorithm 2."""
        return most_free_blocks(job, fleet)


def most_free_blocks(job: Job, fleet: Fleet) -> int:
    """The replica with the most KV blocks that are free and not needed by requests on their way."""
    figures = fleet.figures[job.rows]
    return int(np.argmax(figures[:, FREE_BLOCKS] - figures[:, NEEDED_BLOCKS]))
