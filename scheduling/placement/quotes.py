"""Quotes: which times a request would see now, at some levels, and the nearest objective that could
be promised where its own cannot.

A quoted time is the decision's prediction times a quantile of the *ratios*, observed over
predicted, of the latest requests of its class and tier. As load drifts and endings come late, the
level at which a quantile is taken moves with each observation below or above what was quoted
(adaptive conformal inference, Gibbs & Candès 2021, eq. 2), so in the long run each quoted level
covers its share.

Which requests teach does not depend on when they come: those of a burst, which wait for each other,
are slower than the ones between bursts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import accumulate
from math import exp, inf
from typing import Final, NamedTuple

from sluice.scheduling.recent import Latest, used
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import Times

LEVELS: Final = (0.5, 0.9, 0.99)
"""The shares of requests that are to keep the quoted times."""

AIMS: Final = ((0.515, 0.915, 0.998), (0.5, 0.9, 0.998), (0.5, 0.9, 0.998))
"""The shares that are aimed at, of each of ``OBJECTIVES``. The last level is a bound; and by the
time that a quoted request comes, another one may be there, which its first token waits for."""

VALID_S: Final = 1.0
"""For how long a quote, and an offer, is meant, seconds."""

WINDOWS: Final = (100, 100, 400)
"""How many of the latest ratios count for each level: few, to follow the load; the last level needs
more, as it is beyond what a hundred can say."""

GAIN, FIRST_GAIN, LEARNING = 0.001, 0.005, 0.5
"""How far one observation moves the levels: the n-th one ``LEARNING / n``, between ``GAIN`` and
``FIRST_GAIN``. Under load hundreds are quoted between a quote and the end of its answer: with large
steps the levels would swing, with small ones alone they would be off for the first hundreds."""

UNKNOWN: Final = (1.0, 2.0, 4.0)
"""The quantiles with fewer than ``FEW`` ratios."""
FEW: Final = 10

MIN_PREDICTED_S: Final = 1e-3
"""No predicted time is shorter, seconds."""

MAX_KINDS: Final = 256
MAX_OPEN: Final = 16_384
"""Requests in progress whose predictions are known; of more, the oldest teach nothing."""

SPACING_S: Final = 0.02
"""Mean time between two requests that teach, at least, and time between two looks for what has
ended: a decision under load is not longer for it."""

SMOOTHING: Final = 0.1
"""How far one request that teaches moves the mean time between two requests."""

MAX_HELD: Final = 1_024
MAX_HELD_BY_TENANT: Final = 128
"""Most quotes and offers that can be taken up at a time, and of those of one tenant. An offer takes
some tests, so this also bounds what a flood of refusals costs."""

MAX_TIGHTER: Final = 1.01
MAX_LONGER: Final = 1.1
"""What takes up a quote may have objectives tighter by this factor, for those who round, and a
prompt as many times as long: its length is an estimate."""

ACCEPTING: Final = 0.05
"""How far one offer moves the share of those that are taken up."""

MARGIN_GAIN: Final = 0.5
MIN_MARGIN, MAX_MARGIN = 0.25, 8.0
"""How far one offer that is taken up moves the logarithm of the margin, and its bounds."""

Quantiles = tuple[float, ...]


class Prediction(NamedTuple):
    """What a decision predicts of a request: ``times_s`` of each of ``OBJECTIVES`` from then on,
    ``tokens`` of output."""

    service_class: str
    promised: bool
    waited_s: float
    times_s: tuple[float, float, float]
    tokens: float


class Offer(NamedTuple):
    """The nearest objective that could be promised, seconds from the arrival of a request that
    comes within ``VALID_S``. ``max_tokens``: output with which the stated end-to-end time could be
    promised instead; 0: no shorter one helps."""

    times_s: Times
    max_tokens: int = 0


class Quote(NamedTuple):
    """What would be decided now. ``times_s``: of each of ``OBJECTIVES``, the times from arrival
    at ``LEVELS``, seconds; empty where the request would be refused. ``held``: what the promise
    needs is reserved."""

    decision: RouteDecision
    times_s: tuple[Quantiles, ...] = ()
    output_tokens: float = 0.0
    offer: Offer | None = None
    held: bool = False


class Held(NamedTuple):
    """What the request that takes up a quote or an offer finds. ``terms``: the objectives that it
    may have, each with the most output tokens. ``keys``: of its reservations, none for an offer."""

    tenant: int
    until_s: float
    prompt_tokens: float
    terms: tuple[tuple[Times, float], ...]
    replica_id: str = ""
    keys: tuple[int, ...] = ()

    def allows(self, query: RouteQuery) -> bool:
        """Whether a request is the one that was meant, and not one that asks for more."""
        if query.tenant != self.tenant or query.prompt_tokens > MAX_LONGER * self.prompt_tokens:
            return False
        tokens = query.output_tokens or inf
        return any(
            tokens <= most
            and all(
                own_s is None or (held_s is not None and MAX_TIGHTER * own_s >= held_s)
                for own_s, held_s in zip(query.slo.times_s, times_s, strict=True)
            )
            for times_s, most in self.terms
        )


class Ratios:
    """The latest ratios of requests alike, and the quantiles that are quoted of them."""

    __slots__ = ("_aims", "_count", "_latest", "_levels", "quantiles")

    def __init__(self, aims: Quantiles) -> None:
        self._count = 0
        self._aims = aims
        self._levels = list(aims)
        self._latest = tuple(map(Latest, WINDOWS))
        self.quantiles: Quantiles = UNKNOWN

    def add(self, ratio: float, quoted: Quantiles) -> None:
        """Learn from a request that ended, and of which these were quoted. ``O(WINDOWS)``."""
        self._count += 1
        gain = min(FIRST_GAIN, max(GAIN, LEARNING / self._count))
        for place, aim in enumerate(self._aims):
            moved = self._levels[place] + gain * (aim - (ratio <= quoted[place]))
            self._levels[place] = min(max(moved, 0.0), 1.0)
            self._latest[place].add(ratio)
        if self._count >= FEW:
            self.quantiles = tuple(map(_quantile, self._latest, self._levels))


def _quantile(known: Latest, level: float) -> float:
    beyond = len(known) * (1.0 - level) < 1.0  # what so few can say
    return known.quantile(level) * (1.0 + FEW / len(known) if beyond else 1.0)


class Quotes:
    """What was predicted of requests in progress, how those before them turned out, and the quotes
    and offers that can be taken up. ``O(1)`` a decision, ``O(WINDOWS)`` an ending."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[tuple[str, bool], tuple[Ratios, ...]] = OrderedDict()
        self._open: OrderedDict[Hashable, tuple[Prediction, list[Quantiles]]] = OrderedDict()
        self._held: dict[int, Held] = {}
        # Every how many decisions one teaches; those since the last one, its time, and the mean
        # time between two decisions.
        self._every, self._passed, self._last_s, self._gap_s = 1, 0, -inf, 1.0
        self.ends_s = inf
        """When the next of what is held ends."""
        self.margin = 2.0
        """How many times ``VALID_S`` an offer is later than what could be promised at once."""
        self._accepted = 0.5  # share of the offers that are taken up

    # How long requests take.

    def teaches(self, now_s: float) -> bool:
        """Whether a request that is placed now is to teach: every n-th one, whenever it comes."""
        self._passed += 1
        if self._passed < self._every:
            return False
        gap_s = min((now_s - self._last_s) / self._passed, 1.0)
        self._gap_s += SMOOTHING * (gap_s - self._gap_s)
        self._last_s, self._passed = now_s, 0
        self._every = max(1, round(SPACING_S / max(self._gap_s, 1e-6)))
        return True

    def predicted(self, name: Hashable, made: Prediction) -> None:
        """A request was placed that teaches; only its first decision counts."""
        self._open.setdefault(name, (made, [ratios.quantiles for ratios in self._alike(made)]))
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def ended(self, name: Hashable, observed_s: Times | None) -> None:
        """A request ended after these times from its arrival, as far as they are known; ``None``:
        it failed."""
        made, quoted = self._open.pop(name, (None, []))
        if made is None or observed_s is None:
            return
        parts = zip(
            self._alike(made), quoted, made.times_s, _since_s(made), observed_s, strict=True
        )
        for ratios, quantiles, predicted_s, since_s, seen_s in parts:
            if seen_s is not None and seen_s > since_s:
                ratios.add((seen_s - since_s) / predicted_s, quantiles)

    def times_s(self, made: Prediction) -> tuple[Quantiles, ...]:
        """Of each of ``OBJECTIVES``, the times from arrival at ``LEVELS``, ascending."""
        parts = zip(self._alike(made), made.times_s, _since_s(made), strict=True)
        return tuple(
            tuple(accumulate([since_s + predicted_s * each for each in ratios.quantiles], max))
            for ratios, predicted_s, since_s in parts
        )

    def _alike(self, made: Prediction) -> tuple[Ratios, ...]:
        """The ratios that count, of each objective."""
        kind = made.service_class, made.promised
        return used(self._ratios, kind, lambda: tuple(map(Ratios, AIMS)), MAX_KINDS)

    # What is held, and offers.

    def has_room(self, tenant: int) -> bool:
        """Whether something more can be held for this tenant. ``O(held)``."""
        held = self._held
        own = sum([each.tenant == tenant for each in held.values()])
        return len(held) < MAX_HELD and own < MAX_HELD_BY_TENANT

    def hold(self, key: int, held: Held) -> bool:
        """Keep what the request that takes ``key`` finds; false: there are too many."""
        if not self.has_room(held.tenant):
            return False
        self._held[key] = held
        self.ends_s = min(self.ends_s, held.until_s)
        return True

    def take(self, query: RouteQuery, now_s: float) -> Held | None:
        """What is held for the request; it is taken once."""
        held = self._held.get(query.takes)
        if held is None or held.until_s <= now_s or not held.allows(query):
            return None
        return self._held.pop(query.takes)

    def ended_by(self, now_s: float) -> list[int]:
        """Forget what was not taken in time. Returns the keys of its reservations. ``O(held)``, so
        no more often than every ``SPACING_S``."""
        ended = [key for key, held in self._held.items() if held.until_s <= now_s]
        gone = [self._held.pop(key) for key in ended]
        self._accepted *= (1.0 - ACCEPTING) ** sum([not held.keys for held in gone])
        next_s = min([held.until_s for held in self._held.values()], default=inf)
        self.ends_s = max(next_s, now_s + SPACING_S)
        return [key for held in gone for key in held.keys]

    def offered_tokens(self) -> float:
        """Prompt tokens of the offers that are expected to be taken up. ``O(held)``."""
        offered = [held.prompt_tokens for held in self._held.values() if not held.keys]
        return self._accepted * sum(offered)

    def was_accepted(self, promised: bool) -> None:
        """An offer was taken up in time, and was promised or not: a test that moves the logarithm
        of the margin, so that in the long run a share ``LEVELS[-1]`` is."""
        self._accepted += ACCEPTING * (1.0 - self._accepted)
        margin = self.margin * exp(MARGIN_GAIN * (LEVELS[-1] - promised))
        self.margin = min(max(margin, MIN_MARGIN), MAX_MARGIN)


def _since_s(made: Prediction) -> tuple[float, float, float]:
    """From an objective's start until the prediction."""
    return made.waited_s, 0.0, made.waited_s
