"""How far what was promised turns out later than planned, and the margin that keeps the promises.

What is promised is planned for a little earlier than it is due: by a *margin*, a share of the
objective. The plan is what admission tests and what the engine works by; the objective itself is
what the client sees. The margin covers whatever lies between the two: HTTP, the edge, steps that
take longer than predicted, neighbours. Nobody states it. It is learned from what routers observed.

Of each promise that ended the *score* is ``1 - planned / observed``: how large a share of the
observed time the margin would have had to be. A promise is kept if and only if its score is at most
the margin that it was made with. So the margin that keeps a share ``level`` of the promises is that
quantile of the scores (conformal prediction). As loads and machines change, the scores of the past
are not those to come; so the quantile's own level moves, too, with each promise that was kept or
missed (adaptive conformal inference, Gibbs & Candès 2021, eq. 2: ``a <- a + g * (a* - missed)``),
which keeps the level in the long run whatever the scores do.

Our reading: an engine that works by deadlines uses the time that it has, so scores crowd at the
plan under load and lie far below it without. Only the former matter to the quantile, and a margin
that was learned under load stays until :data:`MEMORY` newer promises, or :data:`MEMORY_S`, have
gone by.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import replace
from math import ceil, inf, log2
from typing import Final, Literal, NamedTuple

from scheduling.objective import SLO

Objective = Literal["ttft", "tpot", "e2e"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("ttft", "tpot", "e2e")

MEMORY: Final = 400
"""Scores that count: at a level of 0.99 the quantile lies at the fourth of them, so no single one
moves it far."""

MEMORY_S: Final = 300.0
"""So long a score counts, seconds."""

MOST_MARGIN: Final = 0.5
"""Largest margin: beyond it less would be promised than is lost."""

GAIN: Final = 0.002
"""Of adaptive conformal inference: how far one promise moves the level."""

_LEAST_MISSES, _MOST_MISSES = 0.001, 0.1
"""Between which the share of misses that the quantile is taken for moves."""

_UNSEEN: Final = -inf
"""The score of a promise that there has not been yet: before there are many, a few late ones are
outliers and not the tail."""

MOST_TRACKERS: Final = 4_096
"""Margins that are learned at a time; the one that was used longest ago goes first."""

MOST_PROMISES: Final = 65_536
"""Promises under way that are known at a time; of more, the oldest teach nothing."""

_FIRST_SCALE_S = 0.125
_LEAST_PAUSE_S = 1.0


class _Promise(NamedTuple):
    stated: SLO
    planned: SLO


class Tracker:
    """The margin of one kind of promises. ``O(MEMORY log MEMORY)`` an ending, ``O(1)`` a margin.

    Args:
        level: share of the promises that are to be kept, in (0, 1).
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._misses = 1.0 - level
        self._scores: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self._margin = 0.0
        self._measured_s = -inf

    def ended(self, score: float, kept: bool, now_s: float) -> None:
        """A promise ended with this score, and whether it was kept."""
        wanted = 1.0 - self._level
        misses = self._misses + GAIN * (wanted - (0.0 if kept else 1.0))
        self._misses = min(max(misses, min(_LEAST_MISSES, wanted)), max(_MOST_MISSES, wanted))
        self._scores.append((now_s, score))
        self._measure(now_s)

    def margin(self, now_s: float) -> float:
        """Share of an objective by which it is planned earlier."""
        # Where so little can be promised that no score comes any more, this opens the door again.
        # Not with every decision, as one costs less than a quantile.
        if self._scores and now_s >= self._measured_s + _LEAST_PAUSE_S:
            self._measure(now_s)
        return self._margin

    def _measure(self, now_s: float) -> None:
        self._measured_s, scores = now_s, self._scores
        while scores and scores[0][0] < now_s - MEMORY_S:
            scores.popleft()
        # The place from above that the quantile has among MEMORY scores, the unseen ones lowest.
        place = max(0, MEMORY - ceil((MEMORY + 1) * (1.0 - self._misses)))
        found = _UNSEEN
        if place < len(scores):
            found = sorted((score for _, score in scores), reverse=True)[place]
        self._margin = min(max(found, 0.0), MOST_MARGIN)


class Calibration:
    """The margins of all promises of a fleet, by objective and by how long it is.

    A margin is a share, and what a share covers depends on the whole: 20 ms of HTTP are much of
    half a second, and little of eight. So objectives of about the same length have a margin of
    their own, in steps of two.

    Args:
        level: share of the promises that are to be kept, in (0, 1).

    Raises:
        ValueError: ``level`` is not in (0, 1).
    """

    def __init__(self, level: float) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"the promise level must be between 0 and 1, got {level}")
        self._level = level
        self._trackers: OrderedDict[tuple[Objective, int], Tracker] = OrderedDict()
        self._promises: OrderedDict[Hashable, _Promise] = OrderedDict()

    def margin(self, objective: Objective, stated_s: float, now_s: float) -> float:
        """The share of an objective of ``stated_s`` seconds by which it is planned earlier."""
        tracker = self._trackers.get(_kind(objective, stated_s))
        return 0.0 if tracker is None else tracker.margin(now_s)

    def largest(self, now_s: float) -> dict[Objective, float]:
        """The largest margin of each objective now. ``O(margins)``."""
        found: dict[Objective, float] = dict.fromkeys(OBJECTIVES, 0.0)
        for (objective, _), tracker in self._trackers.items():
            found[objective] = max(found[objective], tracker.margin(now_s))
        return found

    def plan(self, slo: SLO, now_s: float) -> SLO:
        """By when what ``slo`` states is to be planned so that it can be promised. ``O(1)``."""
        margins = [
            0.0 if stated_s is None else self.margin(objective, stated_s, now_s)
            for objective, stated_s in _objectives(slo)
        ]
        if not any(margins):
            return slo
        planned = [
            None if stated_s is None else stated_s * (1.0 - margin)
            for (_, stated_s), margin in zip(_objectives(slo), margins, strict=True)
        ]
        return replace(slo, ttft_s=planned[0], tpot_s=planned[1], e2e_s=planned[2])

    def promised(self, key: Hashable, stated: SLO, planned: SLO) -> None:
        """A request was promised ``stated``, and is planned for ``planned``. A later promise to the
        same one takes the place of the first."""
        self._promises[key] = _Promise(stated, planned)
        self._promises.move_to_end(key)
        if len(self._promises) > MOST_PROMISES:
            self._promises.popitem(last=False)

    def dropped(self, key: Hashable) -> None:
        """What was promised to a request is no longer of interest."""
        self._promises.pop(key, None)

    def ended(
        self,
        key: Hashable,
        ttft_s: float | None,
        tpot_s: float | None,
        e2e_s: float | None,
        now_s: float,
    ) -> None:
        """A request ended, as its client saw it, seconds; ``None`` where that is not known. Nothing
        is learned from one that was promised nothing."""
        promise = self._promises.pop(key, None)
        if promise is None:
            return
        pairs = zip(_objectives(promise.stated), _objectives(promise.planned), strict=True)
        for ((objective, stated_s), (_, planned_s)), observed_s in zip(
            pairs, (ttft_s, tpot_s, e2e_s), strict=True
        ):
            if stated_s is not None and planned_s is not None and observed_s is not None:
                self.observe(objective, stated_s, planned_s, observed_s, now_s)

    def observe(
        self,
        objective: Objective,
        stated_s: float,
        planned_s: float,
        observed_s: float,
        now_s: float,
    ) -> None:
        """What was promised within ``stated_s``, and planned for ``planned_s``, took
        ``observed_s``, seconds."""
        kind = _kind(objective, stated_s)
        tracker = self._trackers.get(kind)
        if tracker is None:
            tracker = self._trackers[kind] = Tracker(self._level)
            if len(self._trackers) > MOST_TRACKERS:
                self._trackers.popitem(last=False)
        else:
            self._trackers.move_to_end(kind)
        score = 1.0 - planned_s / observed_s if observed_s > 0.0 else -inf
        tracker.ended(score, observed_s <= stated_s, now_s)


def _objectives(slo: SLO) -> tuple[tuple[Objective, float | None], ...]:
    return ("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)


def _kind(objective: Objective, stated_s: float) -> tuple[Objective, int]:
    return objective, round(log2(stated_s / _FIRST_SCALE_S))
