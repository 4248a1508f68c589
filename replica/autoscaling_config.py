"""Configuration of the number of replicas."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.scheduling.autoscaling import AutoscalingPolicy, make_policy


class AutoscalingConfig(BaseModel):
    """Number of replicas, by their load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(
        default=1,
        ge=0,
        le=4096,
        description="Min replicas. 0: the last one is removed after `zero_after_s` without "
        "requests, and the next request waits until one has started.",
    )
    max_replicas: int = Field(ge=1, le=4096, description="Max replicas.")
    initial_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Replicas at the start, and again after each change of the application. "
        "Default: `min_replicas` at the start, and the current number after a change.",
    )
    policy: str = Field(
        default="head_room", description="Autoscaling policy, see `sluice policies`."
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the autoscaling policy."
    )
    zero_after_s: float = Field(
        default=600.0,
        ge=1,
        le=604_800,
        description="With `min_replicas: 0`: time without a request after which the last replica "
        "is removed, seconds.",
    )
    interval_s: float = Field(
        default=2.5,
        ge=0.1,
        le=60,
        description="Load sampling interval, seconds.",
    )

    @model_validator(mode="after")
    def _check(self) -> AutoscalingConfig:
        if not self.min_replicas <= self.first <= self.max_replicas:
            raise ValueError(
                "need min_replicas <= initial_replicas <= max_replicas, got "
                f"{self.min_replicas}, {self.first} and {self.max_replicas}"
            )
        self.make()
        return self

    @property
    def first(self) -> int:
        """Replicas at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    def make(self) -> AutoscalingPolicy:
        """A new policy.

        Raises:
            ValueError: no such policy, or an option that is unknown or out of range.
        """
        return make_policy(self.policy, self.policy_options)
