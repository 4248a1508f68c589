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

MOST_TENANTS = 4_096
"""Maximum number of tracked tenants. Beyond it, the one that has asked for least is dropped."""

MOST_KEYS = 100_000
"""Maximum number of requests tracked until they end. Beyond it, the oldest tenth is dropped."""

SHORT = 0.97
"""A tenant with less than this part of its share is short of it. The few per cent between keep
noise from counting as need."""

REFUSED = 0.01
"""Share of what tenants below their share ask for that is refused where the reserve is right."""

PLACES_PART = 4.0
"""For ``has_room`` of slots: a tenant's most, per weight, over the free slots. One alone gets four
fifths of all; many together nearly all, in equal parts."""

MOST_USUAL = 4.0
"""Maximum reserve, in mean prompts of tenants below their share."""

_STEP = 0.5
"""Share of its length that a refused prompt adds to the reserve."""

_SMOOTHING = 0.1
"""Weight of the latest request in the means of what tenants below their share ask for."""

_GAPS = 4.0
_LEAST_MEMORY_S, _MOST_MEMORY_S = 1.0, 10.0
"""The reserve starts to shrink when no tenant below its share has asked for ``_GAPS`` times the
usual gap between their requests, within these bounds, seconds."""

_OLDEST = 30.0
"""Windows after which the counters get a new unit, so that numbers stay small."""


class _Charge(NamedTuple):
    """A promise that counts: whose, the tokens, and when it was made."""

    tenant: int
    tokens: float
    made_s: float


class FairShares:
    """Counts what tenants ask and are promised, and which must leave capacity to others. Times are
    seconds on one monotonic clock of the caller's.

    ``O(1)`` each, and ``O(n log n)`` with ``n`` tenants ten times a second; ``O(n)`` for a tenant
    that replaces another one."""

    def __init__(self, most_tenants: int = MOST_TENANTS, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._slots: dict[int, int] = {}
        self._tenants = [0] * most_tenants
        self._free = list(range(most_tenants - 1, -1, -1))
        # Tokens of the past weigh less, so they are counted in a unit that shrinks: what comes is
        # multiplied by a factor that grows, and all are compared as they are.
        self._weights: Floats = np.zeros(most_tenants)
        self._asked: Floats = np.zeros(most_tenants)
        self._promised: Floats = np.zeros(most_tenants)
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
        self._gap_s = _MOST_MEMORY_S
        self._usual = 0.0

    def __len__(self) -> int:
        """Number of tracked tenants."""
        return len(self._slots)

    def reserve_tokens(self, tenant: int, now_s: float) -> float:
        """Prompt tokens for which there must be capacity beside a new promise to ``tenant``; 0
        for a tenant that is not over its share."""
        slot = self._slots.get(tenant)
        if slot is None or self._reserve <= 0.0:
            return 0.0
        self._refresh(now_s)
        if self._promised[slot] <= self._share(slot):
            return 0.0
        reserve = self._reserve * self._fading(now_s)
        return reserve if reserve >= 1.0 else 0.0

    def promise(self, query: RouteQuery, output_tokens: float, now_s: float) -> None:
        """A request is promised its objective; its output is expected to be so long."""
        tokens = query.prompt_tokens + output_tokens
        scale, slot = self._scale(now_s), self._slot(query)
        if len(self._slots) > 1:
            self._learn(slot, query.prompt_tokens, now_s, refused=False)
        if self._refused.pop(query.key, self) is self:
            self._asked[slot] += tokens * scale
        self._promised[slot] += tokens * scale
        # It may have asked long ago, for fewer.
        self._asked[slot] = max(self._asked[slot], self._promised[slot])
        self._total += tokens * scale
        self._charges[query.key] = _Charge(query.tenant, tokens, now_s)
        if len(self._charges) > self._most_keys:
            self._bound(self._charges)

    def refuse(
        self, query: RouteQuery, output_tokens: float, now_s: float, again: bool, over_share: bool
    ) -> None:
        """A request is not promised its objective. ``again``: it may ask again under its key, which
        then counts as no new one. ``over_share``: there was room for it, but not for the reserve as
        well."""
        scale, slot = self._scale(now_s), self._slot(query)
        if not over_share and len(self._slots) > 1:
            self._learn(slot, query.prompt_tokens, now_s, refused=True)
        if query.key in self._refused:
            return
        self._asked[slot] += (query.prompt_tokens + output_tokens) * scale
        if again:
            self._refused[query.key] = None
            self._bound(self._refused)

    def settle(self, key: int, tokens: float) -> None:
        """A promised request has ended, or was abandoned, after ``tokens``: its promise now
        counts as ``tokens``. Unknown keys are ignored."""
        charge = self._charges.pop(key, None)
        slot = None if charge is None else self._slots.get(charge.tenant)
        if charge is None or slot is None:
            return
        # As if known from the start: an old guarantee counts little, and so does its correction.
        change = (tokens - charge.tokens) * exp((charge.made_s - self._unit_s) / WINDOW_S)
        change = max(change, -float(self._promised[slot]))
        self._promised[slot] += change
        self._asked[slot] = max(self._asked[slot] + change, self._promised[slot])
        self._total += change

    def _share(self, slot: int) -> float:
        """What a tenant may be promised before it must leave room, as its promises are
        counted."""
        if self._level == inf:
            return inf
        return float(self._weights[slot]) * self._level * self._total

    def _learn(self, slot: int, prompt_tokens: int, now_s: float, refused: bool) -> None:
        """Learn the reserve from a request of a tenant that is short of its share, if it is; of a
        single tenant all is its own."""
        self._refresh(now_s)
        share = self._share(slot)
        if share == inf or self._promised[slot] >= SHORT * share:
            return
        self._usual += (_SMOOTHING if self._usual else 1.0) * (prompt_tokens - self._usual)
        # This seeks the reserve with which ``REFUSED`` of their prompts, by length, find no room.
        step = _STEP * prompt_tokens * (1.0 - REFUSED if refused else -REFUSED)
        reserve = self._reserve * self._fading(now_s) + step
        self._reserve = min(max(reserve, 0.0), MOST_USUAL * self._usual)
        gap_s = min(now_s - self._below_s, _MOST_MEMORY_S)
        self._gap_s += _SMOOTHING * (gap_s - self._gap_s)
        self._below_s = now_s

    def _fading(self, now_s: float) -> float:
        """The remaining share of the reserve since a tenant below its share asked last."""
        memory_s = min(max(_GAPS * self._gap_s, _LEAST_MEMORY_S), _MOST_MEMORY_S)
        return exp(min(0.0, 1.0 - (now_s - self._below_s) / memory_s))

    def _refresh(self, now_s: float) -> None:
        if now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        self._total = float(self._promised[slots].sum())
        level = water_level(self._asked[slots], self._weights[slots], self._total)
        self._level = level / self._total if self._total > 0.0 else inf

    def _scale(self, now_s: float) -> float:
        """The factor of what comes now."""
        windows = (now_s - self._unit_s) / WINDOW_S
        if windows > _OLDEST:
            self._new_unit(now_s, exp(-windows))
            windows = 0.0
        return exp(windows)

    def _new_unit(self, now_s: float, factor: float) -> None:
        """Count in the unit of now. Drop tenants that have not asked for long, and requests as
        old: the end of some is never reported, for example if their replica died."""
        for counts in (self._asked, self._promised):
            counts *= factor
        self._total *= factor
        self._unit_s = now_s
        for tenant in [own for own, slot in self._slots.items() if self._asked[slot] < 1e-3]:
            self._forget(tenant)
        since_s = now_s - _OLDEST * WINDOW_S
        self._charges = {
            key: charge for key, charge in self._charges.items() if charge.made_s > since_s
        }
        self._refused.clear()

    def _slot(self, query: RouteQuery) -> int:
        """Where its tenant is counted."""
        slot = self._slots.get(query.tenant)
        if slot is None:
            if not self._free:
                self._forget(self._tenants[int(np.argmin(self._asked))])
            slot = self._slots[query.tenant] = self._free.pop()
            self._tenants[slot] = query.tenant
        self._weights[slot] = query.weight
        return slot

    def _forget(self, tenant: int) -> None:
        slot = self._slots.pop(tenant)
        self._total -= float(self._promised[slot])
        self._asked[slot] = self._promised[slot] = 0.0
        self._free.append(slot)

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
