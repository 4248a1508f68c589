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
from router.tenancy.limits import Client, TenantLimits
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
        self._sent = False

    def sent(self) -> None:
        """The request goes to a replica, which may work for it from now on."""
        self._sent = True

    def close(self, answer: Answer | None, output_tokens: int | None, left: bool = False) -> None:
        """The request is over: give back what it did not need. Only the first call counts.

        Args:
            answer: the replica's, if one has answered.
            output_tokens: what has been sent of it, which counts where the engine has not said;
                ``None`` where that says nothing of what was made, as of an answer that is sent
                whole: then all that was set aside counts.
            left: the client left, so that a replica may have worked for it and nobody knows.
        """
        settle, self._settle = self._settle, None
        if settle is None:
            return
        if answer is not None and answer.tail is not None:
            used = answer.tail.prompt_tokens + answer.tail.output_tokens
            if used == 0 and answer.head.status < 400:
                # Engines do not count the tokens that they only make from text, or text from.
                used = self._prompt_tokens
        elif answer is None and not (left and self._sent):
            used = 0
        elif output_tokens is None:
            used = self._tokens
        else:
            used = self._prompt_tokens + output_tokens
        settle(used)


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
        account = self._take("tokens", client, tokens)
        assert account is not None
        mark = account.mark()
        return Charge(
            lambda used: self._settle(client, account, mark, tokens, used), prompt_tokens, tokens
        )

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
                    account.set(max(0.0, levels[index] + account.unsent))
                else:
                    # What has drained meanwhile is over, or a long outage would be a long debt.
                    # Nobody knows whether the message or its answer was lost. So what was used is
                    # told again and what was given back is not: either error is to the cost of the
                    # client, whose bucket drains, and never lets more in than the rate.
                    told_again = max(0.0, uses[index].used)
                    account.unsent = min(account.unsent + told_again, account.level)

    def _take(self, kind: _Kind, client: Client, amount: float) -> _Account | None:
        limit = _limit_of(kind, client.caps)
        if limit is None:
            return None
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
        return account

    def _settle(
        self, client: Client, taken_from: _Account, mark: int, tokens: float, used: float
    ) -> None:
        """A request for which ``tokens`` were set aside has used ``used``."""
        limit = _limit_of("tokens", client.caps)
        assert limit is not None
        account = self._account("tokens", client, limit, self._clock())
        change = used - tokens
        # What has drained is not given back, or others' use would be forgiven with it; and of an
        # account that was forgotten, as it was empty, all has.
        if account is taken_from:
            account.unsent -= account.undo(mark, max(0.0, -change))
        if change > 0:
            account.use(change)

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


def _limit_of(kind: _Kind, caps: TenantLimits) -> _Limit | None:
    per_minute = caps.requests_per_minute if kind == "requests" else caps.tokens_per_minute
    if per_minute is None:
        return None
    per_s = per_minute / 60
    return _Limit(per_s, max(1.0, per_s * caps.burst_s))
