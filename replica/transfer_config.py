"""Configuration of the KV transfer between engines."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TransferConfig(BaseModel):
    """How engines transfer the KV of prompts and of running streams, and how long they keep it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connector: Literal["auto", "tcp", "nixl"] = Field(
        default="auto",
        description="Transport of the KV. `tcp`: Sluice's own, over plain TCP, on any hardware. "
        "`nixl`: vLLM's NixlConnector, where its package is installed. `auto`: `nixl` on CUDA "
        "where its package is installed, else `tcp`.",
    )
    host: str | None = Field(
        default=None,
        description="IP address on which an engine offers KV; default: the node's own, as vLLM "
        "finds it (`VLLM_HOST_IP` overrides that).",
    )
    keep_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long the KV of a prompt is kept until another engine fetches it, seconds.",
    )
    max_bytes: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="Max memory for KV kept or in transfer, per worker and direction, bytes. "
        "Beyond it the oldest KV is dropped, and its prompt is recomputed.",
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="Timeout to fetch the KV of one prompt, seconds. After it the prompt is "
        "recomputed.",
    )

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str | None) -> str | None:
        # Another engine connects to it: 0.0.0.0 would be its own host.
        if host is not None and ip_address(host).is_unspecified:
            raise ValueError(f"must be an address that other nodes can reach, got {host}")
        return host
