"""Configuration of simulated engines and clusters, and incidents in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.scheduling.autoscaling import AutoscalingPolicy
from sluice.scheduling.autoscaling.role_shares import RoleShares
from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.placement.cells import MOST_CELLS
from sluice.scheduling.roles import Role


class Speculation(BaseModel):
    """Up to ``length`` drafts per decode, each right with probability ``alpha`` if those before
    were (SLOs-Serve §3.2.3, appendix D). Checking ``d`` costs a prefill of ``1 + d`` tokens;
    drafting, ``draft_s`` per token of the longest draft."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(ge=0, lt=1, description="Probability that a drafted token is right.")
    length: int = Field(default=9, ge=1, le=9, description="Most drafted tokens per decode step.")
    draft_s: float = Field(
        default=0.0, ge=0, description="Time of one pass of the drafting model, seconds."
    )
    alphas: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=dict, description="Another `alpha`, by service class."
    )


class EngineConfig(BaseModel):
    """One simulated engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_blocks: int = Field(default=16_384, ge=1, description="KV blocks.")
    block_tokens: int = Field(default=16, ge=1, description="Tokens per KV block.")
    max_batch_tokens: int = Field(default=8192, ge=1, description="Token limit of a batch.")
    max_sequences: int = Field(default=256, ge=1, description="Most running sequences.")
    reserve_prompt: bool = Field(
        default=True,
        description="A waiting request is admitted only if its whole sequence would fit.",
    )
    prefix_cache: bool = Field(
        default=True,
        description="Share the KV of prompts that begin with the same blocks. No effect on a "
        "workload without block hashes.",
    )
    speculation: Speculation | None = Field(
        default=None, description="Speculative decoding; default: none."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_batch_tokens < self.block_tokens:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least one block "
                f"({self.block_tokens} tokens)"
            )
        return self

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV blocks hold: no longer request can run."""
        return self.kv_blocks * self.block_tokens


WhenUnattainable = Literal["best_effort", "reject", "queue"]


class ClusterConfig(BaseModel):
    """Engines behind a router. The defaults of the reports and of the router are production's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(
        default=2, ge=0, le=4096, description="Replicas that do both phases of a request."
    )
    prefillers: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Replicas that compute prompts for those that decode; only with `decoders`.",
    )
    decoders: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Replicas that decode what others prefilled; only with `prefillers`.",
    )
    cells: int = Field(
        default=1,
        ge=1,
        le=MOST_CELLS,
        description="Controllers that share the replicas; more than one without roles only.",
    )
    dispatch_s: float = Field(
        default=0.002, ge=0, description="From a decision until its replica has the request."
    )
    report_interval_s: float = Field(
        default=0.025, gt=0, description="Time between the reports of a busy replica."
    )
    heartbeat_s: float = Field(default=0.5, gt=0, description="The same of an idle one.")
    report_delay_s: float = Field(
        default=0.002, ge=0, description="From a report's making until the router knows it."
    )
    report_loss: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the reports that never arrive."
    )
    aged_after_s: float = Field(
        default=1.0,
        gt=0,
        description="A replica silent for longer gives no guarantees and is chosen only if no "
        "other replica is left.",
    )
    stale_after_s: float = Field(
        default=2.0, gt=0, description="A replica silent for longer gets no requests."
    )
    reservation_ttl_s: float = Field(
        default=5.0, gt=0, description="A reservation unconfirmed after this time is dropped."
    )
    reference_ttft_s: float = Field(
        default=1.0,
        gt=0,
        description="Horizon of the prefill admission budget for requests without a TTFT.",
    )
    when_unattainable: dict[str, WhenUnattainable] = Field(
        default_factory=dict,
        description="Handling, by service class, of a request whose objective no replica can meet; "
        "default: `best_effort`.",
    )
    queue_limit_s: float = Field(
        default=10.0, gt=0, description="Longest wait if `when_unattainable` is `queue`."
    )
    promise_level: float | None = Field(
        default=0.99,
        gt=0,
        lt=1,
        description="Target share of guarantees that are kept; null: guarantees are planned for "
        "their deadlines, without margins.",
    )
    push_interval_s: float = Field(
        default=1.0, gt=0, description="Interval at which endings are reported to the margins."
    )
    come_backs: int = Field(
        default=0,
        ge=0,
        description="Most retries of a refused request, each after the advised time as a new "
        "request.",
    )
    detect_s: float = Field(
        default=0.05, ge=0, description="From a replica's failure until the router detects it."
    )
    retry_s: float = Field(
        default=0.02, gt=0, description="Pause before a request is placed again; then it doubles."
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="Most times that a request is placed, also after its output has begun.",
    )
    edge_wait_s: float = Field(
        default=5.0, gt=0, description="Longest wait while there is no replica at all."
    )
    transfer_s: float = Field(
        default=0.001, ge=0, description="Fixed time of a KV transfer between P/D replicas."
    )
    transfer_tokens_per_s: float = Field(
        default=200_000.0, gt=0, description="Tokens of KV that a transfer moves per second."
    )
    migrate: bool = Field(
        default=False,
        description="Running streams move with their KV: from a replica that leaves, and from one "
        "where they are predicted to miss a guarantee.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(self.counts.values()):
            raise ValueError("a cluster needs at least one replica of some role")
        if bool(self.prefillers) != bool(self.decoders):
            raise ValueError(
                f"prefillers ({self.prefillers}) and decoders ({self.decoders}) need each other: "
                "state both, or neither"
            )
        if self.cells > 1 and self.prefillers:
            raise ValueError(f"cells must be 1 with prefillers and decoders, got {self.cells}")
        return self

    @property
    def counts(self) -> dict[Role, int]:
        """Replicas at the start, by role, in the order of their start."""
        return {"mixed": self.replicas, "prefill": self.prefillers, "decode": self.decoders}


class Autoscaling(NamedTuple):
    """Policies of the number of replicas; ``startup_s``: from order, already paid for, to
    service."""

    make: Callable[[Role], AutoscalingPolicy]
    least: int
    most: int
    interval_s: float = 2.0
    startup_s: float = 60.0


class ElasticRoles(NamedTuple):
    """Roles that change: what decides, and an engine's policy by its new role."""

    shares: RoleShares
    make_batch: Callable[[Role], BatchPolicy]


class Failure(NamedTuple):
    """A replica dies with all it held; a new one comes after ``down_s``, if any."""

    at_s: float
    replica: int
    down_s: float | None = None


class Slowdown(NamedTuple):
    """A replica's steps take ``factor`` times longer from a time on; a later one replaces it."""

    at_s: float
    replica: int
    factor: float


class Resize(NamedTuple):
    """Replicas join, or if negative leave after their work, the youngest first."""

    at_s: float
    change: int
    role: Role = "mixed"
