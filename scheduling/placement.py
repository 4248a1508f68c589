"""One decision: what is promised, where the request goes, and what that takes of the fleet.

The controller makes it for real requests and the simulator for simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from scheduling.admission import AdmissionPolicy, Promises
from scheduling.admission.room import LEAST_WAIT_S
from scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from scheduling.autoscaling.load import Demand
from scheduling.fleet import Fleet
from scheduling.fleet_rows import BEST_EFFORT_S, PREFILL_S, work_on
from scheduling.job import (
    NO_REPLICA,
    PLACED,
    UNATTAINABLE,
    Job,
    RouteDecision,
    RouteQuery,
    Tier,
)
from scheduling.kernels import Floats, Ints
from scheduling.ledger import Reservation
from scheduling.routing.base import RoutingPolicy


class Weighed(NamedTuple):
    """What a decision was made from. Nothing in it changes later, so it may be kept.

    Attributes:
        job: the request, and what it would be on each replica that might have been chosen.
        ids: replica of each row of the fleet.
        known: replicas that were known, also those that could not be chosen.
        promises: what each replica of the job could promise; ``None`` where nothing was asked.
        ahead_s: ``float64[n]``, predicted time of all prompts there and of this one, where that
            decided or nothing was promised; else ``None``.
    """

    job: Job
    ids: Sequence[str]
    known: int
    promises: Promises | None
    ahead_s: Floats | None


Witness = Callable[[Weighed], None]


class Placer:
    """Decides by one admission and one routing policy, and reserves.

    A request that no replica can promise its objective, or that has none, is served as best effort
    if it may be: by the replica with the least work ahead, of both tiers.

    Args:
        fleet: what is known; decisions are reserved in it.
        routing: chooses among the replicas that can promise; of all, without admission.
        admission: tells which can; ``None``: nothing is promised, and only who asks for it is
            served as best effort.
        witness: told of what each decision is made from, for whom there is any replica to choose.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None,
        witness: Witness | None = None,
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._admission = admission
        self._witness = witness
        self.demand = Demand()
        """What was asked for, decision by decision."""

    def place(self, query: RouteQuery, now_s: float, moved: bool = False) -> RouteDecision:
        """Decide on ``query`` and reserve what it takes.

        Args:
            query: the request.
            now_s: the time.
            moved: whether its first token is out already and the KV of its prompt comes along, as
                from a prefill replica to a decode replica.
        """
        fleet = self._fleet
        fleet.expire(now_s)
        rows = fleet.candidates(now_s)
        if not len(rows):
            return RouteDecision(None, NO_REPLICA)
        job = self._job(query, rows, now_s, moved)
        decision = self._decide(job)
        self.demand.count(job, decision, fleet)
        return decision

    def _decide(self, job: Job) -> RouteDecision:
        fleet, query = self._fleet, job.query
        if Tier.GUARANTEED not in query.tiers or self._promises_nothing(query):
            return self._best_effort(job)
        if self._admission is None:
            if self._witness is not None:
                self._tell(job, None, self._ahead_s(job))
            chosen = self._choose(job)
            self._reserve(job, chosen, promised=True)
            return RouteDecision(fleet.ids[job.rows[chosen]], PLACED)
        return self._promise(job, self._admission)

    def _promises_nothing(self, query: RouteQuery) -> bool:
        """Whether there is nothing that admission could promise."""
        return self._admission is not None and not query.slo.stated

    def _promise(self, job: Job, admission: AdmissionPolicy) -> RouteDecision:
        fleet = self._fleet
        promises = admission.promises(job, fleet)
        holds = promises.holds
        # Aged replicas are among the candidates only where there are no others.
        if not holds.any() or fleet.condition(int(job.rows[0]), job.now_s) == "aged":
            return self._unpromised(job, promises)
        self._tell(job, promises)
        able = job.of(holds)
        chosen = self._choose(able)
        self._reserve(able, chosen, promised=True)
        ttft_s = float(promises.ttft_s[holds][chosen])
        return RouteDecision(fleet.ids[able.rows[chosen]], PLACED, Tier.GUARANTEED, ttft_s)

    def _unpromised(self, job: Job, promises: Promises) -> RouteDecision:
        if Tier.BEST_EFFORT in job.query.tiers:
            return self._best_effort(job, promises)
        self._tell(job, promises)
        wait_s = float(promises.wait_s.min())
        # Where it waits for a report only, a moment is enough.
        retry_after_s = max(wait_s, LEAST_WAIT_S) if wait_s < inf else None
        return RouteDecision(None, UNATTAINABLE, retry_after_s=retry_after_s)

    def _best_effort(self, job: Job, promises: Promises | None = None) -> RouteDecision:
        ahead_s = self._ahead_s(job)
        self._tell(job, promises, ahead_s)
        chosen = int(np.argmin(ahead_s))
        self._reserve(job, chosen, promised=False)
        return RouteDecision(self._fleet.ids[job.rows[chosen]], PLACED, Tier.BEST_EFFORT)

    def _ahead_s(self, job: Job) -> Floats:
        """Predicted time of the prompts of both tiers at each replica, with this one."""
        figures, rows = self._fleet.figures, job.rows
        ahead_s: Floats = figures[rows, PREFILL_S] + figures[rows, BEST_EFFORT_S] + job.work_s
        return ahead_s

    def _tell(self, job: Job, promises: Promises | None, ahead_s: Floats | None = None) -> None:
        if self._witness is not None:
            fleet = self._fleet
            self._witness(Weighed(job, fleet.ids, len(fleet), promises, ahead_s))

    def _choose(self, job: Job) -> int:
        chosen = self._routing.choose(job, self._fleet)
        if not 0 <= chosen < len(job.rows):
            raise RuntimeError(
                f"policy {self._routing.name!r} chose replica {chosen} of {len(job.rows)}"
            )
        return chosen

    def _job(self, query: RouteQuery, rows: Ints, now_s: float, moved: bool) -> Job:
        fleet = self._fleet
        # The edge's count of the prompt is an estimate, too.
        cached = np.minimum(fleet.cached_tokens(query.prefix, rows), query.prompt_tokens)
        if moved:
            cached = np.full(len(rows), query.prompt_tokens - 1.0)
        work_s = work_on(fleet.pieces, rows, float(query.prompt_tokens), cached)
        tokens = expected_tokens(query)
        due_s = first_due_s(query, now_s, tokens, fleet.settings.reference_tpot_s)
        return Job(query, now_s, rows, cached, work_s, due_s, tokens, moved)

    def _reserve(self, job: Job, chosen: int, promised: bool) -> None:
        query = job.query
        cached = float(job.cached_tokens[chosen])
        new = max(1.0, query.prompt_tokens - cached)
        self._fleet.reserve(
            query.key,
            Reservation(
                self._fleet.ids[job.rows[chosen]],
                job.now_s,
                promised,
                new,
                cached,
                query.prompt_tokens if job.moved else new,
                job.due_s,
                query.slo.columns[1],
                float(query.slo.priority),
                job.output_tokens,
            ),
        )


def expected_tokens(query: RouteQuery) -> float:
    """The length that its output is expected to have: what is usual, or the most that it may."""
    most = float(query.output_tokens) or inf
    return min(UNKNOWN_OUTPUT_TOKENS, most)


def first_due_s(query: RouteQuery, now_s: float, output_tokens: float, unpaced_s: float) -> float:
    """When its first token is due: by its TTFT, and early enough that the expected output ends by
    its end-to-end objective at the pace of its TPOT, or of ``unpaced_s`` where it states none."""
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    pace_s = tpot_s if tpot_s < inf else unpaced_s
    arrival_s = now_s - query.waited_s
    return arrival_s + min(ttft_s, e2e_s - (output_tokens - 1.0) * pace_s)
