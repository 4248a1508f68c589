"""When refused requests should retry, and the capacity that is kept for their retries.

What admission predicts is when there would be room if no other request came. But others come, and
all that are refused in one moment would get about the same time, and meet again. So each tenant's
refused requests stand in a *line*. The next one gets a later time, by the tokens of those in the
line and what the tenant is promised a second. A retry after that time finds room, as the tenant's
newcomers must leave it. That is a reservation with backfilling (Lifka, *The ANL/IBM SP scheduling
system*, JSSPP 1995): a newcomer may pass where it delays no retry whose time is near.

How long the line must be, and how many requests retry, is unknown. Both are learned from those that
do. A place not claimed makes the whole line count for less, so a burst of clients that never
retry is forgotten soon after its first times. And each retry at its time is a test. It moves a
factor on all times of the line, in its logarithm: up by a share :data:`LEVEL` of a gain where
nothing was promised, down by the rest of it where something was. So in the long run a share
``LEVEL`` of them is promised, as long as neither bound of the factor and not :data:`HORIZON_S` is
in the way (adaptive conformal inference, Gibbs & Candès 2021, eq. 2, with the logarithm of a factor
in place of the level of a quantile).

A test comes late: the times of those in the line follow from the factor of when they joined. Were
each of them to move it as far as a single one may, it would keep moving for as long as the line is,
and swing between times far too short and far too long. So all of a line together move it by
:data:`GAIN`, or less where there are few.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from math import ceil, exp
from typing import Final, NamedTuple

from scheduling.admission.room import LEAST_WAIT_S
from scheduling.job import RouteQuery
from scheduling.recent import used

LEVEL: Final = 0.9
"""Share of retries at the stated time that are to be promised: above the four fifths that we
want, as what is learned of a moment comes only after it."""

HORIZON_S: Final = 600.0
"""The latest time for a retry, seconds from now. Beyond it the line distinguishes no times."""

GRACE_S: Final = 1.5
"""So long after its moment a place is kept: the header has whole seconds, rounded up."""

AHEAD_S: Final = 1.0
"""Newcomers leave room for those whose moment comes within this time, seconds."""

GAIN: Final = 1.0
"""How far all tests of a line together move the logarithm of the factor."""

MOST_STEP: Final = 0.1
"""How far one of them moves it at the most."""

LEAST_FACTOR, MOST_FACTOR = 0.1, 64.0
"""Between which the factor moves."""

MEMORY_S: Final = 10.0
"""In this time the rate of what a tenant is promised forgets ``1 - 1/e``, seconds."""

SHOWING: Final = 0.05
"""How far one place moves the share of the places that are claimed. It begins at a half."""

MOST_TENANTS: Final = 4_096
"""Lines at a time; of more, the one that was refused in longest ago is forgotten."""

MOST_PLACES: Final = 8_192
"""Places of one line. Beyond them a request gets a time, and nothing is kept for it: were the
oldest forgotten instead, the line would not learn whether they come."""

_SLOT_S: Final = 0.25
_MOST_SLOTS: Final = ceil((HORIZON_S + GRACE_S) / _SLOT_S) + 2
_MOST_GAP_S: Final = 1.0


class _Place(NamedTuple):
    """Of a refused request: when it should come, and its tokens, those of its prompt and with those
    of its expected output."""

    due_s: float
    prompt_tokens: float
    tokens: float


class _Slot:
    """The places of a quarter of a second: whose, and their prompt tokens."""

    __slots__ = ("names", "prompt_tokens")

    def __init__(self) -> None:
        self.names: set[Hashable] = set()
        self.prompt_tokens = 0.0


class Line:
    """The refused requests of one tenant that have a time to retry.

    ``O((AHEAD_S + GRACE_S) / _SLOT_S)`` a question, ``O(1)`` a change, and amortised ``O(1)`` for
    each place that is not claimed; after silence all slots up to the horizon are looked at once.

    Args:
        now_s: the time, as everywhere here monotonic seconds of the caller's clock.

    Attributes:
        factor: on all times of the line.
        showing: share of the places that are claimed.
    """

    def __init__(self, now_s: float) -> None:
        self.factor = 1.0
        self.showing = 0.5
        self._places: dict[Hashable, _Place] = {}
        self._slots: dict[int, _Slot] = {}
        self._first = int(now_s / _SLOT_S)
        # Tokens of all places.
        self._waiting = 0.0
        self._counted_s = now_s
        # Tokens promised of late, and the time for which that is; silence counts little.
        self._promised = self._busy_s = 0.0

    def __len__(self) -> int:
        """Places that are kept."""
        return len(self._places)

    def kept_tokens(self, name: Hashable, now_s: float) -> float:
        """Prompt tokens for which a newcomer must leave room: those expected of the places that are
        near. Who has a place, as one that waits at the edge and asks early, leaves none."""
        if self._find(name, now_s) is not None:
            return 0.0
        last = int((now_s + AHEAD_S) / _SLOT_S)
        slots = (self._slots.get(slot) for slot in range(self._first, last + 1))
        return sum(slot.prompt_tokens for slot in slots if slot is not None) * self.showing

    def promised(self, name: Hashable, tokens: float, now_s: float) -> bool:
        """A request of ``tokens`` was promised; whether it had a place."""
        place = self._find(name, now_s)
        passed_s = min(now_s - self._counted_s, _MOST_GAP_S)
        left = exp(-passed_s / MEMORY_S)
        self._promised = self._promised * left + tokens
        self._busy_s = self._busy_s * left + passed_s
        self._counted_s = now_s
        if place is not None:
            self._came(name, held=True)
        return place is not None

    def refused(
        self, name: Hashable, prompt_tokens: float, tokens: float, wait_s: float, now_s: float
    ) -> tuple[float, bool]:
        """A request was refused, for which there would be room after ``wait_s`` if no other came.

        Returns:
            After how long it should retry, and whether it came now at its stated time. A request
            that asks earlier gets the same time again.
        """
        place = self._find(name, now_s)
        if place is not None:
            if place.due_s > now_s + LEAST_WAIT_S:
                return place.due_s - now_s, False
            self._came(name, held=False)
        rate = self._promised / max(self._busy_s, _MOST_GAP_S)
        ahead_s = self.showing * self._waiting / rate if rate > 0.0 else 0.0
        after_s = max(self.factor * max(wait_s, ahead_s), LEAST_WAIT_S)
        due_s = now_s + min(after_s, HORIZON_S)
        if len(self._places) < MOST_PLACES:
            self._join(name, _Place(due_s, prompt_tokens, tokens))
        return due_s - now_s, place is not None

    def _find(self, name: Hashable, now_s: float) -> _Place | None:
        """The place of a request, once those that were not claimed in time are gone."""
        since_s = now_s - GRACE_S
        first = int(since_s / _SLOT_S)
        # No request was given more than the horizon, so no slot is later than the last of these.
        for gone in range(self._first, min(first, self._first + _MOST_SLOTS)):
            slot = self._slots.get(gone)
            for each in tuple(slot.names) if slot is not None else ():
                self._missed(each)
        self._first = max(self._first, first)
        place = self._places.get(name)
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
        step = min(MOST_STEP, GAIN / max(1, len(self._places)))
        factor = self.factor * exp(step * (LEVEL - held))
        self.factor = min(max(factor, LEAST_FACTOR), MOST_FACTOR)

    def _join(self, name: Hashable, place: _Place) -> None:
        self._places[name] = place
        self._waiting += place.tokens
        slot = self._slots.setdefault(int(place.due_s / _SLOT_S), _Slot())
        slot.names.add(name)
        slot.prompt_tokens += place.prompt_tokens

    def _leave(self, name: Hashable) -> None:
        place = self._places.pop(name)
        self._waiting -= place.tokens
        number = int(place.due_s / _SLOT_S)
        slot = self._slots[number]
        slot.names.remove(name)
        slot.prompt_tokens -= place.prompt_tokens
        if not slot.names:
            del self._slots[number]


class RetryAfter:
    """The lines of all tenants.

    Attributes:
        held, missed: retries at their stated time that were promised or refused.
    """

    def __init__(self) -> None:
        self.held = 0
        self.missed = 0
        self._lines: OrderedDict[int, Line] = OrderedDict()

    def kept_tokens(self, query: RouteQuery, now_s: float) -> float:
        """Prompt tokens for which ``query`` must leave room; see :meth:`Line.kept_tokens`."""
        line = self._lines.get(query.tenant)
        return 0.0 if line is None else line.kept_tokens(name_of(query), now_s)

    def promised(self, query: RouteQuery, output_tokens: float, now_s: float) -> None:
        """A request is promised its objective; its output is expected to be so long."""
        tokens = query.prompt_tokens + output_tokens
        self.held += self._line(query.tenant, now_s).promised(name_of(query), tokens, now_s)

    def refused(
        self, query: RouteQuery, output_tokens: float, wait_s: float, now_s: float
    ) -> float:
        """After how long a refused request should retry, at least ``LEAST_WAIT_S``.

        Args:
            query: the request. output_tokens: expected length of its output.
            wait_s: predicted time until there is room for it, if no other request comes.
            now_s: the time.
        """
        line, prompt = self._line(query.tenant, now_s), float(query.prompt_tokens)
        told_s, came = line.refused(name_of(query), prompt, prompt + output_tokens, wait_s, now_s)
        self.missed += came
        return told_s

    def _line(self, tenant: int, now_s: float) -> Line:
        return used(self._lines, tenant, partial(Line, now_s), MOST_TENANTS)


def name_of(query: RouteQuery) -> Hashable:
    """What a request is known by when it retries, under another key: the client's own id of it,
    or else how its prompt begins; of one too short to have that hashed, its length. Requests that
    are alike in all of this count as one."""
    known = query.client_request_id or tuple(query.prefix) or query.prompt_tokens
    return known, query.session, query.output_tokens, query.slo.service_class
