"""Quotes: which times a request would see now, at some levels, and the nearest objective that could
be promised where its own cannot.

A quoted time is the decision's prediction times a quantile of the *ratios*, observed over
predicted, of the latest requests alike. As load drifts and endings come late, the level at which a
quantile is taken moves with each observation below or above it (adaptive conformal inference,
Gibbs & Candès 2021, eq. 2), so in the long run each quoted level covers its share.

Our reading: alike are requests of one tier with predictions, and promised times, of one size, in
steps of four: an engine that schedules by deadlines uses the time that it has. An end-to-end time
depends most on the output's length, so classes have ratios of their own there. Misses come
together, as requests at one time share what they wait for. Therefore thousands of ratios count, and
the levels move slowly, each by what was quoted when the request was placed."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from itertools import accumulate
from math import ceil, exp, inf, log2
from operator import itemgetter
from typing import Final, NamedTuple

from sluice.scheduling.recent import used
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import OBJECTIVES, Times

LEVELS: Final = (0.5, 0.9, 0.99)
"""The shares of requests that are to keep the quoted times."""

AIMS: Final = (0.5, 0.9, 0.998)
"""The shares that are aimed at: the last level is a bound."""

VALID_S: Final = 1.0
"""For how long a quote, and an offer, is meant, seconds."""

WINDOW: Final = 2_000
"""Ratios that count."""

GAIN: Final = 0.003
"""How far one observation moves the levels: with 0.02 bursts made them swing."""

UNKNOWN: Final = (1.0, 2.0, 4.0)
"""The quantiles with fewer than ``FEW`` ratios."""
FEW: Final = 10

PAST: Final = 512
"""At least this many earlier quantiles are known."""

MAX_WINDOWS: Final = 256
MAX_OPEN: Final = 16_384
"""Requests in progress whose predictions are known; of more, the oldest teach nothing."""

SPACING_S: Final = 0.02
"""Between two requests that teach, or two looks for what has ended: a decision under load is not
longer for it."""

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

_MIN_S: Final = 1e-3


class Prediction(NamedTuple):
    """What a decision predicts of a request, seconds from then on. ``bound_s``: to the promised
    first token; infinite without a promise. ``tokens``: expected output."""

    service_class: str
    promised: bool
    bound_s: float
    waited_s: float
    ttft_s: float
    tpot_s: float
    tokens: float
    at_s: float


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
    times_s: tuple[tuple[float, ...], ...] = ()
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
        tokens = query.output_tokens or inf
        return query.prompt_tokens <= MAX_LONGER * self.prompt_tokens and any(
            tokens <= most
            and all(
                own_s is None or (held_s is not None and MAX_TIGHTER * own_s >= held_s)
                for own_s, held_s in zip(query.slo.times_s, times_s, strict=True)
            )
            for times_s, most in self.terms
        )


class Ratios:
    """The latest ratios of requests alike, and the quantiles that are quoted of them."""

    __slots__ = ("_latest", "_levels", "_past", "_sorted", "quantiles")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted = array("d")
        self._levels = list(AIMS)
        self.quantiles: tuple[float, ...] = UNKNOWN
        # Those of the past, each with the time from which it was quoted.
        self._past: list[tuple[float, tuple[float, ...]]] = [(-inf, UNKNOWN)]

    def add(self, ratio: float, quoted_s: float, now_s: float) -> None:
        """Learn from a request that ended, whose times were quoted at ``quoted_s``: the levels
        move by what was quoted then. ``O(WINDOW)``."""
        known = self._sorted
        if len(known) == WINDOW:
            del known[bisect_left(known, self._latest.popleft())]
        _, quoted = self._past[max(0, bisect_right(self._past, quoted_s, key=itemgetter(0)) - 1)]
        for place, level in enumerate(AIMS):
            moved = self._levels[place] + GAIN * (level - (ratio <= quoted[place]))
            self._levels[place] = min(max(moved, 0.0), 1.0)
        self._latest.append(ratio)
        insort(known, ratio)
        self.quantiles = tuple(map(self._quantile, self._levels, UNKNOWN))
        self._past.append((now_s, self.quantiles))
        if len(self._past) > 2 * PAST:
            del self._past[:PAST]

    def _quantile(self, level: float, unknown: float) -> float:
        count = len(self._sorted)
        if count < FEW:
            return unknown
        if count * (1.0 - level) < 1.0:  # beyond what so few can say
            return self._sorted[-1] * (1.0 + FEW / count)
        return self._sorted[min(max(ceil(level * (count + 1)), 1), count) - 1]


class Quotes:
    """What was predicted of requests in progress, how those before them turned out, and the quotes
    and offers that can be taken up. ``O(1)`` a decision, ``O(WINDOW)`` an ending."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Hashable, Ratios] = OrderedDict()
        self._open: OrderedDict[Hashable, Prediction] = OrderedDict()
        self._held: dict[int, Held] = {}
        self._held_of: Counter[int] = Counter()
        self._offered_tokens = 0.0
        self.next_s = -inf
        """From when on the prediction of another request is wanted."""
        self.ends_s = inf
        """When the next of what is held ends."""
        self.margin = 2.0
        """How many times ``VALID_S`` an offer is later than what could be promised at once."""
        self.accepted = 0.5
        """Share of the offers that are taken up."""

    # How long requests take.

    def predicted(self, name: Hashable, prediction: Prediction) -> None:
        """A request was placed; only its first decision counts."""
        self._open.setdefault(name, prediction)
        self.next_s = prediction.at_s + SPACING_S
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def ended(self, name: Hashable, observed_s: Times | None, now_s: float = 0.0) -> None:
        """A request ended after these times from its arrival, as far as they are known; ``None``:
        it failed."""
        prediction = self._open.pop(name, None)
        if prediction is None or observed_s is None:
            return
        ttft_s, tpot_s, e2e_s = observed_s
        since_s = prediction.waited_s
        seen_s = (
            None if ttft_s is None else ttft_s - since_s,
            tpot_s,
            None if e2e_s is None else e2e_s - since_s,
        )
        found = zip(_kinds(prediction), _times(prediction), seen_s, strict=True)
        for kind, predicted_s, took_s in found:
            if took_s is not None and took_s > 0.0:
                ratios = used(self._windows, kind, Ratios, MAX_WINDOWS)
                ratios.add(took_s / predicted_s, prediction.at_s, now_s)

    def times_s(self, prediction: Prediction) -> tuple[tuple[float, ...], ...]:
        """Of each of ``OBJECTIVES``, the times from arrival at ``LEVELS``, ascending."""
        since_s = prediction.waited_s
        found = []
        parts = zip(_kinds(prediction), _times(prediction), (since_s, 0.0, since_s), strict=True)
        for kind, predicted_s, before_s in parts:
            ratios = self._windows.get(kind)
            quantiles = UNKNOWN if ratios is None else ratios.quantiles
            times = [before_s + predicted_s * each for each in quantiles]
            found.append(tuple(accumulate(times, max)))
        return tuple(found)

    # What is held, and offers.

    def has_room(self, tenant: int) -> bool:
        """Whether something more can be held for this tenant."""
        return len(self._held) < MAX_HELD and self._held_of[tenant] < MAX_HELD_BY_TENANT

    def hold(self, key: int, held: Held) -> bool:
        """Keep what the request that takes ``key`` finds; false: there are too many."""
        if not self.has_room(held.tenant):
            return False
        self._held[key] = held
        self._held_of[held.tenant] += 1
        self._offered_tokens += 0.0 if held.keys else held.prompt_tokens
        self.ends_s = min(self.ends_s, held.until_s)
        return True

    def take(self, key: int, tenant: int) -> Held | None:
        """What is held for a request of this tenant; it is taken once."""
        held = self._held.get(key)
        if held is None or held.tenant != tenant:
            return None
        self._forget(key)
        return held

    def ended_by(self, now_s: float) -> list[int]:
        """Forget what was not taken in time. Returns the keys of its reservations. ``O(held)``, so
        no more often than every ``SPACING_S``."""
        gone = {key: held for key, held in self._held.items() if held.until_s <= now_s}
        for key, held in gone.items():
            self._forget(key)
            if not held.keys:
                self.accepted -= ACCEPTING * self.accepted
        next_s = min((held.until_s for held in self._held.values()), default=inf)
        self.ends_s = max(next_s, now_s + SPACING_S) if self._held else inf
        return [key for held in gone.values() for key in held.keys]

    def _forget(self, key: int) -> None:
        held = self._held.pop(key)
        self._offered_tokens -= 0.0 if held.keys else held.prompt_tokens
        self._held_of[held.tenant] -= 1
        if not self._held_of[held.tenant]:
            del self._held_of[held.tenant]

    def offered_tokens(self) -> float:
        """Prompt tokens of the offers that are expected to be taken up."""
        return self.accepted * self._offered_tokens

    def was_accepted(self, promised: bool) -> None:
        """An offer was taken up in time, and was promised or not: a test that moves the logarithm
        of the margin, so that in the long run a share ``LEVELS[-1]`` is."""
        self.accepted += ACCEPTING * (1.0 - self.accepted)
        margin = self.margin * exp(MARGIN_GAIN * (LEVELS[-1] - promised))
        self.margin = min(max(margin, MIN_MARGIN), MAX_MARGIN)


def _times(made: Prediction) -> tuple[float, float, float]:
    e2e_s = made.ttft_s + max(0.0, made.tokens - 1.0) * made.tpot_s
    return max(made.ttft_s, _MIN_S), max(made.tpot_s, _MIN_S), max(e2e_s, _MIN_S)


def _kinds(made: Prediction) -> tuple[Hashable, ...]:
    """Of each objective, which requests are alike."""
    tier, bound, ttft = made.promised, _size(made.bound_s), _size(made.ttft_s)
    own = (bound, ttft), (bound, ttft), (made.service_class, ttft)
    return tuple([(name, tier, *each) for name, each in zip(OBJECTIVES, own, strict=True)])


def _size(seconds: float) -> int:
    return round(log2(max(seconds, _MIN_S)) / 2) if seconds < inf else 99
