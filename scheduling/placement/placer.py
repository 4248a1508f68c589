"""One decision: what is guaranteed, where the request goes, and what that takes of the fleet.

The controller makes it for real requests and the simulator for simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy, Promises
from sluice.scheduling.admission.room import LEAST_WAIT_S
from sluice.scheduling.autoscaling.load import Demand
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.ledger import Reservation
from sluice.scheduling.fleet.rows import BEST_EFFORT_S, DECODE_S, FIXED_S, PREFILL_S
from sluice.scheduling.pairs import TRANSFER_STEPS, DecodeChoice
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.cold_start import ColdStart
from sluice.scheduling.placement.guarantees import Guarantees
from sluice.scheduling.placement.jobs import job_of, reservation_of
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.retry_after import RetryAfter
from sluice.scheduling.placement.together import Turn, plan
from sluice.scheduling.request.job import (
    DECLINED,
    NO_REPLICA,
    PLACED,
    STAYS,
    UNATTAINABLE,
    Job,
    RouteDecision,
    RouteQuery,
    Tier,
)
from sluice.scheduling.request.kernels import Floats, Ints
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import WHOLE
from sluice.scheduling.routing.base import RoutingPolicy
from sluice.scheduling.tenancy.fair_shares import FairShares

MOST_AWAITED_S = 600.0
"""Longest time for which a reservation waits for another replica to compute the prompt, seconds."""


class DecisionInputs(NamedTuple):
    """The inputs of a decision. They do not change later, so they may be stored.

    Attributes:
        job: the request, with its work on each replica that could have been chosen to serve or
            prefill it.
        ids: replica of each row of the fleet.
        known: number of known replicas, including ineligible ones.
        promises: what each replica of the job could guarantee; ``None`` where nothing was asked.
        ahead_s: ``float64[n]``, predicted time of all prompts there and of this one, where that
            decided or nothing was guaranteed; else ``None``.
        second: the decode choice, if the request could be split.
        untried: rows of the quarantined replicas that were to be tried.
    """

    job: Job
    ids: Sequence[str]
    known: int
    promises: Promises | None
    ahead_s: Floats | None
    second: DecodeChoice | None = None
    untried: frozenset[int] = frozenset()


OnDecision = Callable[[DecisionInputs], None]


class _Asked(NamedTuple):
    """What a decision is about.

    Attributes:
        job: the request on the replicas that are asked, of ``among`` where it could be served.
        second: the decode choice, if it could be split.
        wanted: the admission policy, if it is to be guaranteed.
        stated, planned: its objective, and by when that is planned.
    """

    job: Job
    second: DecodeChoice | None
    wanted: AdmissionPolicy | None
    stated: SLO
    planned: SLO
    among: int


class Placer:
    """Decides by one admission and one routing policy, and reserves.

    A request without an objective, or whose objective no replica can guarantee, is served as best
    effort if it may be: by the replica with the least work ahead, of both tiers.

    With prefill/decode disaggregation, a request that may be split (``prefill_key``) goes to a P/D
    pair or whole to a mixed replica. The choice of the decode replica does not depend on the
    prefill replica, so it is made first: among the decode replicas that can guarantee their part,
    by :meth:`RoutingPolicy.choose_decode`. Then mixed and prefill replicas are compared in one
    decision, each by its part. A prefill replica can guarantee the request if the decode replica
    can, and if its prefill ends before the first token is due by the time of the KV transfer and of
    :data:`~sluice.scheduling.pairs.TRANSFER_STEPS`. The routing policy chooses among all replicas
    that can guarantee the request.

    An end-to-end time is guaranteed as a TTFT and a pace
    (:mod:`sluice.scheduling.placement.guarantees`), by the observed lengths of outputs.

    Where not every request can be guaranteed, tenants have fair shares of the capacity
    (:mod:`sluice.scheduling.tenancy.fair_shares`): a tenant over its share gets a guarantee only if
    it leaves capacity for the others; otherwise its request is handled as if no replica could
    guarantee it.

    A refused request gets a retry time, and new requests of the same tenant leave capacity for its
    retry (:mod:`sluice.scheduling.placement.retry_after`).

    A request that must be served whole goes to a mixed replica; without mixed replicas, to a decode
    replica; without either, to any.

    A quarantined replica gets requests only where no other is left, and then without a guarantee;
    but when its trial is due, it gets the next request that it could serve.

    A guaranteed request that moves (``moves_from``) goes to another replica that can guarantee the
    rest of its objective. If there is none, it stays without side effects: no share is refused, and
    its first guarantee stands. A running stream (``brings_kv``) is decided on as one whose KV
    arrives after the predicted transfer; without a guarantee it may go to any other replica.

    Args:
        fleet: the replica table; decisions are reserved in it.
        routing: chooses among the replicas that can guarantee the request; without admission, among
            all.
        admission: decides which replicas can guarantee it; ``None``: nothing is guaranteed, and
            only requests that ask for best effort get it.
        on_decision: receives the inputs of each decision with at least one replica to choose.
        calibration: by how much earlier than due a guarantee is planned; ``None``: not earlier.
        lengths: observed output lengths; ``None``: none are known.
        cold_start: decides while a model that may have no replica has none; ``None``: it always has
            some.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None,
        on_decision: OnDecision | None = None,
        calibration: Calibration | None = None,
        lengths: OutputLengths | None = None,
        cold_start: ColdStart | None = None,
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._admission = admission
        self._on_decision = on_decision
        self._lengths = lengths if lengths is not None else OutputLengths()
        self.cold_start = cold_start
        self.demand = Demand()
        """Demand, counted decision by decision."""
        self.shares = FairShares()
        """Fair shares of guaranteed tokens between tenants."""
        self.returns = RetryAfter()
        """Retry times of refused requests."""
        self._guarantees = Guarantees(fleet, calibration, self._lengths, self.shares, self.returns)

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Turn]:
        """In which order to decide on queries that wait together, and where each is to be
        guaranteed: the best set first, see :mod:`sluice.scheduling.placement.together`. In the
        order given where the admission policy does not choose among several, with P/D roles, and
        for a single query.

        Args:
            queries: at most :data:`~sluice.scheduling.placement.together.MOST_TOGETHER`.
        """
        turns, admission = list(map(Turn, range(len(queries)))), self._admission
        if len(queries) < 2 or admission is None or not admission.selects or self._fleet.has_roles:
            return turns
        asked = (
            (index, made.job)
            for index, query in enumerate(queries)
            if not query.moves_from
            and self._promise_wanted(query) is not None
            and not isinstance(made := self._asked(query, now_s), RouteDecision)
            and self._fleet.is_sound(int(made.job.rows[0]), now_s)
        )
        turn = self._routing.turn
        rows = plan(asked, self._fleet, admission, self._routing.choose_able)
        self._routing.turn = turn  # a plan takes none
        best = [Turn(index, row) for index, row in sorted(rows.items())]
        return [*best, *(turn for turn in turns if turn.number not in rows)]

    def place(self, query: RouteQuery, now_s: float, at: int | None = None) -> RouteDecision:
        """Decide on ``query`` and reserve what it takes. ``at``: a replica's row, which guarantees
        it if it can (:meth:`order`)."""
        asked = self._asked(query, now_s, at)
        decision = asked if isinstance(asked, RouteDecision) else self._decide(asked, at)
        if decision.reason == DECLINED:  # it will be counted elsewhere
            return decision
        self.demand.arrived += 1
        # A moving request was counted where it was placed first.
        if not query.moves_from and not isinstance(asked, RouteDecision):
            self.demand.count(asked.job, decision, self._fleet, asked.second)
        return decision

    def _asked(
        self, query: RouteQuery, now_s: float, at: int | None = None
    ) -> _Asked | RouteDecision:
        """What to decide; a decision where no replica can be asked."""
        fleet = self._fleet
        fleet.expire(now_s)
        rows = fleet.candidates(now_s)
        if query.only:
            rows = fleet.among(rows, query.only)
            if not len(rows):
                return RouteDecision(None, DECLINED if query.elsewhere else NO_REPLICA)
        if not len(rows):
            if self.cold_start is None or query.elsewhere:
                return RouteDecision(None, DECLINED if query.elsewhere else NO_REPLICA)
            promised = self._promise_wanted(query) is not None
            tokens = self._lengths.of(query).mean
            return self.cold_start.decide(query, fleet, now_s, tokens, promised)
        if query.avoid:
            rows = fleet.but(rows, query.avoid)
        if not query.moves_from:
            # Of an earlier decision on it.
            self._guarantees.forget(query)
        wanted = self._promise_wanted(query)
        if query.moves_from:
            rows = rows[rows != fleet.row_of.get(query.moves_from, -1)]
            if query.brings_kv:  # a prefill replica cannot fetch it
                rows = rows[~fleet.are(rows, "prefill")]
            if not len(rows) or (wanted is None and not query.brings_kv):
                return RouteDecision(None, STAYS)
        stated = planned = query.slo
        if wanted is not None:
            planned = self._guarantees.plan(stated, now_s)
            query = self._guarantees.shared_out(query, planned, rows)
        second: DecodeChoice | None = None
        if fleet.has_roles:
            rows, seconds = self._by_role(query, rows)
            if seconds is not None:
                second = self._second(query, seconds, now_s, wanted)
        among = len(rows)
        if wanted is not None:
            preferred = None if at is None else rows[rows == at]
            rows = self._routing.asked(rows)
            if preferred is not None:
                rows = np.union1d(rows, preferred)
        tokens = self._lengths.of(query).mean
        kv_transfer_s = None if second is None else second.kv_transfer_s
        job = job_of(fleet, query, rows, now_s, tokens, kv_transfer_s)
        if wanted is not None:
            asked = now_s, float(job.work_s.min()), job.due_s - now_s, float(stated.priority)
            job = job._replace(worthier_s=self.demand.recent.worthier_s(*asked) / among)
        return _Asked(job, second, wanted, stated, planned, among)

    def _promise_wanted(self, query: RouteQuery) -> AdmissionPolicy | None:
        """The admission policy for this request; ``None`` if it is not to be guaranteed."""
        if self._admission is None or Tier.GUARANTEED not in query.tiers or not query.slo.stated:
            return None
        return self._admission

    def _by_role(self, query: RouteQuery, rows: Ints) -> tuple[Ints, Ints | None]:
        """The ``rows`` where the request may start, and, if it may be split, the rows of decode
        replicas."""
        fleet = self._fleet
        of = {role: fleet.of_role(rows, role) for role in WHOLE}
        if query.prefill_key and len(of["prefill"]) and len(of["decode"]):
            return np.sort(np.concatenate((of["mixed"], of["prefill"]))), of["decode"]
        return next(own for own in of.values() if len(own)), None

    def _second(
        self, query: RouteQuery, rows: Ints, now_s: float, admission: AdmissionPolicy | None
    ) -> DecodeChoice:
        """Choose the decode replica among ``rows``."""
        fleet = self._fleet
        tokens = self._lengths.of(query).mean
        job = job_of(fleet, query, rows, now_s, tokens, moved=True)
        promises = None if admission is None else admission.promises(job, fleet)
        places = np.arange(len(rows))
        if promises is not None and promises.holds.any():
            places = np.flatnonzero(promises.holds)
        able = job.of(places)
        chosen = self._untried(able)
        if chosen is None:
            chosen = self._routing.choose_decode(able, fleet)
            self._check_choice(chosen, able)
        figures = fleet.figures[able.rows[chosen]]
        step_s = figures[FIXED_S] + figures[DECODE_S] + able.work_s[chosen]
        kv_transfer_s = fleet.transfer.seconds(query.prompt_tokens) + TRANSFER_STEPS * step_s
        return DecodeChoice(job, promises, int(places[chosen]), float(kv_transfer_s))

    def _decide(self, asked: _Asked, at: int | None) -> RouteDecision:
        job, second = asked.job, asked.second
        if asked.wanted is not None:
            return self._promise(asked, asked.wanted, at)
        if Tier.GUARANTEED not in job.query.tiers or self._admission is not None:
            return self._best_effort(job, second)
        if self._on_decision is not None:
            self._tell(job, None, self._ahead_s(job), second)
        return self._place(job, self._choose(job, self._routing.choose), second)

    def _promise(self, asked: _Asked, admission: AdmissionPolicy, at: int | None) -> RouteDecision:
        """Guarantee it on one of the job's replicas, if one can; on ``at`` if that can. Of many
        replicas the nearest are tested first, and the others only if none of these can."""
        job, second, planned = asked.job, asked.second, asked.planned
        # A replica that is to be tried must be found among all.
        if at is None and not self._fleet.untried:
            near = self._routing.nearest(job, self._fleet)
            if near is not None:
                job = job.of(near)
        asked_for = second, admission, asked.stated, asked.among
        tested = self._guarantees.tested(job, *asked_for)
        if not tested.able and job is not asked.job:
            tested = self._guarantees.tested(asked.job, *asked_for)
        job, promises, apart = tested.job, tested.promises, tested.apart
        if not tested.able:
            return self._unpromised(job, promises, second, tested.over_share)
        self._tell(job, promises, None, second)
        holds = promises.holds
        (places,) = holds.nonzero()
        able = job if len(places) == len(holds) else job.of(places)
        chosen = int(places[self._choose(able, self._routing.choose_able, at)])
        ttft_s = float(promises.ttft_s[chosen])
        if chosen in apart:
            (job, planned), chosen = apart[chosen], 0
        placed = self._place(job, chosen, second, Tier.GUARANTEED, ttft_s)
        self._guarantees.made(job, asked.stated, planned, placed)
        return placed

    def _unpromised(
        self,
        job: Job,
        promises: Promises,
        second: DecodeChoice | None,
        over_share: bool = False,
    ) -> RouteDecision:
        query, wait_s = job.query, float(promises.wait_s.min())
        if query.moves_from:
            return RouteDecision(None, STAYS)
        if query.elsewhere:
            return RouteDecision(None, DECLINED)
        best_effort = Tier.BEST_EFFORT in query.tiers
        if wait_s < inf:
            # A request that can never be guaranteed uses no tenant's share.
            self.shares.refuse(
                query, job.output_tokens, job.now_s, again=not best_effort, over_share=over_share
            )
        if best_effort:
            placed = self._best_effort(job, second, promises)
            return placed._replace(over_share=True) if over_share else placed
        self._tell(job, promises, None, second)
        decision = RouteDecision(None, UNATTAINABLE, over_share=over_share)
        if wait_s == inf:
            return decision
        # Where it waits for a report only, a moment is enough.
        room_s = max(wait_s, LEAST_WAIT_S)
        told_s = self.returns.refused(query, job.output_tokens, room_s, job.now_s)
        return decision._replace(retry_after_s=told_s, room_s=room_s)

    def _best_effort(
        self, job: Job, second: DecodeChoice | None, promises: Promises | None = None
    ) -> RouteDecision:
        ahead_s = self._ahead_s(job)
        self._tell(job, promises, ahead_s, second)
        chosen = self._untried(job)
        if chosen is None:
            chosen = int(ahead_s.argmin())
        return self._place(job, chosen, second, Tier.BEST_EFFORT)

    def _ahead_s(self, job: Job) -> Floats:
        """Predicted time of the prompts of both tiers at each replica, with this one, and until its
        first token where that is another's."""
        figures, rows = self._fleet.figures, job.rows
        waiting_s = figures[rows, PREFILL_S] + figures[rows, BEST_EFFORT_S]
        ahead_s: Floats = waiting_s + job.work_s + job.lead_s
        return ahead_s

    def _tell(
        self,
        job: Job,
        promises: Promises | None,
        ahead_s: Floats | None,
        second: DecodeChoice | None,
    ) -> None:
        if self._on_decision is not None:
            fleet = self._fleet
            ids, untried = fleet.ids, fleet.untried
            self._on_decision(
                DecisionInputs(job, ids, len(fleet), promises, ahead_s, second, untried)
            )

    def _choose(self, job: Job, choose: Callable[[Job, Fleet], int], at: int | None = None) -> int:
        if at is not None and at in job.rows:
            return int(np.searchsorted(job.rows, at))
        chosen = self._untried(job)
        if chosen is None:
            chosen = choose(job, self._fleet)
            self._check_choice(chosen, job)
        return chosen

    def _untried(self, job: Job) -> int | None:
        """A quarantined replica that is to be tried with the next request that it could serve, for
        else it might never be chosen. Not with one that has failed elsewhere already or moves."""
        untried = self._fleet.untried
        if not untried or job.query.avoid or job.query.moves_from:
            return None
        return next((n for n, row in enumerate(job.rows.tolist()) if row in untried), None)

    def _check_choice(self, chosen: int, job: Job) -> None:
        if not 0 <= chosen < len(job.rows):
            raise RuntimeError(
                f"policy {self._routing.name!r} chose replica {chosen} of {len(job.rows)}"
            )

    def _place(
        self,
        job: Job,
        chosen: int,
        second: DecodeChoice | None,
        tier: Tier | None = None,
        ttft_s: float | None = None,
    ) -> RouteDecision:
        """Send it there, and then to ``second`` where it is split, and reserve at both."""
        fleet, query, row = self._fleet, job.query, int(job.rows[chosen])
        made = reservation_of(job, chosen, fleet.ids, tier is not Tier.BEST_EFFORT)
        prefill_id: str | None = None
        if second is None or not job.splits[chosen]:
            if query.prefill_key:
                # Of an earlier decision on it.
                fleet.release((query.prefill_key,))
            fleet.reserve(query.key, made)
            kv_transfer_s = float(job.lead_s[chosen])
        else:
            self._reserve_pair(job, chosen, second, made)
            prefill_id, row, kv_transfer_s = fleet.ids[row], second.row, second.kv_transfer_s
        planned = query.slo.times_s if tier is Tier.GUARANTEED else None
        return RouteDecision(
            fleet.ids[row], PLACED, tier, ttft_s, None, fleet.roles[row], prefill_id, kv_transfer_s,
            planned=planned,
        )  # fmt: skip

    def _reserve_pair(self, job: Job, chosen: int, second: DecodeChoice, made: Reservation) -> None:
        """Reserve its prefill at one replica, as ``made`` less the KV transfer, and its decode at
        another, where it arrives when its prompt is computed: by its due time, or as predicted from
        the work ahead, whichever is later."""
        fleet, query = self._fleet, job.query
        due_s = job.due_s - second.kv_transfer_s
        prefill = made._replace(due_s=due_s, tpot_s=inf, output_tokens=1.0)
        fleet.reserve(query.prefill_key, prefill)
        due_in_s = job.due_s - job.now_s if job.due_s < inf else 0.0
        awaited_s = job.now_s + min(max(due_in_s, self._ahead_s(job)[chosen]), MOST_AWAITED_S)
        later = reservation_of(second.job, second.chosen, fleet.ids, made.promised)
        fleet.reserve(query.key, later._replace(awaited_s=float(awaited_s)))
