"""Fair shares between tenants: weighted max-min of promised tokens.

A tenant's service is the prompt and output tokens of its promised requests. Where not all can be
promised, max-min fairness with weights (Bertsekas and Gallager, *Data Networks*, §6.5.2) finds one
level of tokens per weight, the water level, that uses up the capacity. Its counters decay in
``WINDOW_S``.

The capacity is unknown and a refused request may not retry, so a tenant over its share is not
blocked: it gets more where one more request fits beside its own, for the next tenant below its
share (trunk reservation; Kelly, *Loss networks*, Annals of Applied Probability 1991). The prompt
length of this reserve grows with each refused request of a tenant below its share, shrinks with
each that finds capacity, and goes to 0 without such requests."""

from __future__ import annotations

from itertools import islice
from math import exp, inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.kernels import Floats

WINDOW_S = 10.0
"""Time constant of the counters of tokens asked and promised, seconds: they forget ``1 -
1/e``."""

REFRESH_S = 0.1
"""How old the water level may be, seconds."""

MAX_TENANTS = 4_096
"""Maximum number of tracked tenants. Beyond it, the one that has asked for least is dropped."""

MAX_KEYS = 100_000
"""Maximum number of requests tracked until they end. Beyond it, the oldest tenth is dropped."""

SHORT = 0.97
"""A tenant with less than this part of its share is short of it. The few per cent between keep
noise from counting as need."""

REFUSED = 0.01
"""Share of what tenants below their share ask for that is refused where the reserve is right."""

PLACES_PART = 4.0
"""For ``has_room`` of slots: a tenant's most, per weight, over the free slots. One alone gets four
fifths of all; many together nearly all, in equal parts."""

MAX_USUAL = 4.0
"""Maximum reserve, in mean prompts of tenants below their share."""

_STEP = 0.5
"""Share of its length that a refused prompt adds to the reserve."""

_SMOOTHING = 0.1
"""Weight of the latest request in the means of what tenants below their share ask for."""

_GAPS = 4.0
_MIN_MEMORY_S, _MAX_MEMORY_S = 1.0, 10.0
"""The reserve starts to shrink when no tenant below its share has asked for ``_GAPS`` times the
usual gap between their requests, within these bounds, seconds."""

_OLDEST = 30.0
"""Windows after which the counters get a new unit, so that numbers stay small."""


class _Charge(NamedTuple):
    """A promise that counts: whose, the tokens, and when it was made."""

    tenant: int
    tokens: float
    made_s: float


class _Tenant:
    """Tokens that a tenant asked for and was promised, and the weight of its latest request."""

    __slots__ = ("asked", "promised", "weight")

    def __init__(self) -> None:
        self.asked = self.promised = 0.0
        self.weight = 1.0


class FairShares:
    """Counts what tenants ask and are promised, and which must leave capacity to others. Times are
    seconds on one monotonic clock of the caller's.

    ``O(1)`` each, and ``O(n log n)`` with ``n`` tenants ten times a second; ``O(n)`` for a tenant
    that replaces another one."""

    def __init__(self, most_tenants: int = MAX_TENANTS, most_keys: int = MAX_KEYS) -> None:
        self._most_tenants, self._most_keys = most_tenants, most_keys
        # Tokens of the past weigh less, so they are counted in a unit that shrinks: what comes is
        # multiplied by a factor that grows, and all are compared as they are.
        self._tenants: dict[int, _Tenant] = {}
        self._total = 0.0
        self._unit_s = 0.0
        # The water level per weight, over all that is guaranteed.
        self._level = inf
        self._refreshed_s = -inf
        self._charges: dict[int, _Charge] = {}
        self._refused: dict[int, None] = {}
        self._reserve = 0.0
        # Of the requests of tenants below their share: the last, and the means.
        self._below_s = -inf
        self._gap_s = _MAX_MEMORY_S
        self._usual = 0.0

    def __len__(self) -> int:
        """Number of tracked tenants."""
        return len(self._tenants)

    def reserve_tokens(self, tenant: int, now_s: float) -> float:
        """Prompt tokens for which there must be capacity beside a new promise to ``tenant``; 0
        for a tenant that is not over its share."""
        if self._reserve <= 0.0 or tenant not in self._tenants:
            return 0.0
        self._refresh(now_s)
        own = self._tenants[tenant]
        if own.promised <= self._share(own):
            return 0.0
        reserve = self._reserve * self._fading(now_s)
        return reserve if reserve >= 1.0 else 0.0

    def promise(self, query: RouteQuery, output_tokens: float, now_s: float) -> None:
        """A request is promised its objective; its output is expected to be so long."""
        tokens = query.prompt_tokens + output_tokens
        own = self._tenant(query, now_s)
        scaled = tokens * exp((now_s - self._unit_s) / WINDOW_S)
        if len(self._tenants) > 1:
            self._learn(own, query.prompt_tokens, now_s, refused=False)
        if self._refused.pop(query.key, self) is self:
            own.asked += scaled
        own.promised += scaled
        # It may have asked long ago, for fewer.
        own.asked = max(own.asked, own.promised)
        self._total += scaled
        self._charges[query.key] = _Charge(query.tenant, tokens, now_s)
        if len(self._charges) > self._most_keys:
            self._bound(self._charges)

    def refuse(
        self, query: RouteQuery, output_tokens: float, now_s: float, again: bool, over_share: bool
    ) -> None:
        """A request is not promised its objective. ``again``: it may ask again under its key, which
        then counts as no new one. ``over_share``: there was room for it, but not for the reserve as
        well."""
        own = self._tenant(query, now_s)
        if not over_share and len(self._tenants) > 1:
            self._learn(own, query.prompt_tokens, now_s, refused=True)
        if query.key in self._refused:
            return
        scale = exp((now_s - self._unit_s) / WINDOW_S)
        own.asked += (query.prompt_tokens + output_tokens) * scale
        if again:
            self._refused[query.key] = None
            self._bound(self._refused)

    def settle(self, key: int, tokens: float) -> None:
        """A promised request has ended, or was abandoned, after ``tokens``: its promise now
        counts as ``tokens``. Unknown keys are ignored."""
        charge = self._charges.pop(key, None)
        own = None if charge is None else self._tenants.get(charge.tenant)
        if charge is None or own is None:
            return
        # As if known from the start: an old guarantee counts little, and so does its correction.
        change = (tokens - charge.tokens) * exp((charge.made_s - self._unit_s) / WINDOW_S)
        change = max(change, -own.promised)
        own.promised += change
        own.asked = max(own.asked + change, own.promised)
        self._total += change

    def _share(self, own: _Tenant) -> float:
        """What a tenant may be promised before it must leave room, as its promises are
        counted."""
        if self._level == inf:
            return inf
        return own.weight * self._level * self._total

    def _learn(self, own: _Tenant, prompt_tokens: int, now_s: float, refused: bool) -> None:
        """Learn the reserve from a request of a tenant that is short of its share, if it is; of a
        single tenant all is its own."""
        self._refresh(now_s)
        share = self._share(own)
        if share == inf or own.promised >= SHORT * share:
            return
        self._usual += (_SMOOTHING if self._usual else 1.0) * (prompt_tokens - self._usual)
        # This seeks the reserve with which ``REFUSED`` of their prompts, by length, find no room.
        step = _STEP * prompt_tokens * (1.0 - REFUSED if refused else -REFUSED)
        reserve = self._reserve * self._fading(now_s) + step
        self._reserve = min(max(reserve, 0.0), MAX_USUAL * self._usual)
        gap_s = min(now_s - self._below_s, _MAX_MEMORY_S)
        self._gap_s += _SMOOTHING * (gap_s - self._gap_s)
        self._below_s = now_s

    def _fading(self, now_s: float) -> float:
        """The remaining share of the reserve since a tenant below its share asked last."""
        memory_s = min(max(_GAPS * self._gap_s, _MIN_MEMORY_S), _MAX_MEMORY_S)
        return exp(min(0.0, 1.0 - (now_s - self._below_s) / memory_s))

    def _refresh(self, now_s: float) -> None:
        if now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        tenants = self._tenants.values()
        self._total = float(np.array([each.promised for each in tenants]).sum())
        asked = np.array([each.asked for each in tenants])
        weights = np.array([each.weight for each in tenants])
        level = water_level(asked, weights, self._total)
        self._level = level / self._total if self._total > 0.0 else inf

    def _new_unit(self, now_s: float, factor: float) -> None:
        """Count in the unit of now. Drop tenants that have not asked for long, and requests as
        old: the end of some is never reported, for example if their replica died."""
        for own in self._tenants.values():
            own.asked *= factor
            own.promised *= factor
        self._total *= factor
        self._unit_s = now_s
        for tenant in [name for name, own in self._tenants.items() if own.asked < 1e-3]:
            self._forget(tenant)
        since_s = now_s - _OLDEST * WINDOW_S
        self._charges = {
            key: charge for key, charge in self._charges.items() if charge.made_s > since_s
        }
        self._refused.clear()

    def _tenant(self, query: RouteQuery, now_s: float) -> _Tenant:
        windows = (now_s - self._unit_s) / WINDOW_S
        if windows > _OLDEST:
            self._new_unit(now_s, exp(-windows))
        own = self._tenants.get(query.tenant)
        if own is None:
            if len(self._tenants) >= self._most_tenants:
                self._forget(min(self._tenants, key=lambda each: self._tenants[each].asked))
            own = self._tenants[query.tenant] = _Tenant()
        own.weight = query.weight
        return own

    def _forget(self, tenant: int) -> None:
        self._total -= self._tenants.pop(tenant).promised

    def _bound(self, remembered: dict[int, _Charge] | dict[int, None]) -> None:
        if len(remembered) > self._most_keys:
            # Many at once: to take the oldest of a dict again and again is quadratic.
            for key in list(islice(remembered, max(1, self._most_keys // 10))):
                del remembered[key]


def water_level(asked: Floats, weights: Floats, capacity: float) -> float:
    """The level ``L`` at which ``sum(min(asked, weights * L))`` is ``capacity``; infinite where
    that covers all that is asked. ``O(n log n)``."""
    if asked.sum() <= capacity:
        return inf
    order = np.argsort(asked / weights)
    asked, weights = asked[order], weights[order]
    # Where the first i have all that they ask for, the others share what is left.
    given = np.concatenate(([0.0], np.cumsum(asked)[:-1]))
    sharing = np.cumsum(weights[::-1])[::-1]
    levels = (capacity - given) / sharing
    full = np.flatnonzero(levels <= asked / weights)
    # Rounding may leave none where all get all but what they ask for.
    return max(0.0, float(levels[full[0]] if len(full) else levels[-1]))


def has_room(held: float, free: float, weight: float, part: float) -> bool:
    """Whether a tenant may take more: while ``held`` is below ``part * weight * free``. So some is
    left for the next tenant, and many get equal parts: dynamic thresholds (Choudhury and Hahne,
    IEEE/ACM Transactions on Networking 1998)."""
    return held < part * weight * free
