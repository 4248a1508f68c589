"""How much later than planned promised requests turn out, and the margin that meets the promises.

A promise is planned for earlier than it is due, by a *margin*, a share of the objective, learned
from what routers observed: HTTP, the edge, slow steps, neighbours. The *score* of a promise that
ended is ``1 - planned / observed``: the margin that would have sufficed. The margin that meets a
share ``level`` is that quantile of the scores (conformal prediction), and its level moves with each
promise met or missed (adaptive conformal inference, Gibbs & Candès 2021, eq. 2: ``a <- a + g * (a*
- missed)``), which meets the level in the long run for any scores.

Our reading: an engine that schedules by deadlines uses the time that it has, so only scores under
load are close to the plan and matter to the quantile. A margin learned under load stays until
``MEMORY`` newer promises or ``MEMORY_S`` have passed. ``PRIOR`` scores stand in before any
observation. A promise that is already missed counts before its request ends
(``Calibration.behind``), as outputs are long.

All replicas share margins, as a quantile near 1 takes hundreds of promises. A replica whose scores
are far above the others' is *set apart*, with margins from its own scores only, until these are
small: so one slow replica does not raise the margins of the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from functools import partial
from math import ceil, inf, log2
from typing import Final, NamedTuple

from sluice.scheduling.recent import used
from sluice.scheduling.request.objective import OBJECTIVES, SLO, Objective, Times, TPOTAnchor

# The margins of guarantees, by objective and how long it is; see
# :mod:`sluice.scheduling.placement.calibration`.

MEMORY: Final = 400
"""Scores that count: at a level of 0.99 the quantile lies at the fourth of them, so no single one
moves it far."""

MEMORY_S: Final = 60.0
"""How long a score counts, seconds."""

MAX_MARGIN: Final = 0.5
"""Largest margin: with 0.9, a short overload had fleets promise half as much for a minute
after."""

MIN_RAISE: Final = 0.04
"""A late promise asks for at most twice its margin, or this much more: what is late is served
behind the rest, so its lateness says little of the margin that it needed."""

GAIN: Final = 0.002
"""Of adaptive conformal inference: how far one promise moves the level."""

_MIN_MISSES, _MAX_MISSES = 0.001, 0.1
"""Between which the share of misses that the quantile is taken for moves."""

PRIOR: Final = 0.04
"""Score of ``PRIOR_SHARE`` of the promises not made yet: real engines were 0 to 4 % behind their
plan. The others count as early: among few promises, late ones are outliers and not the tail."""

PRIOR_SHARE: Final = 0.02
"""Twice the misses that a level of 0.99 allows, so that a margin there begins at :data:`PRIOR` and
follows what is observed once half of :data:`MEMORY` is known."""

MAX_TRACKERS: Final = 4_096
"""Margins that are learned at a time; the one that was used longest ago goes first."""

APART: Final = 0.01
"""A score above the margin that the others need by more than this stands out."""

MIN_OUT: Final = 4
"""A replica is set apart from the others only with at least this many scores that stand out."""

OUT_RATIO: Final = 4.0
"""And only if their share of its scores is at least this many times the allowed share of misses: of
50 scores 4, which at a level of 0.99 happens by chance once in 600 times."""

MIN_OTHERS: Final = 20
"""And only in comparison with at least this many scores of other replicas."""

_FIRST_SCALE_S = 0.125
_MIN_PAUSE_S = 1.0


_Kind = tuple[Objective, int, TPOTAnchor | None]


class _Score(NamedTuple):
    at_s: float
    score: float
    replica_id: str


class Tracker:
    """The margin of one kind of promises, to keep a share ``level`` in (0, 1) of them. ``O(MEMORY
    log MEMORY)`` an ending, ``O(1)`` a margin."""

    def __init__(self, level: float) -> None:
        self._level = level
        self._misses = 1.0 - level
        self._scores: deque[_Score] = deque(maxlen=MEMORY)
        self._behind: dict[Hashable, _Score] = {}
        self._margin = 0.0
        self._measure(-inf)

    def behind(self, key: Hashable, score: float, replica_id: str, now_s: float) -> None:
        """Record the current score of the promise ``key``, whose request still runs."""
        self._behind[key] = _Score(now_s, score, replica_id)
        self._measure(now_s)

    def left(self, key: Hashable) -> None:
        """Forget the running score of the promise ``key``."""
        self._behind.pop(key, None)

    def ended(self, score: float, kept: bool, replica_id: str, now_s: float) -> None:
        """Record the final score of a promise, and whether it was met (``kept``)."""
        wanted = 1.0 - self._level
        misses = self._misses + GAIN * (wanted - (0.0 if kept else 1.0))
        self._misses = min(max(misses, min(_MIN_MISSES, wanted)), max(_MAX_MISSES, wanted))
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
        if now_s >= self._measured_s + _MIN_PAUSE_S:
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
        enough = max(MIN_OUT, OUT_RATIO * (1.0 - self._level) * len(own))
        return len(others) >= MIN_OTHERS and out >= enough

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
    return min(max(found, 0.0), MAX_MARGIN)


class Margins:
    """The margins of the promises of some replicas, to keep a share ``level`` in (0, 1) of them.

    Objectives of about the same length, in steps of two, have a margin of their own, as 20 ms of
    HTTP are much of half a second and little of eight. So has each TPOT anchor: the worst window of
    a stream is slower than its mean."""

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
        if not self._trackers:
            return self._unseen.margin(now_s)
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
        return used(self._trackers, kind, partial(Tracker, self._level), MAX_TRACKERS)


def score_of(stated_s: float, planned_s: float, observed_s: float) -> float:
    """How large the margin of a promise would have had to be, as far as it shows: see
    :data:`MIN_RAISE`."""
    if observed_s <= 0.0:
        return -inf
    margin = 1.0 - planned_s / stated_s
    return min(1.0 - planned_s / observed_s, margin + max(margin, MIN_RAISE))


def _kind(objective: Objective, stated_s: float, anchor: TPOTAnchor) -> _Kind:
    scale = round(log2(stated_s / _FIRST_SCALE_S))
    return objective, scale, anchor if objective == "tpot" else None


MAX_PROMISES: Final = 65_536
"""Promises under way that are known at a time; of more, the oldest teach nothing."""

MAX_PLANS: Final = 1_024
"""Objectives whose plans are kept."""

MAX_APART: Final = 8
"""Replicas set apart at a time: a decision asks about each of them on its own."""


class _Promise(NamedTuple):
    stated: Times
    planned: Times
    replica_id: str
    anchor: TPOTAnchor


class Calibration:
    """The promises under way, and the margins that those before them taught. Raises ``ValueError``
    if ``level``, the share of promises to keep, is not in (0, 1)."""

    def __init__(self, level: float) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"the promise level must be between 0 and 1, got {level}")
        self._level = level
        self._margins = Margins(level)
        self.apart: dict[str, Margins] = {}
        """Replicas with margins of their own."""
        # The plans made since a margin changed, or for at most a second.
        self._plans: dict[tuple[SLO, str], SLO] = {}
        self._planned_until_s = -inf
        self._promises: OrderedDict[Hashable, _Promise] = OrderedDict()

    def margin(
        self, objective: Objective, stated_s: float, now_s: float, replica_id: str = ""
    ) -> float:
        """The share of an objective of ``stated_s`` seconds by which it is planned earlier."""
        return self._of(replica_id).margin(objective, stated_s, now_s)

    def largest(self, now_s: float) -> dict[Objective, float]:
        """The largest margin of each objective now, of any replica. ``O(margins)``."""
        all_largest = [each.largest(now_s) for each in (self._margins, *self.apart.values())]
        return {
            objective: max(largest[objective] for largest in all_largest)
            for objective in OBJECTIVES
        }

    def plan(self, slo: SLO, now_s: float, replica_id: str = "") -> SLO:
        """By when what ``slo`` states is to be planned so that it can be promised, by a replica
        or by any that is not set apart. ``O(1)``."""
        if now_s >= self._planned_until_s:  # old scores leave the margins meanwhile
            self._plans.clear()
            self._planned_until_s = now_s + _MIN_PAUSE_S
        plan = self._plans.get((slo, replica_id))
        if plan is not None:
            return plan
        margins, anchor = self.apart.get(replica_id, self._margins), slo.tpot_anchor
        times_s = list(slo.times_s)
        for place, stated_s in enumerate(times_s):
            if stated_s is not None:
                margin = margins.margin(OBJECTIVES[place], stated_s, now_s, anchor)
                times_s[place] = stated_s * (1.0 - margin)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        plan = self._plans[slo, replica_id] = slo.with_times(times_s)
        return plan

    def promised(self, key: Hashable, stated: SLO, planned: SLO, replica_id: str = "") -> None:
        """A request was promised ``stated``, and is planned for ``planned`` at a replica; without
        one it counts for all. A later promise to the same request replaces the first."""
        if key in self._promises:
            self._taken(key)
        self._promises[key] = _Promise(
            stated.times_s, planned.times_s, replica_id, stated.tpot_anchor
        )
        if len(self._promises) > MAX_PROMISES:
            self.dropped(next(iter(self._promises)))

    def dropped(self, key: Hashable) -> None:
        """Drop the promise of a request."""
        if key in self._promises:
            self._taken(key)

    def behind(
        self, key: Hashable, ttft_s: float | None, tpot_s: float | None, now_s: float
    ) -> None:
        """A running request had a late first token, which is final, or its TPOT is behind, seconds,
        which may recover: the last report counts until the end. ``None`` where it is not late."""
        promise = self._promises.get(key)
        if promise is None:
            return
        (stated_ttft_s, stated_tpot_s, e2e_s), planned, replica_id, anchor = promise
        planned_ttft_s, planned_tpot_s, _ = planned
        if ttft_s is not None and stated_ttft_s is not None and planned_ttft_s is not None:
            self._observe("ttft", stated_ttft_s, planned_ttft_s, ttft_s, promise, now_s)
            self._promises[key] = promise._replace(stated=(None, stated_tpot_s, e2e_s))
        if tpot_s is not None and stated_tpot_s is not None and planned_tpot_s is not None:
            tracker = self._of(replica_id).tracker("tpot", stated_tpot_s, anchor)
            tracker.behind(key, score_of(stated_tpot_s, planned_tpot_s, tpot_s), replica_id, now_s)
            self._plans.clear()

    def ended(
        self,
        key: Hashable,
        ttft_s: float | None,
        tpot_s: float | None,
        e2e_s: float | None,
        now_s: float,
    ) -> None:
        """A request ended with these times, as its client saw them, seconds; ``None`` if unknown.
        Requests without a promise are ignored."""
        promise = self._taken(key)
        if promise is None:
            return
        observed = ttft_s, tpot_s, e2e_s
        times = zip(OBJECTIVES, promise.stated, promise.planned, observed, strict=True)
        for objective, stated_s, planned_s, observed_s in times:
            if stated_s is not None and planned_s is not None and observed_s is not None:
                self._observe(objective, stated_s, planned_s, observed_s, promise, now_s)

    def _observe(
        self,
        objective: Objective,
        stated_s: float,
        planned_s: float,
        observed_s: float,
        promise: _Promise,
        now_s: float,
    ) -> None:
        """What was promised within ``stated_s``, and planned for ``planned_s``, took
        ``observed_s``, seconds."""
        replica_id = promise.replica_id
        tracker = self._of(replica_id).tracker(objective, stated_s, promise.anchor)
        score = score_of(stated_s, planned_s, observed_s)
        tracker.ended(score, observed_s <= stated_s, replica_id, now_s)
        self._plans.clear()
        if replica_id in self.apart:
            self._join(replica_id, now_s)
        elif replica_id and tracker.stands_out(replica_id, score):
            # Also check silent replicas, once their entries are needed.
            for name in tuple(self.apart):
                self._join(name, now_s)
            if len(self.apart) < MAX_APART:
                own = self.apart[replica_id] = Margins(self._level)
                own.take(replica_id, self._margins)

    def _join(self, replica_id: str, now_s: float) -> None:
        """Let a replica join the others if its margins are at most the initial ones. The others'
        margins are no criterion: they are also large while another replica is about to be set
        apart."""
        if max(self.apart[replica_id].largest(now_s).values()) <= PRIOR + APART:
            del self.apart[replica_id]

    def _of(self, replica_id: str) -> Margins:
        return self.apart.get(replica_id, self._margins)

    def _taken(self, key: Hashable) -> _Promise | None:
        """Remove and return the promise of a request that no longer runs."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            _, stated_tpot_s, _ = promise.stated
            if stated_tpot_s is not None:
                own = self._of(promise.replica_id)
                own.tracker("tpot", stated_tpot_s, promise.anchor).left(key)
        return promise
