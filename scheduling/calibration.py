"""How far what was promised turns out later than planned, and the margin that keeps the promises.

What is promised is planned for a little earlier than it is due: by a *margin*, a share of the
objective. The plan is what admission tests and what the engine works by; the objective itself is
what the client sees. The margin covers whatever lies between the two: HTTP, the edge, steps that
take longer than predicted, neighbours. It is learned from what routers observed.

Of each promise that ended the *score* is ``1 - planned / observed``: how large a share of the
observed time the margin would have had to be. A promise is kept if and only if its score is at most
the margin that it was made with. So the margin that keeps a share ``level`` of the promises is that
quantile of the scores (conformal prediction). As loads and machines change, the scores of the past
are not those to come; so the quantile's own level moves, too, with each promise that was kept or
missed (adaptive conformal inference, Gibbs & Candès 2021, eq. 2: ``a <- a + g * (a* - missed)``),
which keeps the level in the long run whatever the scores do.

Our reading: an engine that works by deadlines uses the time that it has, so scores crowd at the
plan under load and lie far below it without. Only the former matter to the quantile, and a margin
that was learned under load stays until :data:`~scheduling.margins.MEMORY` newer promises, or
:data:`~scheduling.margins.MEMORY_S`, have gone by.

Before there is anything to learn from, a few assumed scores stand for those to come
(:data:`~scheduling.margins.PRIOR`). And a promise that is being missed teaches before its request
ends (:meth:`Calibration.behind`), for an answer may take longer than it takes to make a hundred
more.

All replicas together have one set of margins, as a quantile near 1 takes hundreds of promises to
learn. A replica whose scores are far above the others' is *set apart*: it has margins of its own,
made from its own scores, which count for the others no more. So one slow replica does not enlarge
the margins of the others, and its own promises are kept. It joins the others again when its margins
are small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from scheduling.margins import APART, PRIOR, Margins, score_of
from scheduling.objective import OBJECTIVES, SLO, Objective, Times
from scheduling.tpot import TPOTAnchor

MOST_PROMISES: Final = 65_536
"""Promises under way that are known at a time; of more, the oldest teach nothing."""

MOST_APART: Final = 8
"""Replicas set apart at a time: a decision asks about each of them on its own."""


class _Promise(NamedTuple):
    stated: Times
    planned: Times
    replica_id: str
    anchor: TPOTAnchor


class Calibration:
    """The promises under way, and the margins that those before them taught.

    Args:
        level: share of the promises that are to be kept, in (0, 1).

    Raises:
        ValueError: ``level`` is not in (0, 1).
    """

    def __init__(self, level: float) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"the promise level must be between 0 and 1, got {level}")
        self._level = level
        self._margins = Margins(level)
        self._apart: dict[str, Margins] = {}
        self._promises: OrderedDict[Hashable, _Promise] = OrderedDict()

    @property
    def apart(self) -> Iterable[str]:
        """Replicas with margins of their own."""
        return self._apart.keys()

    def margin(
        self, objective: Objective, stated_s: float, now_s: float, replica_id: str = ""
    ) -> float:
        """The share of an objective of ``stated_s`` seconds by which it is planned earlier."""
        return self._of(replica_id).margin(objective, stated_s, now_s)

    def largest(self, now_s: float) -> dict[Objective, float]:
        """The largest margin of each objective now, of any replica. ``O(margins)``."""
        all_largest = [each.largest(now_s) for each in (self._margins, *self._apart.values())]
        return {
            objective: max(largest[objective] for largest in all_largest)
            for objective in OBJECTIVES
        }

    def plan(self, slo: SLO, now_s: float, replica_id: str = "") -> SLO:
        """By when what ``slo`` states is to be planned so that it can be promised, by a replica or
        by any that is not set apart. ``O(1)``."""
        margins, anchor = self._of(replica_id), slo.tpot_anchor
        return slo.with_times(
            [
                None
                if stated_s is None
                else stated_s * (1.0 - margins.margin(objective, stated_s, now_s, anchor))
                for objective, stated_s in zip(OBJECTIVES, slo.times_s, strict=True)
            ]
        )

    def promised(self, key: Hashable, stated: SLO, planned: SLO, replica_id: str = "") -> None:
        """A request was promised ``stated``, and is planned for ``planned`` at a replica; without
        one what it teaches is of all. A later promise to the same request takes the place of the
        first."""
        self.dropped(key)
        self._promises[key] = _Promise(
            stated.times_s, planned.times_s, replica_id, stated.tpot_anchor
        )
        if len(self._promises) > MOST_PROMISES:
            self.dropped(next(iter(self._promises)))

    def dropped(self, key: Hashable) -> None:
        """What was promised to a request is no longer of interest."""
        self._taken(key)

    def behind(
        self, key: Hashable, ttft_s: float | None, tpot_s: float | None, now_s: float
    ) -> None:
        """A request is running, and its first token came late, or its pace is behind, seconds;
        ``None`` where that is not so.

        A first token comes once, so this is how its TTFT turned out. A pace may recover: until the
        request has ended it counts as it was reported last, and then as it turned out.
        """
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
        if replica_id in self._apart:
            self._join(replica_id, now_s)
        elif replica_id and tracker.stands_out(replica_id, score):
            # Of those that tell nothing any more, too, once their places are wanted.
            for name in tuple(self._apart):
                self._join(name, now_s)
            if len(self._apart) < MOST_APART:
                own = self._apart[replica_id] = Margins(self._level)
                own.take(replica_id, self._margins)

    def _join(self, replica_id: str, now_s: float) -> None:
        """Let a replica join the others if it needs no more than any replica at the start. The
        margins of the others are no measure: they are large, too, while another replica is about to
        stand out."""
        if max(self._apart[replica_id].largest(now_s).values()) <= PRIOR + APART:
            del self._apart[replica_id]

    def _of(self, replica_id: str) -> Margins:
        return self._apart.get(replica_id, self._margins)

    def _taken(self, key: Hashable) -> _Promise | None:
        """The promise to a request, which is removed."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            _, stated_tpot_s, _ = promise.stated
            if stated_tpot_s is not None:
                own = self._of(promise.replica_id)
                own.tracker("tpot", stated_tpot_s, promise.anchor).left(key)
        return promise
