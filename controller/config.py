"""Configuration of the central controller."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.admission import make_policy as make_admission_policy
from sluice.scheduling.placement.cells import MAX_CELLS
from sluice.scheduling.routing import RoutingPolicy, make_policy

NO_ADMISSION = "none"


class ShadowConfig(BaseModel):
    """Policies that decide on recorded traffic, without effect: what they would have changed is
    shown on the page and in metrics. What is left out is as it is live."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batching: str | None = Field(default=None, description="Batch policy, see `sluice policies`.")
    batching_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the batch policy."
    )
    routing: str | None = Field(default=None, description="Routing policy.")
    routing_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the routing policy."
    )
    admission: str | None = Field(default=None, description="Admission policy, or `none`.")
    admission_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the admission policy."
    )

    @model_validator(mode="after")
    def _check(self) -> ShadowConfig:
        named = {
            "batching": (self.batching, self.batching_options),
            "routing": (self.routing, self.routing_options),
            "admission": (self.admission, self.admission_options),
        }
        if not any(name for name, _ in named.values()):
            raise ValueError(f"name one policy at least: {', '.join(named)}")
        for kind, (name, options) in named.items():
            if name is None and options:
                raise ValueError(f"{kind}_options are given without {kind}")
        if self.batching is not None:
            from sluice.scheduling import batching  # no other part of a controller needs it

            batching.make_policy(self.batching, self.batching_options)
        return self


class ControllerConfig(BaseModel):
    """The central actor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(default="most_gain", description="Routing policy, see `sluice policies`.")
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the routing policy."
    )
    admission: str = Field(
        default="moore_hodgson",
        description="Admission policy, see `sluice policies`; `none`: admission is off, no request "
        "is guaranteed, and requests that accept this are served alike.",
    )
    admission_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the admission policy."
    )
    promise_level: float = Field(
        default=0.99,
        gt=0,
        lt=1,
        description="Target share of guarantees that are kept: the safety margin of a guarantee is "
        "learned from the outcomes of earlier ones.",
    )
    stale_after_s: float = Field(
        default=2.0,
        gt=0,
        description="A replica silent for longer gets no new requests, seconds; after half of it "
        "it gives no guarantees and is chosen only if no other replica is left.",
    )
    reservation_ttl_s: float = Field(
        default=5.0,
        gt=0,
        description="A reservation that no replica has confirmed after this time is dropped, "
        "seconds.",
    )

    decision_log: Path | None = Field(
        default=None,
        description="Directory for a log of each controller's decisions, a JSON line each, and one "
        "for the end of each request: the fields of `GET /admin/v1/decisions`, and without a "
        "guarantee which term refused it; at most 100,000 lines and 1 GiB.",
    )

    cells: int = Field(
        default=1,
        ge=1,
        le=MAX_CELLS,
        description="Number of controllers that share the replicas. Each decides on its own part, "
        "and a router asks at most two of them about a request. More than one is for fleets whose "
        "decisions one process cannot make; not for pools with roles.",
    )

    shadow: ShadowConfig | None = Field(
        default=None,
        description="Other policies to compare with those that decide, by replays of recorded "
        "traffic in a process of its own; needs one cell and replicas that keep their roles.",
    )

    startup_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="For a model with `min_replicas: 0`: predicted time from a request until the "
        "first replica serves, until a start was measured, seconds. Default: `startup_s` of the "
        "autoscaling policy.",
    )

    @property
    def aged_after_s(self) -> float:
        """A replica silent for longer gives no promises and is chosen last, seconds."""
        return self.stale_after_s / 2

    @property
    def forget_after_s(self) -> float:
        """A replica silent for longer is forgotten, seconds."""
        return max(30.0, 2 * self.stale_after_s)

    @model_validator(mode="after")
    def _check_policy(self) -> ControllerConfig:
        self.make_routing()
        self.make_admission()
        if self.shadow is not None:
            if self.cells > 1:
                raise ValueError("shadow needs cells: 1")
            self.shadowed().make_routing()
            self.shadowed().make_admission()
        return self

    def shadowed(self) -> ControllerConfig:
        """The same with the routing and the admission policy of ``shadow``, and without it."""
        shadow = self.shadow
        changed: dict[str, Any] = {}
        if shadow is not None and shadow.routing is not None:
            changed |= {"policy": shadow.routing, "policy_options": shadow.routing_options}
        if shadow is not None and shadow.admission is not None:
            changed |= {
                "admission": shadow.admission,
                "admission_options": shadow.admission_options,
            }
        return self.model_copy(update={"shadow": None, **changed})

    def make_routing(self) -> RoutingPolicy:
        """A new routing policy. Raises ValueError: no such policy, or an option that is unknown or
        out of range."""
        return make_policy(self.policy, self.policy_options)

    def make_admission(self) -> AdmissionPolicy | None:
        """A new admission policy, or ``None`` where admission is off. Raises ValueError: no such
        policy, or an option that is unknown or out of range."""
        if self.admission != NO_ADMISSION:
            return make_admission_policy(self.admission, self.admission_options)
        if self.admission_options:
            raise ValueError("admission_options are given, but admission is none")
        return None


@cache
def version() -> str:
    """The installed version; ``source`` for a source tree that is not installed, edited or not."""
    try:
        return metadata.version("sluice-serve")
    except metadata.PackageNotFoundError:
        return "source"


def fingerprint_of(config: ControllerConfig) -> str:
    """Identifies version and configuration. A running actor with another fingerprint must be
    replaced, because a detached actor keeps the code that it was started with."""
    digest = hashlib.blake2b(config.model_dump_json().encode(), digest_size=8)
    return f"{version()}-{digest.hexdigest()}"
