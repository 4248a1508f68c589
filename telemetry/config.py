"""Configuration of logs and traces. Metrics are always on and need none."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator


class TracingConfig(BaseModel):
    """OpenTelemetry spans of each request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(
        default=False, description="Make spans and export them; needs the extra `otel`."
    )
    endpoint: str = Field(
        default="http://127.0.0.1:4318/v1/traces",
        description="Full URL at which an OpenTelemetry collector accepts OTLP over HTTP.",
    )
    headers: dict[str, SecretStr] = Field(
        default_factory=dict,
        max_length=16,
        description="Headers of each export, such as an `authorization` that the collector needs. "
        "Serve's dashboard shows its configuration to every visitor, so keep secrets in the nodes' "
        "environment, as `OTEL_EXPORTER_OTLP_HEADERS`, whose headers are sent, too.",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, among requests whose client does not "
        "decide it.",
    )
    trust_client: bool = Field(
        default=True,
        description="A request with a `traceparent` header continues the client's trace, and the "
        "client decides whether it is sampled. False: every request begins a trace of its own.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://collector:4318/v1/traces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must hold no user or password: use headers")
        return value


class LogsConfig(BaseModel):
    """The lines that routers and replicas log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["text", "json"] = Field(
        default="text", description="A line of text, or of one JSON object."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    requests: Literal["all", "failed", "none"] = Field(
        default="all",
        description="Requests that get a line at their end: all, those that failed or were "
        "refused, or none.",
    )
    directory: Path | None = Field(
        default=None,
        description="Folder for a file of each process, at most 64 MiB each, oldest lines out. "
        "Null: standard error, which Ray keeps with its own logs.",
    )


class TelemetryConfig(BaseModel):
    """Log lines and traces of each request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tracing: TracingConfig = Field(
        default_factory=TracingConfig, description="Spans of each request, for OpenTelemetry."
    )
    logs: LogsConfig = Field(default_factory=LogsConfig, description="Log lines.")
