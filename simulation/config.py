"""Configuration of simulated engines and clusters, and incidents in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.scheduling.autoscaling import AutoscalingPolicy
from sluice.scheduling.placement.cells import MAX_CELLS
from sluice.scheduling.placement.loops import IDLE_S
from sluice.scheduling.roles import Role

Count = Annotated[int, Field(ge=1)]
Replicas = Annotated[int, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(ge=0)]
Interval = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculation(_Config):
    """Up to ``length`` drafts per decode, each right with probability ``alpha`` if those before
    were (SLOs-Serve §3.2.3, appendix D). Checking ``d`` costs a prefill of ``1 + d`` tokens;
    drafting, ``draft_s`` per token of the longest draft."""

    alpha: Share
    length: Annotated[int, Field(ge=1, le=9)] = 9
    draft_s: Seconds = 0.0


class EngineConfig(_Config):
    """One simulated engine."""

    kv_blocks: Count = 16_384
    block_tokens: Count = 16
    max_batch_tokens: Count = 8192
    max_sequences: Count = 256
    reserve_prompt: bool = True
    """A waiting request is admitted only if its whole sequence would fit."""
    prefix_cache: bool = True
    """Share the KV of prompts that begin with the same hashed blocks."""
    keep_sessions: bool = True
    """Evict the blocks of sessions last, by worth; else by time of release, as stock vLLM."""
    speculation: Speculation | None = None

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


class LoopDeadline(_Config):
    """The deadline of whole loops of a service class, and when one is over: see ``loop`` of a class
    in the router's configuration."""

    deadline_s: Interval
    idle_s: Interval = IDLE_S


class Accepted(NamedTuple):
    """An alternative that a class accepts: fewer output tokens, and longer times, seconds."""

    max_tokens: int | None = None
    ttft_s: float = 0.0
    tpot_s: float = 0.0


WhenUnattainable = Literal["best_effort", "reject", "queue"]


class ClusterConfig(_Config):
    """Engines behind a router. The defaults of the reports and of the router are production's."""

    replicas: Replicas = 2
    """Replicas that do both phases of a request."""
    prefillers: Replicas = 0
    decoders: Replicas = 0
    cells: Annotated[int, Field(ge=1, le=MAX_CELLS)] = 1
    """Controllers that share the replicas; more than one without roles only."""
    dispatch_s: Seconds = 0.002
    """From a decision until its replica has the request."""
    report_interval_s: Interval = 0.025
    """Between the reports of a busy replica; ``heartbeat_s``: of an idle one."""
    heartbeat_s: Interval = 0.5
    report_delay_s: Seconds = 0.002
    """From a report's making until the router knows it."""
    report_loss: Share = 0.0
    stale_after_s: Interval = 2.0
    """A replica silent for longer gets no requests."""
    reservation_ttl_s: Interval = 5.0
    """A reservation unconfirmed after this time is dropped."""
    when_unattainable: dict[str, WhenUnattainable] = Field(default_factory=dict)
    """By service class, what happens to a request that no replica can promise; default: best
    effort."""
    accepts: dict[str, tuple[Accepted, ...]] = Field(default_factory=dict)
    """By service class, what is tried before that: see ``accepts`` of a class in the router's
    configuration."""
    loops: dict[str, LoopDeadline] = Field(default_factory=dict)
    """By service class, the deadline of its loops."""
    promise_level: Annotated[float, Field(gt=0, lt=1)] | None = 0.99
    """Target share of promises that are kept; ``None``: no margins."""
    push_interval_s: Interval = 1.0
    """Interval at which endings are reported to the margins."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Most retries of a refused request, each after the advised time as a new request."""
    quotes: bool = False
    """Whether each request asks for a quote before it is placed."""
    accepting: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the refused requests whose clients take up an offer, half a second later."""
    max_attempts: Count = 3
    """Most times that a request is placed, also after its output has begun."""
    edge_wait_s: Interval = 5.0
    """Longest wait while there is no replica at all."""
    in_flight: Annotated[int, Field(ge=0)] = 0
    """Most requests in flight, while others wait in the router by llm-d's rule
    (``program_queue``); 0: none waits there."""
    transfer_s: Seconds = 0.001
    """Fixed time of a KV transfer between replicas."""
    transfer_tokens_per_s: Interval = 200_000.0
    fetch: bool = False
    """A session's turn that is placed elsewhere than its prefix may fetch that from there."""
    migrate: bool = False
    """Running streams move with their KV: from a replica that leaves, and from one where they are
    predicted to miss a promise."""

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
