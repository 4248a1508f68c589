"""Configuration of the endpoint picker."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PickerConfig(BaseModel):
    """The endpoint picker: routers as the external processors of an Envoy that you already have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Port where each router listens for Envoy's external processing (gRPC without "
        "TLS); routers of one node share it. Without one there is no picker.",
    )
    host: str = Field(default="127.0.0.1", description="Address that this port is bound to.")
