"""How much later than planned guaranteed requests turn out, and the margin that meets the
guarantees.

A guarantee is planned for earlier than it is due, by a *margin*, a share of the objective.
Admission tests the plan and the engine schedules by it; the client sees the objective. The margin
covers the difference: HTTP, the edge, steps that take longer than predicted, neighbours. It is not
configured, but learned from what routers observed.

The *score* of a guarantee that ended is ``1 - planned / observed``: the margin, as a share of the
observed time, that would have sufficed. A guarantee is met if and only if its score is at most the
margin that it was made with. So the margin that meets a share ``level`` of the guarantees is that
quantile of the scores (conformal prediction). As loads and machines change, past scores do not
predict future ones; so the quantile's own level also moves with each guarantee that was met or
missed (adaptive conformal inference, Gibbs & Candès 2021, eq. 2: ``a <- a + g * (a* - missed)``),
which meets the level in the long run for any scores.

Our reading: an engine that schedules by deadlines uses the time that it has, so under load scores
are close to the plan, and without load far below it. Only the scores under load matter to the
quantile, and a margin learned under load stays until
:data:`~sluice.scheduling.placement.margins.MEMORY` newer guarantees, or
:data:`~sluice.scheduling.placement.margins.MEMORY_S`, have passed.

Before any observation, a few prior scores are assumed
(:data:`~sluice.scheduling.placement.margins.PRIOR`). A guarantee that is already missed counts
before its request ends (:meth:`Calibration.behind`), as an output may take longer than it takes to
make a hundred more guarantees.

All replicas share one set of margins, as a quantile near 1 takes hundreds of guarantees to learn. A
replica whose scores are far above the others' is *set apart*: it has its own margins, from its own
scores, which no longer count for the others. So one slow replica does not raise the margins of the
others, and its own guarantees are met. It joins the others again when its margins are small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from sluice.scheduling.placement.margins import APART, PRIOR, Margins, score_of
from sluice.scheduling.request.objective import OBJECTIVES, SLO, Objective, Times
from sluice.scheduling.request.tpot import TPOTAnchor

MOST_PROMISES: Final = 65_536
"""Guarantees under way that are known at a time; of more, the oldest teach nothing."""

MOST_APART: Final = 8
"""Replicas set apart at a time: a decision asks about each of them on its own."""


class _Promise(NamedTuple):
    stated: Times
    planned: Times
    replica_id: str
    anchor: TPOTAnchor


class Calibration:
    """The guarantees under way, and the margins that those before them taught.

    Args:
        level: share of the guarantees that are to be kept, in (0, 1).

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
        """By when what ``slo`` states is to be planned so that it can be guaranteed, by a replica
        or by any that is not set apart. ``O(1)``."""
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
        """A request was guaranteed ``stated``, and is planned for ``planned`` at a replica; without
        one what it teaches is of all. A later guarantee to the same request takes the place of the
        first."""
        self.dropped(key)
        self._promises[key] = _Promise(
            stated.times_s, planned.times_s, replica_id, stated.tpot_anchor
        )
        if len(self._promises) > MOST_PROMISES:
            self.dropped(next(iter(self._promises)))

    def dropped(self, key: Hashable) -> None:
        """Drop the guarantee of a request."""
        self._taken(key)

    def behind(
        self, key: Hashable, ttft_s: float | None, tpot_s: float | None, now_s: float
    ) -> None:
        """A running request had a late first token, or its pace is behind, seconds; ``None`` where
        it is not late.

        There is one first token, so its TTFT is final. A pace may recover: until the request ends,
        the last reported pace counts, then the final one.
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
        """A request ended with these times, as its client saw them, seconds; ``None`` if unknown.
        Requests without a guarantee are ignored."""
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
        """What was guaranteed within ``stated_s``, and planned for ``planned_s``, took
        ``observed_s``, seconds."""
        replica_id = promise.replica_id
        tracker = self._of(replica_id).tracker(objective, stated_s, promise.anchor)
        score = score_of(stated_s, planned_s, observed_s)
        tracker.ended(score, observed_s <= stated_s, replica_id, now_s)
        if replica_id in self._apart:
            self._join(replica_id, now_s)
        elif replica_id and tracker.stands_out(replica_id, score):
            # Also check silent replicas, once their entries are needed.
            for name in tuple(self._apart):
                self._join(name, now_s)
            if len(self._apart) < MOST_APART:
                own = self._apart[replica_id] = Margins(self._level)
                own.take(replica_id, self._margins)

    def _join(self, replica_id: str, now_s: float) -> None:
        """Let a replica join the others if its margins are at most the initial ones. The others'
        margins are not the criterion, as they are also large while another replica is about to
        stand out."""
        if max(self._apart[replica_id].largest(now_s).values()) <= PRIOR + APART:
            del self._apart[replica_id]

    def _of(self, replica_id: str) -> Margins:
        return self._apart.get(replica_id, self._margins)

    def _taken(self, key: Hashable) -> _Promise | None:
        """Remove and return the guarantee of a request that no longer runs."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            _, stated_tpot_s, _ = promise.stated
            if stated_tpot_s is not None:
                own = self._of(promise.replica_id)
                own.tracker("tpot", stated_tpot_s, promise.anchor).left(key)
        return promise
