"""A pool that may have no replica: when its last one goes, and when there is one again."""

from __future__ import annotations

from typing import Any

from sluice.scheduling.autoscaling.base import AutoscalingPolicy, Decision, Pool, State
from sluice.scheduling.autoscaling.load import Load

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
