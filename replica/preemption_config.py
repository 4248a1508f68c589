"""Configuration of preemption."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.scheduling.preemption import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    DEPTH,
    LEAST_TOKENS,
    SMALL_CHUNK_TOKENS,
)


class PreemptionConfig(BaseModel):
    """When a more urgent prefill preempts a running one, and where the running one stops."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    granularity: Literal["off", "layer", "operator"] = Field(
        default="off",
        description="Where a running prefill can stop: nowhere, before the next layer, or before "
        "the next operator. Unless `off`, `policy` has no effect: prefills run by S-EDF.",
    )
    depth: int = Field(
        default=DEPTH,
        ge=1,
        le=64,
        description="Max suspended prefills. Each keeps its activations in memory.",
    )
    chunk_tokens: int = Field(
        default=CHUNK_TOKENS,
        ge=16,
        le=1_048_576,
        description="Max tokens of a prefill that run as one task; also limited by vLLM's "
        "`max-num-batched-tokens`, and where the engine decodes by the time that stops take.",
    )
    small_chunk_tokens: int = Field(
        default=SMALL_CHUNK_TOKENS,
        ge=16,
        le=1_048_576,
        description="Max tokens of a task that starts while `depth` others are suspended, and so "
        "is not suspended itself, and of one of a prefill that has waited long.",
    )
    batch_tokens: int = Field(
        default=BATCH_TOKENS,
        ge=0,
        le=1_048_576,
        description="Prefills share a batch only while their total tokens are below this. 0: "
        "never. Prefills of one batch are suspended together, so more is not better. Late "
        "prefills, and shorter ones than this with one objective, share a batch up to "
        "`chunk_tokens`.",
    )
    least_tokens: int = Field(
        default=LEAST_TOKENS,
        ge=1,
        le=1_048_576,
        description="Min tokens of a task that can be suspended: shorter ones end soon anyway.",
    )
    launch_ahead: int = Field(
        default=2,
        ge=0,
        le=16,
        description="On a GPU, max checks by which launches run ahead of the device: a prefill "
        "stops up to this many operators, or layers, later, but the device has work while the next "
        "ones are launched. 0: wait for the device at every check.",
    )
    decode_gap_s: float = Field(
        default=0.05,
        gt=0,
        le=60,
        description="A fallback: while prefills run, the time after which a decode without a TPOT, "
        "or with one that no step can hold, has its next step, seconds. The others have it in time "
        "for their TPOT. A running prefill is suspended for it, a guaranteed one for guaranteed "
        "decodes only. Also the longest TPOT for which tasks of prefills are cut.",
    )

    @model_validator(mode="after")
    def _check_chunks(self) -> PreemptionConfig:
        if self.small_chunk_tokens > self.chunk_tokens:
            raise ValueError(
                f"small_chunk_tokens ({self.small_chunk_tokens}) must be at most "
                f"chunk_tokens ({self.chunk_tokens})"
            )
        return self
