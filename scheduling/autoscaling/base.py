"""The contract of an autoscaling policy: how many replicas a pool should have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from scheduling.autoscaling.load import Load
from scheduling.policy import PolicyOptions

State = Mapping[str, Any]
"""What a policy remembers between two looks: plain data, small, of its own making."""


class Pool(NamedTuple):
    """The replicas of one role.

    Attributes:
        target: how many there should be; some of them may not serve yet.
        least, most: bounds, ``1 <= least <= most``.
    """

    target: int
    least: int
    most: int

    def bounded(self, replicas: int) -> int:
        """The nearest number within the bounds."""
        return min(max(replicas, self.least), self.most)


class Decision(NamedTuple):
    """How many replicas there should be from now on.

    Attributes:
        replicas: within the pool's bounds.
        state: to be handed in at the next look.
        reason: why, in a few words, with the figures that decided.
    """

    replicas: int
    state: State
    reason: str


class AutoscalingPolicy(ABC):
    """Decides on a pool's size at every look. One file, one subclass, one registry line.

    It keeps nothing itself: what it remembers goes out with a decision and comes back with the next
    look, so that it can run wherever the decision is needed. Given the same load, pool and state it
    decides the same.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        """The size of the pool from now on.

        Args:
            load: what the pool has to do now. Times and counters grow from look to look; where one
                fell, the controller was restarted, and what was counted before is void.
            pool: its size and bounds.
            state: of the last decision; empty at the first look.
        """
