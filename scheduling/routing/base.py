"""The contract of a routing policy: which replica serves a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from scheduling.fleet import Fleet
from scheduling.fleet_rows import FREE_BLOCKS, NEEDED_BLOCKS
from scheduling.job import Job, RouteQuery, Tier
from scheduling.policy import PolicyOptions

__all__ = ["Job", "RouteQuery", "RoutingPolicy", "Tier"]


class RoutingPolicy(ABC):
    """Picks a replica for each request. One file, one subclass, one registry line.

    It may keep state between decisions, but is called from one thread. Given the same calls and the
    same fleet it decides the same, unless its options say that it draws.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    passed_over: ClassVar[str] = "the policy preferred another"
    """Why it leaves out a replica that it might have chosen, for people."""
    decode_passed_over: ClassVar[str] = "fewer KV blocks are free there"
    """The same of :meth:`choose_decode`."""
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def choose(self, job: Job, fleet: Fleet) -> int:
        """Place in ``job.rows`` of the replica that should serve ``job.query``, or begin with it:
        where that one would compute its prompt only, ``job.splits`` says so."""

    def choose_decode(self, job: Job, fleet: Fleet) -> int:
        """Place in ``job.rows`` of the replica that should continue once another one has computed
        the prompt of ``job.query``: by default the one with the most KV blocks that are free and
        not needed by what is on its way, as in ProServe's Algorithm 2."""
        return most_free_blocks(job, fleet)


def most_free_blocks(job: Job, fleet: Fleet) -> int:
    """The replica with the most KV blocks that are free and not needed by what is on its way."""
    figures = fleet.figures[job.rows]
    return int(np.argmax(figures[:, FREE_BLOCKS] - figures[:, NEEDED_BLOCKS]))
