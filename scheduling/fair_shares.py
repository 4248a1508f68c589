"""Fair shares between tenants: weighted max-min of what is promised, by tokens.

A tenant's service is the tokens of its promised requests, prompt and output. While everybody is
promised what they ask for there is nothing to share. Where not, max-min fairness with weights
(Bertsekas and Gallager, *Data Networks*, §6.5.2) gives who asks for less than its share all of it,
and divides the rest by weight: there is one level of tokens per weight, the water level, that fills
what can be promised. The counters that it is found from forget in :data:`WINDOW_S`.

Nobody knows the capacity, requests cannot be split, and a refused one may not come back. So a
tenant over its share is not closed out until the others have theirs, which would leave idle what
they happen not to ask for. It may go on, but only where a part of everything stays free: time until
each deadline, time of each second, KV blocks. Those below their share find that part when they
come. Networks of telephone lines have long done this with single lines, as trunk reservation
(Kelly, *Loss networks*, Annals of Applied Probability 1991). How much stays free is learned: more
with each request of a tenant below its share that finds no room, less with each that finds some,
and nothing where none comes.
"""

from __future__ import annotations

from itertools import islice
from math import exp, inf
from typing import NamedTuple

import numpy as np

from scheduling.kernels import Floats

WINDOW_S = 10.0
"""In this time the counters forget ``1 - 1/e`` of what was asked and promised, seconds."""

REFRESH_S = 0.1
"""How old the water level may be, seconds."""

MOST_TENANTS = 4_096
"""Tenants that are told apart. Of more, the one that has asked for least is forgotten."""

MOST_KEYS = 100_000
"""Requests that are remembered until they end; of more, the oldest tenth is forgotten."""

MOST_RESERVE = 0.5
"""Most of everything that is kept free of tenants over their share."""

SHORT = 0.97
"""A tenant with less than this part of its share is short of it. The few per cent between keep
noise from counting as need."""

_STEP = 0.1
"""What one refusal of a tenant that is short adds to the reserve."""

_REFUSED = 0.02
"""Share of their requests that tenants below their share are refused where the reserve is right."""

_LEAST_MEMORY_S, _MOST_MEMORY_S = 1.0, 10.0
"""In how long the reserve goes where nobody below its share asks: a few times as long as it was
between two of their requests, within these bounds, seconds."""

_GAPS = 4.0
_OLDEST = 30.0
"""Windows after which the counters get a new unit, so that numbers stay small."""


MAX_WEIGHT = 1_000.0
"""Largest weight of a tenant, and the inverse of the smallest."""


class _Charge(NamedTuple):
    """A promise that counts: whose, the tokens, and when it was made."""

    tenant: int
    tokens: float
    made_s: float


class FairShares:
    """Counts what tenants ask and are promised, and tells who must leave room for others.

    ``O(1)`` each, and ``O(tenants)`` ten times a second. All times are seconds on one monotonic
    clock of the caller's.

    Args:
        most_tenants: see :data:`MOST_TENANTS`.
        most_keys: see :data:`MOST_KEYS`.
    """

    def __init__(self, most_tenants: int = MOST_TENANTS, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._slots: dict[int, int] = {}
        self._free = list(range(most_tenants - 1, -1, -1))
        # Tokens of the past weigh less, so they are counted in a unit that shrinks: what comes is
        # multiplied by a factor that grows, and all are compared as they are.
        self._weights: Floats = np.zeros(most_tenants)
        self._asked: Floats = np.zeros(most_tenants)
        self._promised: Floats = np.zeros(most_tenants)
        self._total = 0.0
        self._unit_s = 0.0
        # The water level over all that is promised, per weight.
        self._level = inf
        self._refreshed_s = -inf
        self._reserve = 0.0
        self._reserve_s = -inf
        self._gap_s = _MOST_MEMORY_S
        self._charges: dict[int, _Charge] = {}
        self._refused: dict[int, None] = {}

    def __len__(self) -> int:
        """Tenants that are told apart now."""
        return len(self._slots)

    def reserve(self, tenant: int, now_s: float) -> float:
        """Share of everything that a promise to ``tenant`` must leave free for others, 0 to
        :data:`MOST_RESERVE`: 0 for one that is not over its share."""
        slot = self._slots.get(tenant)
        if slot is None or self._reserve <= 0.0:
            return 0.0
        self._refresh(now_s)
        if self._promised[slot] <= self._share(slot):
            return 0.0
        return min(self._reserve * self._fading(now_s), MOST_RESERVE)

    def promise(self, tenant: int, weight: float, key: int, tokens: float, now_s: float) -> None:
        """A request of ``tenant`` is promised its objective."""
        scale = self._scale(now_s)
        slot = self._slot(tenant, weight)
        self._note_below(slot, now_s, refused=False)
        if self._refused.pop(key, self) is self:
            self._asked[slot] += tokens * scale
        self._promised[slot] += tokens * scale
        self._total += tokens * scale
        self._charges[key] = _Charge(tenant, tokens, now_s)
        self._bound(self._charges)

    def refuse(
        self,
        tenant: int,
        weight: float,
        key: int,
        tokens: float,
        now_s: float,
        again: bool,
        over_share: bool = False,
    ) -> None:
        """A request of ``tenant`` is not promised its objective, now.

        Args:
            again: it may ask again under this key, which then counts as no new one.
            over_share: there was room for it, but for what its tenant has to leave free.
        """
        scale = self._scale(now_s)
        slot = self._slot(tenant, weight)
        if not over_share:
            self._note_below(slot, now_s, refused=True)
        if key in self._refused:
            return
        self._asked[slot] += tokens * scale
        if again:
            self._refused[key] = None
            self._bound(self._refused)

    def settle(self, key: int, tokens: float) -> None:
        """A promised request has ended, or was given up, after ``tokens``: its promise counts as so
        many. Unknown keys are ignored."""
        charge = self._charges.pop(key, None)
        slot = None if charge is None else self._slots.get(charge.tenant)
        if charge is None or slot is None:
            return
        # As if it had been known: what was promised long ago counts little, and so does this.
        change = (tokens - charge.tokens) * exp((charge.made_s - self._unit_s) / WINDOW_S)
        change = max(change, -float(self._promised[slot]))
        self._promised[slot] += change
        self._asked[slot] = max(self._asked[slot] + change, self._promised[slot])
        self._total += change

    def _share(self, slot: int) -> float:
        """What a tenant may be promised before it must leave room, as its promises are counted."""
        if self._level == inf:
            return inf
        return float(self._weights[slot]) * self._level * self._total

    def _note_below(self, slot: int, now_s: float, refused: bool) -> None:
        """Learn from a request of a tenant below its share, if it is one, how much to reserve."""
        self._refresh(now_s)
        share = self._share(slot)
        if share == inf or self._promised[slot] >= SHORT * share:
            return
        reserve = self._reserve * self._fading(now_s)
        reserve += _STEP if refused else -_STEP * _REFUSED
        self._reserve = min(max(reserve, 0.0), MOST_RESERVE)
        gap_s = min(now_s - self._reserve_s, _MOST_MEMORY_S)
        self._gap_s += 0.2 * (gap_s - self._gap_s)
        self._reserve_s = now_s

    def _fading(self, now_s: float) -> float:
        """What is left of the reserve, of 1, since anybody below its share has asked."""
        memory_s = min(max(_GAPS * self._gap_s, _LEAST_MEMORY_S), _MOST_MEMORY_S)
        return exp(-max(0.0, now_s - self._reserve_s) / memory_s)

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
        """Count in the unit of now, and forget who has not asked for long."""
        for counts in (self._asked, self._promised):
            counts *= factor
        self._total *= factor
        self._unit_s = now_s
        for tenant in [own for own, slot in self._slots.items() if self._asked[slot] < 1e-3]:
            self._forget(tenant)

    def _slot(self, tenant: int, weight: float) -> int:
        slot = self._slots.get(tenant)
        if slot is None:
            if not self._free:
                self._forget(min(self._slots, key=lambda own: self._asked[self._slots[own]]))
            slot = self._slots[tenant] = self._free.pop()
        self._weights[slot] = weight
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
    """The level ``L`` at which ``sum(min(asked, weights * L))`` is ``capacity``; infinite where all
    that is asked is no more than that. ``O(n log n)``.

    Args:
        asked: ``float64[n]``, what each asks for, >= 0.
        weights: ``float64[n]``, > 0.
        capacity: what there is, >= 0.
    """
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
    """Whether a tenant that holds ``held`` of something may have more, of which nobody holds
    ``free``: as long as it has less than ``part * weight`` of that.

    So whoever asks last finds some left, one alone gets nearly all of it where ``part`` is large,
    and many get equal parts: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 1998).
    """
    return held < part * weight * free
