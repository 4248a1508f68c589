"""How far a client is trusted: the most that it may ask for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from router import wire
from router.errors import ApiError, Reason, shown
from router.wire import MAX_OBJECTIVE_MS, MAX_TOKENS, MIN_OBJECTIVE_MS
from scheduling.fair_shares import MAX_WEIGHT, has_room
from scheduling.objective import MAX_PRIORITY, MIN_PRIORITY

UNNAMED: Final = "unnamed"
"""Name of every client whose key has none."""


PromptLimit = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_TOKENS,
        description="Longest prompt; more get 400. Text counts as a token for each 4 characters, "
        "as only the engine tokenises. Null: as long as the engine takes.",
    ),
]
OutputLimit = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_TOKENS,
        description="Most output tokens of a request, over all its choices and prompts. Null: as "
        "many as the engine gives.",
    ),
]
"""How long a request may be, for a key and for a router alike."""


class TenantLimits(BaseModel):
    """The most that a client may ask for. Where nothing is set, whatever the API allows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Service classes that it may use. The first stands in for any other. Null: "
        "all.",
    )
    models: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Names of models and adapters that it may use and sees; any other gets 404. "
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
        description="Most requests of it in one router replica at once; more get 429. Null: as "
        "many as the router takes.",
    )
    requests_per_minute: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Rate of its requests over all routers, lines of batches included; more get "
        "429. Null: no limit.",
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Rate of its prompt and output tokens over all routers; more get 429. As many "
        "as a request may need are set aside when it comes. Null: no limit.",
    )
    burst_s: float = Field(
        default=60.0,
        ge=1,
        le=3_600,
        description="What may be used at once, after a pause, of both rates: as much as in this "
        "time, seconds.",
    )
    max_prompt_tokens: PromptLimit = None
    max_output_tokens: OutputLimit = None
    structured_output: bool = Field(
        default=True,
        description="Whether it may constrain outputs, where `router.structured_output` lets "
        "anybody; else it gets 403.",
    )
    weight: float = Field(
        default=1.0,
        ge=1 / MAX_WEIGHT,
        le=MAX_WEIGHT,
        description="Under overload: its share of what can be promised, and of a router's places, "
        "against that of other keys. One of weight 2 gets twice as many tokens as one of weight 1, "
        "if it asks for them.",
    )
    beyond: Literal["clamp", "refuse"] = Field(
        default="clamp",
        description="What becomes of a request that states more than this allows: `clamp` serves "
        "it as what is allowed and says so, `refuse` answers 403. What a class only presets is "
        "clamped in either case.",
    )

    def floor_ms(self, field: str) -> float | None:
        """Tightest value of an objective, ms. The first token is no later than the last, so an
        end-to-end objective is held to the floor of the TTFT, too."""
        if field == wire.TTFT:
            return self.min_ttft_ms
        if field == wire.TPOT:
            return self.min_tpot_ms
        floors = [floor for floor in (self.min_e2e_ms, self.min_ttft_ms) if floor is not None]
        return max(floors, default=None)


NO_CAPS: Final = TenantLimits()
"""Those of a key without any."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks.

    Attributes:
        name: for metrics; never the key.
        owner: stands for the client where what belongs to it is kept. It stays the same as long
            as the key's name does, or where it has none, the key. Not secret.
        caps: the most that it may ask for.
    """

    name: str = UNNAMED
    owner: str = "anyone"
    caps: TenantLimits = NO_CAPS

    @property
    def tenant(self) -> int:
        """Names it where what is promised is shared, a 63-bit hash; 0 for :data:`ANYONE`."""
        return 0 if self == ANYONE else _tenant_of(self.owner)

    def may_hold(self, held: float, free: float, part: float) -> bool:
        """Whether it may have more of something of the router's, of which it holds ``held`` and
        nobody holds ``free``; see :func:`scheduling.fair_shares.has_room`. Where there are no keys,
        everybody is one client, who may have all."""
        return self == ANYONE or has_room(held, free, self.caps.weight, part)


ANYONE: Final = Client()
"""Who asks where no keys are configured."""


@lru_cache(maxsize=4_096)
def _tenant_of(owner: str) -> int:
    digest = hashlib.blake2b(owner.encode(), digest_size=8, person=b"sluice-tenant").digest()
    return int.from_bytes(digest, "big") >> 1


class LimitCheck:
    """Holds one request to its client's caps.

    ``said_in`` names the field or header in which the client stated a value; ``None`` where it
    stated none and a class presets it.

    Attributes:
        clamped: what the caps changed, and to what: ``{"priority": "4", "ttft_ms": "500"}``.
    """

    def __init__(self, caps: TenantLimits) -> None:
        self._caps = caps
        self.clamped: dict[str, str] = {}

    def service_class(self, asked: str, said_in: str | None) -> str:
        """The class that it is served as.

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
        """The priority that it gets.

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
        """An objective of it, ms.

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
