"""The contract of a routing policy: which replica serves a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduling.fleet import Fleet
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
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def choose(self, job: Job, fleet: Fleet) -> int:
        """Place in ``job.rows`` of the replica that should serve ``job.query``."""
