"""A target number of ongoing requests per replica: Ray Serve's default, as a baseline."""

from __future__ import annotations

from math import ceil

from pydantic import Field

from sluice.scheduling.autoscaling.base import AutoscalingPolicy, Decision, Pool, State
from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.policy import PolicyOptions

MAX_SAMPLES = 256


class OngoingRequestsOptions(PolicyOptions):
    """Serve's own settings, with Serve's defaults; its scaling factors are 1."""

    target_ongoing_requests: float = Field(
        default=2.0, gt=0, description="Target of requests running or waiting per replica."
    )
    look_back_period_s: float = Field(
        default=30.0, gt=0, description="Averaging time of the number of requests, seconds."
    )
    upscale_delay_s: float = Field(
        default=30.0, ge=0, description="Time for which more replicas must be needed, seconds."
    )
    downscale_delay_s: float = Field(
        default=600.0, ge=0, description="The same for fewer, seconds."
    )


class OngoingRequests(AutoscalingPolicy):
    """Ray Serve's default rule: requests, a mean over ``look_back_period_s``, over the target per
    replica. The direction of a change, not its size, must last for the delay."""

    name = "ongoing_requests"
    source = "Ray Serve 2.60, autoscaling_policy.py"
    Options = OngoingRequestsOptions
    options: OngoingRequestsOptions

    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        """See :meth:`AutoscalingPolicy.decide`. ``O(samples)``, of which there are at most 256."""
        options = self.options
        since_s = load.now_s - options.look_back_period_s
        samples = [
            (at_s, ongoing)
            for at_s, ongoing in state.get("samples", ())
            if since_s < at_s < load.now_s
        ][1 - MAX_SAMPLES :]
        samples.append((load.now_s, load.ongoing))
        ongoing = sum(value for _, value in samples) / len(samples)
        wanted = ceil(ongoing / options.target_ongoing_requests)
        way = (wanted > pool.target) - (wanted < pool.target)
        # As in Serve, a change of direction restarts the delay, and a decision without change ends
        # it.
        begun_s = state["since_s"] if state.get("way") == way else load.now_s
        delay_s = options.upscale_delay_s if way > 0 else options.downscale_delay_s
        if way < 0:
            wanted = max(1, wanted)
        target = pool.target
        if way and load.now_s - begun_s + 1e-6 >= delay_s:
            target, way = wanted, 0
        memory = {"samples": samples, "way": way, "since_s": begun_s}
        return Decision(pool.bounded(target), memory, f"{ongoing:.1f} ongoing requests")
