"""The margins of guarantees, by objective and how long it is; see
:mod:`sluice.scheduling.placement.calibration`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from functools import partial
from math import ceil, inf, log2
from typing import Final, NamedTuple

from sluice.scheduling.recent import used
from sluice.scheduling.request.objective import OBJECTIVES, Objective
from sluice.scheduling.request.tpot import TPOTAnchor

MEMORY: Final = 400
"""Scores that count: at a level of 0.99 the quantile lies at the fourth of them, so no single one
moves it far."""

MEMORY_S: Final = 60.0
"""How long a score counts, seconds."""

MOST_MARGIN: Final = 0.5
"""Largest margin: with 0.9, a short overload had fleets guarantee half as much for a minute
after."""

LEAST_RAISE: Final = 0.04
"""A guarantee that is late asks for no more than twice the margin that it was made with, or this
much more: what is late is served behind what can still be in time, so how late it becomes says
little of how much earlier it would have had to be planned."""

GAIN: Final = 0.002
"""Of adaptive conformal inference: how far one guarantee moves the level."""

_LEAST_MISSES, _MOST_MISSES = 0.001, 0.1
"""Between which the share of misses that the quantile is taken for moves."""

PRIOR: Final = 0.04
"""The score of :data:`PRIOR_SHARE` of the guarantees that there have not been yet: real engines
were seen 0 to 4 % behind the plan that they worked by. The others are taken for early ones: before
there are many, a few late ones are outliers and not the tail."""

PRIOR_SHARE: Final = 0.02
"""Twice the misses that a level of 0.99 allows, so that a margin there begins at :data:`PRIOR` and
follows what is observed once half of :data:`MEMORY` is known."""

MOST_TRACKERS: Final = 4_096
"""Margins that are learned at a time; the one that was used longest ago goes first."""

APART: Final = 0.01
"""A score above the margin that the others need by more than this stands out."""

LEAST_OUT: Final = 4
"""A replica is set apart from the others only with at least this many scores that stand out."""

OUT_RATIO: Final = 4.0
"""And only if their share of its scores is at least this many times the allowed share of misses: of
50 scores 4, which at a level of 0.99 happens by chance once in 600 times."""

LEAST_OTHERS: Final = 20
"""And only in comparison with at least this many scores of other replicas."""

_FIRST_SCALE_S = 0.125
_LEAST_PAUSE_S = 1.0


_Kind = tuple[Objective, int, TPOTAnchor | None]


class _Score(NamedTuple):
    at_s: float
    score: float
    replica_id: str


class Tracker:
    """The margin of one kind of guarantees. ``O(MEMORY log MEMORY)`` an ending, ``O(1)`` a margin.

    Args:
        level: share of the guarantees that are to be kept, in (0, 1).
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._misses = 1.0 - level
        self._scores: deque[_Score] = deque(maxlen=MEMORY)
        self._behind: dict[Hashable, _Score] = {}
        self._margin = 0.0
        self._measure(-inf)

    def behind(self, key: Hashable, score: float, replica_id: str, now_s: float) -> None:
        """Record the current score of the guarantee ``key``, whose request still runs."""
        self._behind[key] = _Score(now_s, score, replica_id)
        self._measure(now_s)

    def left(self, key: Hashable) -> None:
        """Forget the running score of the guarantee ``key``."""
        self._behind.pop(key, None)

    def ended(self, score: float, kept: bool, replica_id: str, now_s: float) -> None:
        """Record the final score of a guarantee, and whether it was met (``kept``)."""
        wanted = 1.0 - self._level
        misses = self._misses + GAIN * (wanted - (0.0 if kept else 1.0))
        self._misses = min(max(misses, min(_LEAST_MISSES, wanted)), max(_MOST_MISSES, wanted))
        self._scores.append(_Score(now_s, score, replica_id))
        self._measure(now_s)

    def take(self, replica_id: str, other: Tracker) -> None:
        """Take over what ``other`` knows of one replica."""
        own = [each for each in other._scores if each.replica_id == replica_id]
        self._scores.extend(own)
        self._misses, other._misses = other._misses, 1.0 - self._level
        kept = [each for each in other._scores if each.replica_id != replica_id]
        other._scores = deque(kept, maxlen=MEMORY)
        for key in [key for key, each in other._behind.items() if each.replica_id == replica_id]:
            self._behind[key] = other._behind.pop(key)
        for tracker in (self, other):
            tracker._measure(tracker._measured_s)

    def margin(self, now_s: float) -> float:
        """Share of an objective by which it is planned earlier."""
        # Where so little can be guaranteed that no score comes any more, this opens the door again.
        # Not with every decision, as one costs less than a quantile.
        if now_s >= self._measured_s + _LEAST_PAUSE_S:
            self._measure(now_s)
        return self._margin

    def stands_out(self, replica_id: str, score: float) -> bool:
        """Whether this replica's scores, of which ``score`` is the last, are far above the others'.
        ``O(MEMORY log MEMORY)`` where that score is one of the highest, else ``O(1)``."""
        if score < self._margin - APART:
            return False
        own = [each.score for each in self._scores if each.replica_id == replica_id]
        others = [each.score for each in self._scores if each.replica_id != replica_id]
        usual = _quantile(others, 1.0 - self._level) + APART
        out = sum(each > usual for each in own)
        enough = max(LEAST_OUT, OUT_RATIO * (1.0 - self._level) * len(own))
        return len(others) >= LEAST_OTHERS and out >= enough

    def _measure(self, now_s: float) -> None:
        self._measured_s, scores = now_s, self._scores
        while scores and scores[0].at_s < now_s - MEMORY_S:
            scores.popleft()
        for key in [key for key, each in self._behind.items() if each.at_s < now_s - MEMORY_S]:
            del self._behind[key]
        known = [each.score for each in (*scores, *self._behind.values())]
        self._margin = _quantile(known, self._misses)


def _quantile(known: list[float], misses: float) -> float:
    """The margin above which a share ``misses`` of :data:`MEMORY` scores are, of which these are
    known."""
    scores = known + [PRIOR] * round(PRIOR_SHARE * (MEMORY - len(known)))
    scores.sort(reverse=True)
    # Its place from above; scores that are not there are the lowest.
    place = max(0, MEMORY - ceil((MEMORY + 1) * (1.0 - misses)))
    found = scores[place] if place < len(scores) else 0.0
    return min(max(found, 0.0), MOST_MARGIN)


class Margins:
    """The margins of the guarantees of some replicas.

    A margin is a share, and what a share covers depends on the whole: 20 ms of HTTP are much of
    half a second, and little of eight. So objectives of about the same length have a margin of
    their own, in steps of two. So has each anchor that a TPOT is measured by: the worst window of a
    stream is slower than its mean.

    Args:
        level: share of the guarantees that are to be kept, in (0, 1).
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._unseen = Tracker(level)
        self._trackers: OrderedDict[_Kind, Tracker] = OrderedDict()

    def margin(
        self,
        objective: Objective,
        stated_s: float,
        now_s: float,
        anchor: TPOTAnchor = TPOTAnchor.MEAN,
    ) -> float:
        """The share of an objective of ``stated_s`` seconds by which it is planned earlier."""
        return self._trackers.get(_kind(objective, stated_s, anchor), self._unseen).margin(now_s)

    def largest(self, now_s: float) -> dict[Objective, float]:
        """The largest margin of each objective now. ``O(margins)``."""
        found: dict[Objective, list[float]] = {objective: [] for objective in OBJECTIVES}
        for (objective, _, _), tracker in self._trackers.items():
            found[objective].append(tracker.margin(now_s))
        unseen = self._unseen.margin(now_s)
        return {objective: max(margins, default=unseen) for objective, margins in found.items()}

    def tracker(
        self, objective: Objective, stated_s: float, anchor: TPOTAnchor = TPOTAnchor.MEAN
    ) -> Tracker:
        """The tracker that learns the margin of such an objective."""
        return self._of(_kind(objective, stated_s, anchor))

    def take(self, replica_id: str, other: Margins) -> None:
        """Take over what ``other`` knows of one replica. ``O(margins * MEMORY)``."""
        for kind, tracker in other._trackers.items():
            self._of(kind).take(replica_id, tracker)

    def _of(self, kind: _Kind) -> Tracker:
        return used(self._trackers, kind, partial(Tracker, self._level), MOST_TRACKERS)


def score_of(stated_s: float, planned_s: float, observed_s: float) -> float:
    """How large the margin of a guarantee would have had to be, as far as it tells: see
    :data:`LEAST_RAISE`."""
    if observed_s <= 0.0:
        return -inf
    margin = 1.0 - planned_s / stated_s
    return min(1.0 - planned_s / observed_s, margin + max(margin, LEAST_RAISE))


def _kind(objective: Objective, stated_s: float, anchor: TPOTAnchor) -> _Kind:
    scale = round(log2(stated_s / _FIRST_SCALE_S))
    return objective, scale, anchor if objective == "tpot" else None
