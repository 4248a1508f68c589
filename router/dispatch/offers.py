"""Counter-offers: a refusal says the nearest objective that could be promised."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from sluice.router import wire
from sluice.router.errors import ApiError
from sluice.router.request.call import Call
from sluice.scheduling.placement.quotes import VALID_S, Offer, Quote
from sluice.scheduling.request.objective import SLO

MAX_OFFERING: Final = 32
"""Most refusals for which a router asks for offers at a time: a flood of them neither holds up the
controller's decisions nor waits for a silent one."""


@dataclass(slots=True)
class Offers:
    """The offers of one router process and model. ``asking``: refusals that wait for one."""

    quote: Callable[[Call, str], Awaitable[Quote | None]]
    asking: int = 0

    async def add(self, call: Call, refusal: ApiError) -> None:
        """Add an offer to the refusal of an objective, if any could be promised."""
        wanted = refusal.reason.status == 429 and call.slo.stated and call.loop is None
        if not wanted or self.asking >= MAX_OFFERING:
            return
        token = secrets.token_hex(16)
        self.asking += 1
        try:
            quote = await self.quote(call, token)
        finally:
            self.asking -= 1
        if quote is not None and quote.offer is not None:
            refusal.offer = offer_shown(quote.offer, call.slo, token)


def offer_shown(offer: Offer, slo: SLO, token: str) -> dict[str, Any]:
    """An offer as clients see it: its times, and what they take."""
    shown: dict[str, Any] = {}
    takes = []
    names = zip((wire.TTFT, wire.TPOT, wire.E2E), offer.times_s, slo.times_s, strict=True)
    for name, offered_s, stated_s in names:
        if offered_s is not None and stated_s is not None:
            shown[name] = ceil(10_000 * offered_s) / 10
            if offered_s > stated_s:
                takes.append("slower" if name == wire.TPOT else "later")
    if offer.max_tokens:
        shown[wire.MAX_TOKENS_FIELD] = offer.max_tokens
        takes.append("fewer tokens")
    expires = {wire.EXPIRES: 1000 * VALID_S, "quote": token}
    return {**shown, **expires, "takes": list(dict.fromkeys(takes))}
