"""Rate limits of API keys: requests and tokens per minute, over all routers.

The buckets are those of :mod:`controller.quotas`. A request takes its place in both before it goes
anywhere: of tokens as many as it may need, and what it did not need is given back at its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal, NamedTuple

from controller.messages import MAX_USES, QuotaUse
from router.answer import Answer
from router.errors import ApiError, Reason
from router.trust import Caps, Client
from scheduling.leaky_bucket import Bucket

EXCHANGE_S = 1.0
"""How often the routers' use is added up, seconds."""

_SLACK = 1e-9
"""Of a bucket's size: what rounding may add."""

_Kind = Literal["requests", "tokens"]
_REASONS: Final[dict[_Kind, Reason]] = {
    "requests": Reason.REQUEST_RATE,
    "tokens": Reason.TOKEN_RATE,
}

Share = Callable[[list[QuotaUse]], Awaitable[list[float] | None]]
"""Tells the controller of uses, and what it answers; ``None`` where it does not."""

_log = logging.getLogger(__name__)


class _Limit(NamedTuple):
    """A limit of a client: what drains from its bucket each second, and what fits in it."""

    per_s: float
    size: float


class _Account(Bucket):
    """A router's own view of a bucket. ``unsent`` is what the controller was not told yet."""

    __slots__ = ("full_per_s", "unsent")

    def __init__(self, now_s: float) -> None:
        super().__init__(now_s)
        self.full_per_s = 0.0
        self.unsent = 0.0

    def use(self, amount: float) -> None:
        """Put ``amount`` in, which the controller is to be told of."""
        self.add(amount)
        self.unsent += amount


class Charge:
    """The tokens set aside for one request."""

    def __init__(
        self,
        settle: Callable[[float], None] | None = None,
        prompt_tokens: int = 0,
        tokens: int = 0,
    ) -> None:
        self._settle = settle
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens

    def close(self, answer: Answer | None, output_tokens: int, left: bool = False) -> None:
        """The request is over: give back what it did not need. Only the first call counts.

        Args:
            answer: the replica's, if one has answered.
            output_tokens: what has been sent of it, which counts where the engine has not said.
            left: the client left, so that a replica may have worked for it and nobody knows.
        """
        settle, self._settle = self._settle, None
        if settle is None:
            return
        if answer is not None and answer.tail is not None:
            used = answer.tail.prompt_tokens + answer.tail.output_tokens
        elif answer is not None or left:
            used = self._prompt_tokens + output_tokens
        else:
            used = 0
        settle(used - self._tokens)


NO_CHARGE: Final = Charge()
"""That of a client without a limit of tokens."""


class RateLimiter:
    """Holds clients to their limits. One per router process. ``O(1)`` for a request.

    Its memory is bounded by the clients that have used anything of late.

    Args:
        share: the way to the controller. Without one, and while it does not answer, the router
            grants its own part of each rate only: the limit divided by the number of routers.
        routers: how many there are.
        clock: monotonic seconds.
    """

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
        """A request of ``client`` has come.

        Raises:
            ApiError: 429, it is one too many.
        """
        self._take("requests", client, 1)

    def take_back(self, client: Client) -> None:
        """The last request of ``client`` does not count: it is going to be sent again."""
        self._give("requests", client, -1)

    def wait_s(self, client: Client) -> float:
        """How long, in seconds, until a request of ``client`` that needs one token is let in."""
        now_s, longest_s = self._clock(), 0.0
        for kind in _REASONS:
            limit = _limit_of(kind, client.caps)
            if limit is not None:
                account = self._account(kind, client, limit, now_s)
                longest_s = max(longest_s, (account.level + 1 - limit.size) / account.per_s)
        return longest_s

    def reserve(self, client: Client, prompt_tokens: int, output_tokens: int) -> Charge:
        """Set tokens aside for a request: its prompt's, and as many as it may generate.

        A request that needs more than the bucket holds is let in when that is empty, and the
        others wait for longer: else no limit could be smaller than the longest request.

        Raises:
            ApiError: 429, there are not as many left.
        """
        if client.caps.tokens_per_minute is None:
            return NO_CHARGE
        tokens = prompt_tokens + output_tokens
        self._take("tokens", client, tokens)
        return Charge(lambda change: self._give("tokens", client, change), prompt_tokens, tokens)

    def headers(self, client: Client) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers on what is left; none for a client without limits."""
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
        """Exchange what was used with the other routers, for ever."""
        while self._share is not None:
            await asyncio.sleep(EXCHANGE_S)
            try:
                await self.exchange()
            except Exception:
                # Without it every router grants its own part, so the next exchange must come.
                _log.exception("the use of rate limits could not be exchanged")

    async def exchange(self) -> None:
        """Tell the controller what was used, and take over what it knows. Buckets that are empty
        are forgotten."""
        now_s = self._clock()
        for name, account in list(self._accounts.items()):
            # An empty one may still have to be told of: what drains here drains for all routers.
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
                    account.level = max(0.0, levels[index] + account.unsent)
                else:
                    # What has drained meanwhile is over, or a long outage would be a long debt.
                    # Where only the answer got lost it is told twice, to the client's cost.
                    account.unsent = min(account.unsent + uses[index].used, account.level)

    def _take(self, kind: _Kind, client: Client, amount: float) -> None:
        limit = _limit_of(kind, client.caps)
        if limit is None:
            return
        account = self._account(kind, client, limit, self._clock())
        over = account.level + min(amount, limit.size) - limit.size
        if over > _SLACK * limit.size:
            raise ApiError(
                _REASONS[kind],
                f"This API key may use {limit.per_s * 60:.15g} {kind} a minute, "
                f"{limit.size:.15g} at once; there are not as many left.",
                retry_after_s=over / account.per_s,
            )
        account.use(amount)

    def _give(self, kind: _Kind, client: Client, change: float) -> None:
        """Put more in, or take out what is negative."""
        limit = _limit_of(kind, client.caps)
        if limit is not None:
            self._account(kind, client, limit, self._clock()).use(change)

    def _account(self, kind: _Kind, client: Client, limit: _Limit, now_s: float) -> _Account:
        """The bucket as it is now."""
        name = f"{kind}/{client.owner}"
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(now_s)
        account.full_per_s = limit.per_s
        account.drain(now_s, self._rate(limit.per_s))
        return account

    def _rate(self, per_s: float) -> float:
        return per_s / self._routers if self._alone else per_s


def _limit_of(kind: _Kind, caps: Caps) -> _Limit | None:
    per_minute = caps.requests_per_minute if kind == "requests" else caps.tokens_per_minute
    if per_minute is None:
        return None
    per_s = per_minute / 60
    return _Limit(per_s, max(1.0, per_s * caps.burst_s))
