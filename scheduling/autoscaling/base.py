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
    ``least`` of 1 or more (see ``ToZero``)."""

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


_POLICY, _ARRIVED, _QUIET_S = "policy", "arrived", "quiet_since_s"


class ToZero:
    """Scales a pool with ``Pool.least`` of 0, around any policy, which decides from one replica on.

    The last replica goes after ``zero_after_s`` without a request. A pool without replicas gets one
    when a request asks."""

    def __init__(self, policy: AutoscalingPolicy, zero_after_s: float) -> None:
        self._policy = policy
        self._zero_after_s = zero_after_s

    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        """See :meth:`AutoscalingPolicy.decide`. ``O(1)`` beside the policy's own."""
        arrived = state.get(_ARRIVED)
        inner = state.get(_POLICY, {})
        if pool.target < 1:
            asked = load.ongoing > 0 or (arrived is not None and load.arrived > arrived)
            kept: dict[str, Any] = {_POLICY: inner, _ARRIVED: load.arrived}
            return Decision(int(asked), kept, "a request waits" if asked else "no request")
        decision = self._policy.decide(load, pool._replace(least=max(1, pool.least)), inner)
        kept = {_POLICY: decision.state, _ARRIVED: load.arrived, _QUIET_S: load.now_s}
        quiet = load.ready >= pool.target and load.ongoing <= 0 and load.arrived == arrived
        if quiet and state.get(_QUIET_S, load.now_s) <= load.now_s:
            kept[_QUIET_S] = state.get(_QUIET_S, load.now_s)
        quiet_s = load.now_s - kept[_QUIET_S]
        if pool.target > 1 or not quiet or quiet_s < self._zero_after_s:
            return decision._replace(state=kept)
        del kept[_QUIET_S]  # the next replica begins a new time
        return Decision(0, kept, f"no request for {quiet_s:.0f} s")
