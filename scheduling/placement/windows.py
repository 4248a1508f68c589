"""Batches of requests with a common deadline, on the engine time that promised requests leave.

By earliest deadline first all are in time if for each deadline the work due by then is no more than
the time that is left until then (the demand test of Liu & Layland's optimal policy, for a supply
that is known as a lower bound; Shin & Lee 2003 call it supply bound function)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from sluice.scheduling.autoscaling.load import Load, Pressure
from sluice.scheduling.batching.base import BRIEF_STEPS
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import FIXED_S
from sluice.scheduling.request.kernels import most_work_s

SLOT_S: Final = 10.0
SLOTS: Final = 8_640
"""Of a day: as much is remembered."""

SPANS_S: Final = (0.0, *(SLOT_S * 2.0**power for power in range(19)))
"""Up to 30 days and more, seconds."""

MAX_ROWS: Final = 16
"""Replicas by which the time of a line is taken."""

Spare = tuple[float, ...]
"""Engine time left within each of :data:`SPANS_S`, seconds."""


class SpareTime:
    """How much time of the engines promised requests left, by slots of the last day."""

    def __init__(self, level: float) -> None:
        self._level = level
        self._left: deque[float] = deque(maxlen=SLOTS)
        self._loads: list[Load] = []
        self._known: Spare | None = None

    @property
    def due_s(self) -> float:
        """When the next load is to be noted: about once a second."""
        return self._loads[-1].now_s + 1.0 if self._loads else -inf

    def note(self, load: Load) -> None:
        """Note a load; without replicas nothing is left. Before the first one nothing is noted.
        ``O(1)``."""
        if not load.ready and not self._left:
            self._loads = []
            return
        self._loads.append(load)
        slots = int((load.now_s - self._loads[0].now_s) / SLOT_S)
        if slots:
            ready = min(each.ready for each in self._loads)
            left = max(0.0, ready - Pressure.of(self._loads).demand)
            self._left.extend([left * SLOT_S] * min(slots, SLOTS))
            self._loads, self._known = [load], None

    def within(self) -> Spare | None:
        """The time that a share ``level`` of the spans of each length left at least; of spans over
        half of what is known, by the rate of the longest known ones. ``None``: nothing is known
        yet. ``O(slots)``, once a slot."""
        if self._known is None and self._left:
            upto = np.cumsum([0.0, *self._left])
            found = [0.0]
            for span_s in SPANS_S[1:]:
                slots = max(1, min(round(span_s / SLOT_S), len(self._left) // 2))
                sums = upto[slots:] - upto[:-slots] if len(upto) > slots else np.zeros(1)
                rate = float(np.quantile(sums, 1.0 - self._level)) / (slots * SLOT_S)
                found.append(max(found[-1], rate * span_s))
            self._known = tuple(found)
        return self._known


class Leftover(NamedTuple):
    """What is left for batches: ``line_s`` of the engine's time is taken by a request like the one
    that was asked for, ``spare`` is left."""

    line_s: float
    spare: Spare

    @classmethod
    def of(cls, parts: Sequence[Leftover]) -> Leftover | None:
        """That of replicas together that are known by parts."""
        if not parts:
            return None
        spare = np.sum([each.spare for each in parts], axis=0)
        return cls(max(each.line_s for each in parts), tuple(spare.tolist()))


def line_s(
    fleet: Fleet, now_s: float, prompt_tokens: float, output_tokens: float, in_flight: int
) -> float:
    """Engine time of a request that shares its steps with others of ``in_flight``, and uses no more
    of a step than work of little worth may: see ``BRIEF_STEPS``. The mean of some of the replicas;
    infinite without any."""
    rows = fleet.capacity(now_s)
    if not len(rows):
        return inf
    extra = 1.0 + 1.0 / (BRIEF_STEPS - 1)
    together = max(1.0, in_flight / len(rows))
    found = []
    for row in rows[:: len(rows) // MAX_ROWS + 1]:
        pieces, fixed_s = fleet.pieces[row], fleet.figures[row, FIXED_S]
        token_s = most_work_s(pieces, 1.0, prompt_tokens + output_tokens / 2)
        prompt_s = most_work_s(pieces, max(1.0, prompt_tokens), 0.0)
        step_s = max(extra * token_s, token_s + fixed_s / together)
        found.append(extra * prompt_s + output_tokens * step_s)
    return float(np.mean(found))


class Promised(NamedTuple):
    """The rest of a promised batch: seconds until it is due, and of its work."""

    due_in_s: float
    work_s: float


def nearest_window_s(promised: Sequence[Promised], work_s: float, spare: Spare) -> float:
    """The nearest time in which a new batch of ``work_s`` can be done so that all ``promised`` ones
    still can be; infinite if there is none. ``O(n log n)``."""
    order = sorted(promised)
    # The work before the new batch changes at each deadline. It must come after the last one by
    # which no more work can be done.
    gaps = [0.0, *(due_in_s for due_in_s, _ in order), inf]
    sums = np.cumsum([0.0, *(own_s for _, own_s in order)]).tolist()
    earliest = 0
    for number in range(len(order)):
        if sums[number + 1] + work_s > _left(spare, gaps[number + 1]):
            earliest = number + 1
    for number in range(earliest, len(sums)):
        at_s = max(gaps[number], _until(spare, sums[number] + work_s))
        if at_s <= gaps[number + 1]:
            return at_s
    return inf


def behind_until_s(promised: Sequence[Promised], spare: Spare) -> float:
    """The last deadline of a batch that is not in time by what is left; ``-inf`` if all are."""
    before_s, last_s = 0.0, -inf
    for due_in_s, own_s in sorted(promised):
        before_s += own_s
        if own_s > 0.0 and before_s > _left(spare, due_in_s):
            last_s = due_in_s
    return last_s


def _left(spare: Spare, span_s: float) -> float:
    if span_s == inf:
        return inf
    return float(np.interp(span_s, SPANS_S, spare))


def _until(spare: Spare, work_s: float) -> float:
    """When so much time has been left."""
    place = int(np.searchsorted(spare, work_s))
    if place == 0:
        return 0.0
    if place == len(spare):
        return inf
    (low_s, high_s), (low, high) = SPANS_S[place - 1 : place + 1], spare[place - 1 : place + 1]
    return low_s + (high_s - low_s) * (work_s - low) / (high - low)
