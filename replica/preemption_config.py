"""Configuration of preemption."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduling.preemption import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    DEPTH,
    LATE_CHUNK_TOKENS,
    LEAST_TOKENS,
)


class PreemptionConfig(BaseModel):
    """When a running prefill gives way to a more urgent one, and where it stops."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    granularity: Literal["off", "layer", "operator"] = Field(
        default="off",
        description="Where a running prefill can stop: nowhere, before the next layer, or before "
        "the next operator. Unless it is `off`, `policy` has no say: prefills run by S-EDF.",
    )
    depth: int = Field(
        default=DEPTH,
        ge=1,
        le=64,
        description="Most suspended prefills. Each keeps its activations.",
    )
    chunk_tokens: int = Field(
        default=CHUNK_TOKENS,
        ge=16,
        le=1_048_576,
        description="Most tokens of a prefill that run as one task; at most vLLM's "
        "`max-num-batched-tokens` are.",
    )
    late_chunk_tokens: int = Field(
        default=LATE_CHUNK_TOKENS,
        ge=16,
        le=1_048_576,
        description="The same of a prefill that can no longer meet its objective, which preempts "
        "nothing, and of one that starts while `depth` others are suspended. Such a task is not "
        "suspended.",
    )
    batch_tokens: int = Field(
        default=BATCH_TOKENS,
        ge=0,
        le=1_048_576,
        description="Prefills run together only while their tokens are below this sum. 0: never. "
        "What runs together is suspended together, so more is not better.",
    )
    least_tokens: int = Field(
        default=LEAST_TOKENS,
        ge=1,
        le=1_048_576,
        description="Tasks of fewer tokens are not suspended: they are over soon.",
    )
    launch_ahead: int = Field(
        default=2,
        ge=0,
        le=16,
        description="On a GPU, most checks by which launches run ahead of the device: a prefill "
        "stops so many operators, or layers, later, but the device has work while the next ones "
        "are launched. 0: wait for the device at every check.",
    )
    decode_gap_s: float = Field(
        default=0.05,
        gt=0,
        le=60,
        description="While prefills run, decodes get a step when the last one is this long ago, "
        "seconds; a running prefill is suspended for it.",
    )

    @model_validator(mode="after")
    def _check_chunks(self) -> PreemptionConfig:
        if self.late_chunk_tokens > self.chunk_tokens:
            raise ValueError(
                f"late_chunk_tokens ({self.late_chunk_tokens}) must be at most "
                f"chunk_tokens ({self.chunk_tokens})"
            )
        return self
