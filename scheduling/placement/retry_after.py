"""Retry times of refused requests, and the capacity reserved for their retries.

Requests refused at one moment would all get the same time and collide again. So each tenant has a
*retry queue*, and the next refused request gets a later time, by the tokens in the queue and the
tenant's rate of promised tokens. New requests of the tenant leave capacity for retries at their
time: a reservation with backfilling (Lifka, *The ANL/IBM SP scheduling system*, JSSPP 1995).

A reservation that expires unused lowers the weight of the whole queue, so clients that never retry
are soon forgotten. Each retry at its time is a test that moves the logarithm of a factor on all
times of the queue: up by a share ``LEVEL`` of a gain if it was refused, down by the rest if it was
promised. So in the long run a share ``LEVEL`` of the retries is promised, within bounds of the
factor and ``HORIZON_S`` (adaptive conformal inference, Gibbs & Candès 2021, eq. 2).

A test comes late, as the queue got its times by earlier factors; full steps would make the factor
swing. So all tests of a queue together move it by ``GAIN``, or less with few requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from math import ceil, exp
from typing import Final, NamedTuple

from sluice.scheduling.admission.room import MIN_WAIT_S
from sluice.scheduling.recent import used
from sluice.scheduling.request.job import RouteQuery

LEVEL: Final = 0.9
"""Target share of retries at their time that are promised: above the wanted four fifths, as the
result of a retry is learned only after it."""

HORIZON_S: Final = 600.0
"""Latest retry time, seconds from now. Later retries all get this time."""

GRACE_S: Final = 1.5
"""How long after its time a reservation is kept: the header has whole seconds, rounded up."""

AHEAD_S: Final = 1.0
"""New requests leave capacity for retries whose time comes within this time, seconds."""

GAIN: Final = 1.0
"""How far all tests of a queue together move the logarithm of the factor."""

MAX_STEP: Final = 0.1
"""How far one test moves it at most."""

MIN_FACTOR, MAX_FACTOR = 0.1, 64.0
"""Bounds of the factor."""

MEMORY_S: Final = 10.0
"""Time constant of a tenant's rate of promised tokens, seconds: it forgets ``1 - 1/e`` in it."""

OFFERED: Final = 0.1
"""Part of a tenant's promised tokens that offers may take of what is expected to come."""

SHOWING: Final = 0.05
"""How far one reservation moves the share of reservations that are used. The share starts at a
half."""

MAX_TENANTS: Final = 4_096
"""Maximum number of retry queues; beyond it, the least recently used one is dropped."""

MAX_PLACES: Final = 8_192
"""Maximum reservations of one retry queue. Beyond it, a request gets a time but no reservation: if
the oldest were dropped instead, it could not be learned whether they are used."""

_SLOT_S: Final = 0.25
_MAX_SLOTS: Final = ceil((HORIZON_S + GRACE_S) / _SLOT_S) + 2
_MAX_GAP_S: Final = 1.0


class _Place(NamedTuple):
    """The reservation of a refused request: its retry time, its prompt tokens, and its tokens with
    the expected output."""

    due_s: float
    prompt_tokens: float
    tokens: float


class _Slot:
    """The reservations of a quarter of a second: names and prompt tokens."""

    __slots__ = ("names", "prompt_tokens")

    def __init__(self) -> None:
        self.names: set[Hashable] = set()
        self.prompt_tokens = 0.0


class Line:
    """The retry queue of one tenant: refused requests with a retry time, monotonic seconds.

    ``O((AHEAD_S + GRACE_S) / _SLOT_S)`` per query, amortised ``O(1)`` per change; after silence all
    slots up to the horizon are checked once. ``factor`` is on all times of the queue; ``showing``
    is the share of the reservations that are used."""

    def __init__(self, now_s: float) -> None:
        self.factor = 1.0
        self.showing = 0.5
        self.places: dict[Hashable, _Place] = {}
        """The reservations by name."""
        self._slots: dict[int, _Slot] = {}
        self._first = int(now_s / _SLOT_S)
        # Tokens of all reservations.
        self._waiting = 0.0
        self._counted_s = now_s
        # Tokens guaranteed recently, and the time that they cover; silence counts little.
        self._promised = self._busy_s = 0.0
        # Of these tokens, those of requests that took up an offer.
        self._offered = 0.0

    def kept_tokens(self, name: Hashable, now_s: float) -> float:
        """Prompt tokens for which a new request must leave capacity: the expected tokens of near
        reservations. 0 for a request with a reservation."""
        if not self.places or self._find(name, now_s) is not None:
            return 0.0
        last = int((now_s + AHEAD_S) / _SLOT_S)
        slots = (self._slots.get(slot) for slot in range(self._first, last + 1))
        return sum(slot.prompt_tokens for slot in slots if slot is not None) * self.showing

    def may_offer(self) -> bool:
        """Whether further requests may take up offers, which takes capacity of expected ones."""
        return self._offered <= OFFERED * self._promised

    def took_offer(self, tokens: float) -> None:
        """Record that the request of ``tokens`` that was promised last had taken up an offer."""
        self._offered += tokens

    def promised(self, name: Hashable, tokens: float, now_s: float) -> bool:
        """Record that a request of ``tokens`` was promised; return whether it had a
        reservation."""
        place = self._find(name, now_s) if self.places else None
        passed_s = min(now_s - self._counted_s, _MAX_GAP_S)
        left = exp(-passed_s / MEMORY_S)
        self._promised = self._promised * left + tokens
        self._offered = self._offered * left
        self._busy_s = self._busy_s * left + passed_s
        self._counted_s = now_s
        if place is not None:
            self._came(name, held=True)
        return place is not None

    def refused(
        self, name: Hashable, prompt_tokens: float, tokens: float, wait_s: float, now_s: float
    ) -> tuple[float, bool]:
        """Record a refused request, for which there would be capacity after ``wait_s`` without
        arrivals. Returns the time until its retry, and whether this was a retry at its time; an
        earlier one keeps its time."""
        place = self._find(name, now_s)
        if place is not None:
            if place.due_s > now_s + MIN_WAIT_S:
                return place.due_s - now_s, False
            self._came(name, held=False)
        rate = self._promised / max(self._busy_s, _MAX_GAP_S)
        ahead_s = self.showing * self._waiting / rate if rate > 0.0 else 0.0
        after_s = max(self.factor * max(wait_s, ahead_s), MIN_WAIT_S)
        due_s = now_s + min(after_s, HORIZON_S)
        if len(self.places) < MAX_PLACES:
            self._join(name, _Place(due_s, prompt_tokens, tokens))
        return due_s - now_s, place is not None

    def _find(self, name: Hashable, now_s: float) -> _Place | None:
        """The reservation of a request, after unused ones have expired."""
        since_s = now_s - GRACE_S
        first = int(since_s / _SLOT_S)
        # No retry time is beyond the horizon, so no slot is later than the last of these.
        for gone in range(self._first, min(first, self._first + _MAX_SLOTS)):
            slot = self._slots.get(gone)
            for each in tuple(slot.names) if slot is not None else ():
                self._missed(each)
        self._first = max(self._first, first)
        place = self.places.get(name)
        if place is not None and place.due_s < since_s:
            self._missed(name)
            return None
        return place

    def _missed(self, name: Hashable) -> None:
        self._leave(name)
        self.showing -= SHOWING * self.showing

    def _came(self, name: Hashable, held: bool) -> None:
        self._leave(name)
        self.showing += SHOWING * (1.0 - self.showing)
        step = min(MAX_STEP, GAIN / max(1, len(self.places)))
        factor = self.factor * exp(step * (LEVEL - held))
        self.factor = min(max(factor, MIN_FACTOR), MAX_FACTOR)

    def _join(self, name: Hashable, place: _Place) -> None:
        self.places[name] = place
        self._waiting += place.tokens
        slot = self._slots.setdefault(int(place.due_s / _SLOT_S), _Slot())
        slot.names.add(name)
        slot.prompt_tokens += place.prompt_tokens

    def _leave(self, name: Hashable) -> None:
        place = self.places.pop(name)
        self._waiting -= place.tokens
        number = int(place.due_s / _SLOT_S)
        slot = self._slots[number]
        slot.names.remove(name)
        slot.prompt_tokens -= place.prompt_tokens
        if not slot.names:
            del self._slots[number]


class RetryAfter:
    """The retry queues of all tenants. ``held`` and ``missed`` count retries at their time that
    were promised and refused."""

    def __init__(self) -> None:
        self.held = 0
        self.missed = 0
        self._lines: OrderedDict[int, Line] = OrderedDict()

    def kept_tokens(self, query: RouteQuery, now_s: float) -> float:
        """Prompt tokens for which ``query`` must leave capacity; see :meth:`Line.kept_tokens`."""
        line = self._lines.get(query.tenant)
        if line is None or not line.places:
            return 0.0
        return line.kept_tokens(name_of(query), now_s)

    def promised(self, query: RouteQuery, output_tokens: float, now_s: float) -> None:
        """Record that ``query`` is promised, with its expected output length."""
        line = used(self._lines, query.tenant, partial(Line, now_s), MAX_TENANTS)
        name = name_of(query) if line.places else None
        self.held += line.promised(name, query.prompt_tokens + output_tokens, now_s)

    def took_offer(self, query: RouteQuery, output_tokens: float) -> None:
        """Record that ``query``, which was promised last, had taken up an offer."""
        line = self._lines.get(query.tenant)
        if line is not None:
            line.took_offer(query.prompt_tokens + output_tokens)

    def may_offer(self, query: RouteQuery) -> bool:
        """Whether an offer to ``query`` need not leave capacity for requests that are expected."""
        line = self._lines.get(query.tenant)
        return line is None or line.may_offer()

    def refused(
        self, query: RouteQuery, output_tokens: float, wait_s: float, now_s: float
    ) -> float:
        """Time until a refused request should retry, seconds, at least ``MIN_WAIT_S``. ``wait_s``
        is the predicted time until there is capacity without new arrivals."""
        line = used(self._lines, query.tenant, partial(Line, now_s), MAX_TENANTS)
        prompt = float(query.prompt_tokens)
        retry_s, came = line.refused(name_of(query), prompt, prompt + output_tokens, wait_s, now_s)
        self.missed += came
        return retry_s


def name_of(query: RouteQuery) -> Hashable:
    """The identity of a request across retries, which have other keys: the client's own id, or else
    its prompt prefix, or its length if too short for a hash. Equal ones count as one."""
    known = query.client_request_id or tuple(query.prefix) or query.prompt_tokens
    return known, query.session, query.output_tokens, query.slo.service_class
