"""Configuration of the HTTP edge and of the service classes."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from scheduling.objective import MAX_PRIORITY, MIN_PRIORITY

MIN_OBJECTIVE_MS = 0.001
"""Shortest objective that may be asked for: a microsecond, in milliseconds."""

MAX_OBJECTIVE_MS = 86_400_000.0
"""Longest objective that may be asked for: a day, in milliseconds."""

# They are sent in a header and label metrics.
_CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ServiceClass(BaseModel):
    """What a request of this class is promised where it states nothing itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time to first token, ms.",
    )
    tpot_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time per output token after the first, ms.",
    )
    e2e_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time to the last token, ms.",
    )
    priority: int = Field(
        default=1,
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="Worth of a token: one of priority 2 is worth two of priority 1.",
    )
    service_tiers: tuple[str, ...] = Field(
        default=(),
        description="Values of OpenAI's `service_tier` that select this class.",
    )


def _default_classes() -> dict[str, ServiceClass]:
    return {
        "interactive": ServiceClass(
            ttft_ms=500, tpot_ms=50, priority=4, service_tiers=("priority",)
        ),
        "standard": ServiceClass(
            ttft_ms=2_000, tpot_ms=100, priority=2, service_tiers=("auto", "default")
        ),
        "batch": ServiceClass(priority=1, service_tiers=("flex",)),
    }


class RouterConfig(BaseModel):
    """The HTTP edge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address that HTTP listens on.")
    port: int = Field(default=8000, ge=1, le=65_535, description="Port that HTTP listens on.")
    replicas: int = Field(default=1, ge=1, le=64, description="Router replicas.")
    api_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="Accepted `Authorization: Bearer` keys. Empty: every request is accepted.",
    )
    classes: dict[str, ServiceClass] = Field(
        default_factory=_default_classes,
        min_length=1,
        max_length=16,
        description="Service classes by name (at most 16: they label metrics).",
    )
    default_class: str = Field(
        default="standard", description="Class of a request that names none."
    )
    decision_timeout_s: float = Field(
        default=0.25,
        gt=0,
        le=10,
        description="Longest wait for the controller, seconds; then the local fallback decides.",
    )
    max_body_bytes: int = Field(
        default=4 << 20, ge=1 << 10, le=1 << 30, description="Largest request body, bytes."
    )
    max_in_flight: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Most requests in one router replica at once; more get 503.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Replicas tried for a request that has sent nothing yet.",
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RouterConfig:
        for key in self.api_keys:
            text = key.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("api_keys must be printable ASCII without spaces, and not empty")
            if not text.strip("*"):
                raise ValueError(
                    "an entry of api_keys consists of asterisks only: that is the mask which "
                    "`sluice config` prints in place of a key; give the key itself"
                )
        return self

    @model_validator(mode="after")
    def _check_classes(self) -> RouterConfig:
        if self.default_class not in self.classes:
            known = ", ".join(sorted(self.classes))
            raise ValueError(f"default_class {self.default_class!r} is not one of: {known}")
        bad = [name for name in self.classes if not _CLASS_NAME.fullmatch(name)]
        if bad:
            raise ValueError(f"class names must match {_CLASS_NAME.pattern}, got {bad}")
        tiers = [tier for entry in self.classes.values() for tier in entry.service_tiers]
        doubles = {tier for tier in tiers if tiers.count(tier) > 1}
        if doubles:
            raise ValueError(f"service_tiers name more than one class: {sorted(doubles)}")
        return self
