"""What a client may ask for, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from sluice.protocol.messages import MAX_HOLD_S, MAX_USES, QuotaUse
from sluice.protocol.requests import ResponseHead, ResponseTail
from sluice.router import wire
from sluice.router.errors import ApiError, Reason, shown
from sluice.router.wire import MAX_OBJECTIVE_MS, MAX_TOKENS, MIN_OBJECTIVE_MS
from sluice.scheduling.request.job import MAX_WEIGHT
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY
from sluice.scheduling.tenancy.fair_shares import has_room
from sluice.scheduling.tenancy.leaky_bucket import Bucket

# Rate limits of API keys: requests and tokens per minute, over all routers.
#
# The buckets are those of :mod:`sluice.controller.actor`. A request is charged to both before it
# is sent anywhere. It reserves as many tokens as it may need, and returns unused ones at its end.

# Tenant limits: the maximum that a client may ask for.

UNNAMED: Final = "unnamed"  # name of every client whose key has no name


Milliseconds = Annotated[
    float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)
]
"""An objective."""

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


class TenantLimits(BaseModel, extra="forbid", frozen=True):
    """The maximum that a client may ask for. A limit that is not set is that of the API."""

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
    min_ttft_ms: Milliseconds | None = Field(
        default=None,
        description="Tightest time to first token, ms. No end-to-end objective may be tighter.",
    )
    min_tpot_ms: Milliseconds | None = Field(
        default=None, description="Tightest time per output token after the first, ms."
    )
    min_e2e_ms: Milliseconds | None = Field(
        default=None, description="Tightest time to the last token, ms."
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
    max_hold_ms: float = Field(
        default=1_000.0,
        ge=0,
        le=1_000 * MAX_HOLD_S,
        description="Longest time for which a quote of it reserves capacity, ms.",
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
        """Tightest allowed objective, ms; the TTFT's floor also applies to end-to-end."""
        if field == wire.TTFT:
            return self.min_ttft_ms
        if field == wire.TPOT:
            return self.min_tpot_ms
        floors = [floor for floor in (self.min_e2e_ms, self.min_ttft_ms) if floor is not None]
        return max(floors, default=None)


def check_classes(limits: Iterable[TenantLimits], classes: Collection[str], what: str) -> None:
    """Raises ValueError: ``what`` has limits with a class that is not one of ``classes``."""
    unknown = {name for caps in limits for name in caps.classes or ()} - set(classes)
    if unknown:
        known = ", ".join(sorted(classes))
        raise ValueError(f"{what} unknown classes {sorted(unknown)}; known are: {known}")


NO_CAPS: Final = TenantLimits()  # limits of a key without any
_ANYONE: Final = "anyone"


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a request. ``name`` is for metrics, never the key. ``owner``, not secret,
    identifies it in storage: by the key's name, or by the key if that has none."""

    name: str = UNNAMED
    owner: str = _ANYONE
    caps: TenantLimits = NO_CAPS
    tenant: int = field(init=False)
    """Its id in the sharing of guaranteed capacity, a 63-bit hash; 0 for :data:`ANYONE`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant", _tenant_of(self.owner))

    def may_hold(self, held: float, free: float, part: float) -> bool:
        """Whether it may use more of a router's resource; without keys one client may use all."""
        return not self.tenant or has_room(held, free, self.caps.weight, part)


@lru_cache(maxsize=4_096)
def _tenant_of(owner: str) -> int:
    if owner == _ANYONE:
        return 0
    digest = hashlib.blake2b(owner.encode(), digest_size=8, person=b"sluice-tenant").digest()
    return int.from_bytes(digest, "big") >> 1


ANYONE: Final = Client()  # the client of every request if no keys are configured


class LimitCheck:
    """Applies its client's limits to one request, and notes what they ``clamped``. ``said_in`` is
    the field or header of the value, ``None`` if a class presets it."""

    def __init__(self, caps: TenantLimits) -> None:
        self._caps = caps
        self.clamped: dict[str, str] = {}

    def service_class(self, value: str, said_in: str | None) -> str:
        """The service class of the request. Raises ApiError: 403."""
        allowed = self._caps.classes
        if allowed is None or value in allowed:
            return value
        self._refuse(said_in, f"one of {', '.join(allowed)}", value)
        self.clamped[wire.CLASS] = allowed[0]
        return allowed[0]

    def priority(self, value: int, said_in: str | None) -> int:
        """The priority of the request. Raises ApiError: 403."""
        most = self._caps.max_priority
        if value <= most:
            return value
        self._refuse(said_in, f"at most {most}", value)
        self.clamped[wire.PRIORITY] = str(most)
        return most

    def objective_ms(self, field: str, value: float | None, said_in: str | None) -> float | None:
        """An objective of the request, ms. Raises ApiError: 403."""
        floor = self._caps.floor_ms(field)
        if value is None or floor is None or value >= floor:
            return value
        self._refuse(said_in, f"at least {floor:.15g} ms", value)
        self.clamped[field] = f"{floor:.15g}"
        return floor

    def _refuse(self, said_in: str | None, allowed: str, value: object) -> None:
        if said_in is not None and self._caps.beyond == "refuse":
            message = f"{said_in} must be {allowed} with this API key, got {shown(value)}"
            raise ApiError(Reason.NOT_PERMITTED, message, said_in)


EXCHANGE_S = 1.0  # interval at which the routers' use is added up, seconds
_SLACK = 1e-9  # tolerance for rounding errors, relative to a bucket's size

_Kind = Literal["requests", "tokens"]
_REASONS: Final[dict[_Kind, Reason]] = {
    "requests": Reason.REQUEST_RATE,
    "tokens": Reason.TOKEN_RATE,
}

Share = Callable[[list[QuotaUse]], Awaitable[list[float] | None]]
"""Reports uses to the controller and returns its answer; ``None`` if it does not answer."""

_log = logging.getLogger(__name__)


class _Limit(NamedTuple):
    """A limit of a client: the drain rate of its bucket per second, and the bucket's size."""

    per_s: float
    size: float


class _Account(Bucket):
    """A router's view of a bucket; ``unsent`` use is not yet reported."""

    __slots__ = ("full_per_s", "unsent")

    def __init__(self, now_s: float) -> None:
        super().__init__(now_s)
        self.full_per_s = 0.0
        self.unsent = 0.0

    def use(self, amount: float) -> None:
        self.add(amount)
        self.unsent += amount


class Charge:
    """The tokens reserved for one request."""

    def __init__(
        self,
        settle: Callable[[float], None] | None = None,
        prompt_tokens: int = 0,
        tokens: int = 0,
    ) -> None:
        self._settle = settle
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._sent = False

    def sent(self) -> None:
        """The request is sent to a replica, which may compute tokens for it from now on."""
        self._sent = True

    def close(
        self,
        head: ResponseHead | None = None,
        tail: ResponseTail | None = None,
        output_tokens: int | None = None,
        left: bool = False,
    ) -> None:
        """The request is over: return unused tokens, once. Without the engine's count in ``tail``,
        ``output_tokens`` count; ``None``: the whole reservation. ``left``: the client left, and
        unreported tokens may have been computed."""
        settle, self._settle = self._settle, None
        if settle is None:
            return
        if tail is not None:
            used = tail.prompt_tokens + tail.output_tokens
            if used == 0 and (head is None or head.status < 400):
                # Engines do not count tokens that they only tokenise or detokenise.
                used = self._prompt_tokens
        elif head is None and not (left and self._sent):
            used = 0
        elif output_tokens is None:
            used = self._tokens
        else:
            used = self._prompt_tokens + output_tokens
        settle(used)


NO_CHARGE: Final = Charge()  # the charge of a client without a token limit


class RateLimiter:
    """Enforces clients' rate limits, ``O(1)`` per request; memory grows with recently active
    clients. Without the controller's ``share``, each limit is divided by ``routers``."""

    def __init__(
        self,
        share: Share | None = None,
        routers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._routers = routers
        self._clock = clock
        self._alone = share is None
        self._accounts: dict[str, _Account] = {}

    def count_request(self, client: Client) -> None:
        """Count a request of ``client``. Raises ApiError: 429, it exceeds the limit."""
        self._take("requests", client, 1)

    def reserve(self, client: Client, prompt_tokens: int, output_tokens: int) -> Charge:
        """Reserve tokens for a request: its prompt's, and as many as it may generate. One above the
        bucket's size waits for an empty bucket. Raises :class:`ApiError`: 429."""
        if client.caps.tokens_per_minute is None:
            return NO_CHARGE
        tokens = prompt_tokens + output_tokens
        account = self._take("tokens", client, tokens)
        assert account is not None
        mark = account.mark()
        return Charge(
            lambda used: self._settle(client, account, mark, tokens, used), prompt_tokens, tokens
        )

    def headers(self, client: Client) -> list[tuple[bytes, bytes]]:
        """OpenAI's rate limit headers; none for a client without limits."""
        now_s = self._clock()
        headers = []
        for kind in _REASONS:
            limit = _limit_of(kind, client.caps)
            if limit is not None:
                level = self._account(kind, client, limit, now_s).level
                figures = {
                    "limit": f"{limit.per_s * 60:.0f}",
                    "remaining": str(max(0, int(limit.size - level + _SLACK * limit.size))),
                    "reset": f"{level / limit.per_s:.3f}s",
                }
                headers += [
                    (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
                    for name, value in figures.items()
                ]
        return headers

    async def run(self) -> None:
        """Exchange uses with the other routers through the controller, indefinitely."""
        while self._share is not None:
            await asyncio.sleep(EXCHANGE_S)
            try:
                await self.exchange()
            except Exception:
                # Continue: without an exchange every router grants only its own part.
                _log.exception("could not exchange the use of rate limits with the controller")

    async def exchange(self) -> None:
        """Report uses to the controller, and adopt its levels. Empty buckets are dropped."""
        now_s = self._clock()
        for name, account in list(self._accounts.items()):
            # An empty bucket may have unreported use: what drains here drains for all routers.
            if account.drain(now_s, account.per_s) <= 0 and account.unsent == 0:
                del self._accounts[name]
        names = list(self._accounts)
        for start in range(0, len(names), MAX_USES):
            await self._exchange(names[start : start + MAX_USES])

    async def _exchange(self, names: list[str]) -> None:
        assert self._share is not None
        accounts = [self._accounts[name] for name in names]
        uses = []
        for name, account in zip(names, accounts, strict=True):
            uses.append(QuotaUse(name, account.unsent, account.level, account.full_per_s))
            account.unsent = 0.0
        levels: list[float] | None = None
        try:
            levels = await self._share(uses)
        finally:
            self._alone = levels is None
            now_s = self._clock()
            for index, account in enumerate(accounts):
                account.drain(now_s, self._rate(account.full_per_s))
                if levels is not None:
                    account.set(max(0.0, levels[index] + account.unsent))
                else:
                    # Drained use is not reported: else a long outage would leave a long debt.
                    # Either the message or its answer was lost. So use is reported again, but
                    # returned tokens are not: either error is at the cost of the client, whose
                    # bucket drains, and never admits more than the rate.
                    reported_again = max(0.0, uses[index].used)
                    account.unsent = min(account.unsent + reported_again, account.level)

    def _take(self, kind: _Kind, client: Client, amount: float) -> _Account | None:
        limit = _limit_of(kind, client.caps)
        if limit is None:
            return None
        account = self._account(kind, client, limit, self._clock())
        over = account.level + min(amount, limit.size) - limit.size
        if over > _SLACK * limit.size:
            raise ApiError(
                _REASONS[kind],
                f"This API key has exceeded its rate limit of {limit.per_s * 60:.15g} {kind} a "
                f"minute, at most {limit.size:.15g} at once.",
                retry_after_s=over / account.per_s,
            )
        account.use(amount)
        return account

    def _settle(
        self, client: Client, taken_from: _Account, mark: int, tokens: float, used: float
    ) -> None:
        limit = _limit_of("tokens", client.caps)
        assert limit is not None
        account = self._account("tokens", client, limit, self._clock())
        change = used - tokens
        # Drained tokens are not returned: that would cancel use of other requests. In an account
        # that was dropped because it was empty, all have drained.
        if account is taken_from:
            account.unsent -= account.undo(mark, max(0.0, -change))
        if change > 0:
            account.use(change)

    def _account(self, kind: _Kind, client: Client, limit: _Limit, now_s: float) -> _Account:
        """The bucket, drained up to now."""
        name = f"{kind}/{client.owner}"
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(now_s)
        account.full_per_s = limit.per_s
        account.drain(now_s, self._rate(limit.per_s))
        return account

    def _rate(self, per_s: float) -> float:
        return per_s / self._routers if self._alone else per_s


def _limit_of(kind: _Kind, caps: TenantLimits) -> _Limit | None:
    per_minute = caps.requests_per_minute if kind == "requests" else caps.tokens_per_minute
    if per_minute is None:
        return None
    per_s = per_minute / 60
    return _Limit(per_s, max(1.0, per_s * caps.burst_s))
