"""The contract of an autoscaling policy: how many replicas a pool should have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.policy import PolicyOptions

STARTUP_S = 60.0
"""How long a new replica takes until it serves where nothing else is said, seconds."""

State = Mapping[str, Any]
"""A policy's state between two decisions: small plain data of its own format."""


class Pool(NamedTuple):
    """The replicas of one role: ``target`` also counts those that do not serve yet. A policy gets a
    ``least`` of 1 or more (see ``to_zero``)."""

    target: int
    least: int
    most: int

    def bounded(self, replicas: int) -> int:
        """The nearest number within the bounds."""
        return min(max(replicas, self.least), self.most)


class Decision(NamedTuple):
    """How many replicas there should be from now on, the state for the next decision, and the
    reason in a few words, with the figures that decided."""

    replicas: int
    state: State
    reason: str


class AutoscalingPolicy(ABC):
    """Decides on a pool's size at every load sample. It keeps no state itself: each decision
    returns it and the next receives it, so it can run anywhere. Deterministic."""

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @property
    def startup_s(self) -> float:
        """How long a new replica takes until it serves, as far as the options say, seconds."""
        return STARTUP_S

    @abstractmethod
    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        """The size of the pool from now on. ``state`` is that of the last decision, empty at first.
        A time or counter of ``load`` that fell means that the controller was restarted, and voids
        earlier counts."""
