"""Tenant limits: the maximum that a client may ask for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from sluice.router import wire
from sluice.router.errors import ApiError, Reason, shown
from sluice.router.wire import MAX_OBJECTIVE_MS, MAX_TOKENS, MIN_OBJECTIVE_MS
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY
from sluice.scheduling.tenancy.fair_shares import MAX_WEIGHT, has_room

UNNAMED: Final = "unnamed"
"""Name of every client whose key has no name."""


PromptLimit = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_TOKENS,
        description="Maximum prompt tokens; longer prompts get 400. Text counts as a token for "
        "each 4 characters, as only the engine tokenises. Null: the engine's limit.",
    ),
]
OutputLimit = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_TOKENS,
        description="Maximum output tokens of a request, over all its choices and prompts. Null: "
        "the engine's limit.",
    ),
]
"""Limits of a request's length, used for a key and for a router."""


class TenantLimits(BaseModel):
    """The maximum that a client may ask for. A limit that is not set is that of the API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Service classes that it may use. The first replaces any other. Null: all.",
    )
    models: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Names of models and adapters that it may use and list; any other gets 404. "
        "Null: all.",
    )
    max_priority: int = Field(
        default=MAX_PRIORITY, ge=MIN_PRIORITY, le=MAX_PRIORITY, description="Highest priority."
    )
    min_ttft_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Tightest time to first token, ms. No end-to-end objective may be tighter.",
    )
    min_tpot_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Tightest time per output token after the first, ms.",
    )
    min_e2e_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Tightest time to the last token, ms.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Maximum requests of it in flight in one router replica; further ones get 429. "
        "Null: the router's limit.",
    )
    requests_per_minute: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Rate limit of its requests over all routers, those of batches included; "
        "further ones get 429. Null: no limit.",
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Rate limit of its prompt and output tokens over all routers; further requests "
        "get 429. A request reserves as many as it may need on arrival. Null: no limit.",
    )
    burst_s: float = Field(
        default=60.0,
        ge=1,
        le=3_600,
        description="Burst size of both rates: what the rate allows in this time, seconds, may be "
        "used at once after a pause.",
    )
    max_prompt_tokens: PromptLimit = None
    max_output_tokens: OutputLimit = None
    structured_output: bool = Field(
        default=True,
        description="Whether it may request structured output, if `router.structured_output` "
        "allows that at all; else it gets 403.",
    )
    weight: float = Field(
        default=1.0,
        ge=1 / MAX_WEIGHT,
        le=MAX_WEIGHT,
        description="Under overload: its share of guaranteed capacity and of a router's slots, "
        "relative to other keys. A key of weight 2 gets twice as many tokens as one of weight 1, "
        "if it asks for them.",
    )
    beyond: Literal["clamp", "refuse"] = Field(
        default="clamp",
        description="Handling of a request that states more than these limits allow: `clamp` "
        "reduces it to the limits and reports that, `refuse` answers 403. Presets of a class are "
        "clamped in either case.",
    )

    def floor_ms(self, field: str) -> float | None:
        """Tightest allowed value of an objective, ms. The first token is no later than the last, so
        the floor of the TTFT also applies to an end-to-end objective."""
        if field == wire.TTFT:
            return self.min_ttft_ms
        if field == wire.TPOT:
            return self.min_tpot_ms
        floors = [floor for floor in (self.min_e2e_ms, self.min_ttft_ms) if floor is not None]
        return max(floors, default=None)


NO_CAPS: Final = TenantLimits()
"""Limits of a key without any."""


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a request.

    Attributes:
        name: for metrics; never the key.
        owner: identifies the client in storage. It stays the same as long as the key's name, or if
            it has none, the key itself. Not secret.
        caps: its limits.
    """

    name: str = UNNAMED
    owner: str = "anyone"
    caps: TenantLimits = NO_CAPS

    @property
    def tenant(self) -> int:
        """Its id in the sharing of guaranteed capacity, a 63-bit hash; 0 for :data:`ANYONE`."""
        return 0 if self == ANYONE else _tenant_of(self.owner)

    def may_hold(self, held: float, free: float, part: float) -> bool:
        """Whether it may use more of a router's resource, of which it holds ``held`` while ``free``
        is unused; see :func:`sluice.scheduling.tenancy.fair_shares.has_room`. Without keys, all
        requests are of one client, which may use all of it."""
        return self == ANYONE or has_room(held, free, self.caps.weight, part)


ANYONE: Final = Client()
"""The client of every request if no keys are configured."""


@lru_cache(maxsize=4_096)
def _tenant_of(owner: str) -> int:
    digest = hashlib.blake2b(owner.encode(), digest_size=8, person=b"sluice-tenant").digest()
    return int.from_bytes(digest, "big") >> 1


class LimitCheck:
    """Applies its client's limits to one request.

    ``said_in`` names the field or header in which the client stated a value; ``None`` if it stated
    none and a class presets it.

    Attributes:
        clamped: the values that the limits changed, as changed: ``{"priority": "4", "ttft_ms":
            "500"}``.
    """

    def __init__(self, caps: TenantLimits) -> None:
        self._caps = caps
        self.clamped: dict[str, str] = {}

    def service_class(self, asked: str, said_in: str | None) -> str:
        """The service class of the request.

        Raises:
            ApiError: 403.
        """
        allowed = self._caps.classes
        if allowed is None or asked in allowed:
            return asked
        self._refuse(said_in, f"one of {', '.join(allowed)}", asked)
        self.clamped[wire.CLASS] = allowed[0]
        return allowed[0]

    def priority(self, asked: int, said_in: str | None) -> int:
        """The priority of the request.

        Raises:
            ApiError: 403.
        """
        most = self._caps.max_priority
        if asked <= most:
            return asked
        self._refuse(said_in, f"at most {most}", asked)
        self.clamped[wire.PRIORITY] = str(most)
        return most

    def objective_ms(self, field: str, asked: float | None, said_in: str | None) -> float | None:
        """An objective of the request, ms.

        Raises:
            ApiError: 403.
        """
        floor = self._caps.floor_ms(field)
        if asked is None or floor is None or asked >= floor:
            return asked
        self._refuse(said_in, f"at least {floor:.15g} ms", asked)
        self.clamped[field] = f"{floor:.15g}"
        return floor

    def _refuse(self, said_in: str | None, allowed: str, asked: object) -> None:
        if said_in is not None and self._caps.beyond == "refuse":
            message = f"{said_in} must be {allowed} with this API key, got {shown(asked)}"
            raise ApiError(Reason.NOT_PERMITTED, message, said_in)
