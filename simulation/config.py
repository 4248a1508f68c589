"""What a simulated engine is made of: limits, memory, and what its user can switch on."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Speculation(BaseModel):
    """Speculative decoding: ``length`` drafted tokens per decode step, each accepted with
    probability ``alpha`` if those before it were (SLOs-Serve §3.2.3 and appendix D).

    The latency models of a run must be those of such steps, see
    :class:`simulation.truth.SpeculativeLatency`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(ge=0, lt=1, description="Probability that a drafted token is accepted.")
    length: int = Field(ge=1, le=10, description="Drafted tokens per decode step.")


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
