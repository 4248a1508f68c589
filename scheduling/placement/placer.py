"""One decision: what is guaranteed, where the request goes, and what that takes of the fleet.

The controller makes it for real requests and the simulator for simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy, Promises
from sluice.scheduling.admission.room import LEAST_WAIT_S
from sluice.scheduling.autoscaling.load import Demand
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import BEST_EFFORT_S, DECODE_S, FIXED_S, PREFILL_S, work_on
from sluice.scheduling.pairs import TRANSFER_STEPS, DecodeChoice, together
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.cold_start import ColdStart
from sluice.scheduling.placement.jobs import first_due_s, prefill_of, reservation_of
from sluice.scheduling.placement.output_lengths import OutputLength, OutputLengths
from sluice.scheduling.placement.pacing import shared_out
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


Witness = Callable[[DecisionInputs], None]


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


class _Tested(NamedTuple):
    """What replicas can guarantee.

    Attributes:
        job: the request on the replicas that were tested.
        promises: of each of them.
        apart: see :meth:`Placer._set_apart`.
        able: whether one of them may guarantee it.
        over_share: one could, but its tenant is over its share.
    """

    job: Job
    promises: Promises
    apart: dict[int, tuple[Job, SLO]]
    able: bool
    over_share: bool = False


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
    (:mod:`sluice.scheduling.placement.pacing`), by the observed lengths of outputs.

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
        witness: receives the inputs of each decision with at least one replica to choose.
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
        witness: Witness | None = None,
        calibration: Calibration | None = None,
        lengths: OutputLengths | None = None,
        cold_start: ColdStart | None = None,
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._admission = admission
        self._witness = witness
        self._calibration = calibration
        self._lengths = lengths if lengths is not None else OutputLengths()
        self.cold_start = cold_start
        self.demand = Demand()
        """Demand, counted decision by decision."""
        self.shares = FairShares()
        """Fair shares of guaranteed tokens between tenants."""
        self.returns = RetryAfter()
        """Retry times of refused requests."""

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
        rows = plan(asked, self._fleet, admission, self._routing.choose_able)
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
        if not len(rows):
            if self.cold_start is None or query.elsewhere:
                return RouteDecision(None, DECLINED if query.elsewhere else NO_REPLICA)
            promised = self._promise_wanted(query) is not None
            tokens = self._expected(query).mean
            return self.cold_start.decide(query, fleet, now_s, tokens, promised)
        if query.avoid:
            rows = fleet.but(rows, query.avoid)
        if self._calibration is not None and not query.moves_from:
            # Of an earlier decision on it.
            self._calibration.dropped(_name(query))
        wanted = self._promise_wanted(query)
        if query.moves_from:
            rows = rows[rows != fleet.row_of.get(query.moves_from, -1)]
            if query.brings_kv:  # a prefill replica cannot fetch it
                rows = rows[~fleet.are(rows, "prefill")]
            if not len(rows) or (wanted is None and not query.brings_kv):
                return RouteDecision(None, STAYS)
        stated = planned = query.slo
        if wanted is not None:
            planned = self._plan(stated, now_s)
            query = self._shared_out(query, planned, rows)
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
        job = self._job(query, rows, now_s, second)
        if wanted is not None:
            asked = now_s, float(job.work_s.min()), job.due_s - now_s, float(stated.priority)
            job = job._replace(worthier_s=self.demand.recent.worthier_s(*asked) / among)
        return _Asked(job, second, wanted, stated, planned, among)

    def _plan(self, stated: SLO, now_s: float, replica_id: str = "") -> SLO:
        """By when what is stated is planned, by one replica or by any that is not set apart."""
        if self._calibration is None:
            return stated
        return self._calibration.plan(stated, now_s, replica_id)

    def _shared_out(self, query: RouteQuery, planned: SLO, rows: Ints) -> RouteQuery:
        """The query with the objective by which a guarantee is planned on ``rows``; an end-to-end
        time is shared out."""
        query = query._replace(slo=planned)
        if planned.e2e_s is None:
            return query
        bound = self._expected(query).bound
        return query._replace(slo=shared_out(query, bound, self._fleet, rows))

    def _expected(self, query: RouteQuery) -> OutputLength:
        return self._lengths.expected(query.slo.service_class, query.tenant, query.output_tokens)

    def _remember(
        self, query: RouteQuery, stated: SLO, planned: SLO, decision: RouteDecision
    ) -> None:
        """Remember what was guaranteed, until the request has ended."""
        if self._calibration is not None and query.brings_kv:
            # Two replicas serve it, so neither is to blame for its times.
            self._calibration.dropped(_name(query))
        elif self._calibration is not None:
            # A pair keeps a guarantee together, so neither of the two is to blame for it.
            replica_id = (decision.replica_id or "") if decision.prefill_id is None else ""
            self._calibration.promised(_name(query), stated, planned, replica_id)

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
        job = self._job(query, rows, now_s, moved=True)
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
        if self._witness is not None:
            self._tell(job, None, self._ahead_s(job), second)
        return self._place(job, self._choose(job, self._routing.choose), second)

    def _promise(self, asked: _Asked, admission: AdmissionPolicy, at: int | None) -> RouteDecision:
        """Guarantee it on one of the job's replicas, if one can; on ``at`` if that can. Of many
        replicas the nearest are tested first, and the others only if none of these can."""
        second, stated, planned = asked.second, asked.stated, asked.planned
        near = None
        # A replica that is to be tried must be found among all.
        if at is None and not self._fleet.untried:
            near = self._routing.nearest(asked.job, self._fleet)
        tested = self._tested(asked, admission, near)
        if near is not None and not tested.able:
            tested = self._tested(asked, admission)
        job, promises, apart = tested.job, tested.promises, tested.apart
        if not tested.able:
            return self._unpromised(job, promises, second, tested.over_share)
        self._tell(job, promises, None, second)
        holds = promises.holds
        (places,) = holds.nonzero()
        able = job if len(places) == len(holds) else job.of(places)
        chosen = int(places[self._choose(able, self._routing.choose_able, at)])
        ttft_s = float(promises.ttft_s[chosen])
        self.shares.promise(job.query, job.output_tokens, job.now_s)
        self.returns.promised(job.query, job.output_tokens, job.now_s)
        if chosen in apart:
            (job, planned), chosen = apart[chosen], 0
        placed = self._place(job, chosen, second, Tier.GUARANTEED, ttft_s)
        self._remember(job.query, stated, planned, placed)
        return placed

    def _tested(
        self, asked: _Asked, admission: AdmissionPolicy, places: Ints | None = None
    ) -> _Tested:
        """What the replicas of the job can guarantee, or those at ``places``, beside what is kept
        for others."""
        job, second, _, stated, _, among = asked
        if places is not None:
            job = job.of(places)
        promises = admission.promises(job, self._fleet)
        apart = self._set_apart(job, promises, admission, stated)
        if second is not None:
            promises = together(job, promises, second)
        elif not job.moved:
            promises = promises._replace(ttft_s=promises.ttft_s + job.lead_s)
        # Others than sound ones are among the candidates only where there are no sound ones.
        sound = self._fleet.is_sound(int(job.rows[0]), job.now_s)
        if not sound or not promises.holds.any():
            return _Tested(job, promises, apart, able=False)
        # Each replica keeps its part of what is due.
        line_tokens = self.returns.kept_tokens(job.query, job.now_s) / among
        reserve_tokens = self.shares.reserve_tokens(job.query.tenant, job.now_s)
        for tokens, over_share in ((line_tokens, False), (reserve_tokens, True)):
            if tokens > 0.0:
                promises = self._with_room_left(job, promises, second, admission, tokens)
                if not promises.holds.any():
                    return _Tested(job, promises, apart, able=False, over_share=over_share)
        return _Tested(job, promises, apart, able=True)

    def _set_apart(
        self, job: Job, promises: Promises, admission: AdmissionPolicy, stated: SLO
    ) -> dict[int, tuple[Job, SLO]]:
        """The job by the plan of each replica with margins of its own, and that plan, by its place
        in ``job``; what they can guarantee by it is put into ``promises``. ``O(their number)``,
        which is small.
        """
        if self._calibration is None:
            return {}
        found: dict[int, tuple[Job, SLO]] = {}
        for replica_id in self._calibration.apart:
            (places,) = np.nonzero(job.rows == self._fleet.row_of.get(replica_id, -1))
            if not len(places) or job.splits[places[0]]:
                continue
            row = job.rows[places]
            planned = self._plan(stated, job.now_s, replica_id)
            own = self._job(self._shared_out(job.query, planned, row), row, job.now_s)
            own = own._replace(worthier_s=job.worthier_s)
            told = admission.promises(own, self._fleet)
            promises.holds[places], promises.ttft_s[places] = told.holds, told.ttft_s
            promises.wait_s[places], promises.binds[places] = told.wait_s, told.binds
            found[int(places[0])] = own, planned
        return found

    def _with_room_left(
        self,
        job: Job,
        promises: Promises,
        second: DecodeChoice | None,
        admission: AdmissionPolicy,
        reserve_tokens: float,
    ) -> Promises:
        """Keep the ``promises`` that leave capacity for one more prompt of ``reserve_tokens``."""
        kept = admission.promises(job._replace(reserve_tokens=reserve_tokens), self._fleet)
        if second is not None:
            moved = second.job._replace(reserve_tokens=reserve_tokens)
            able = admission.promises(moved, self._fleet)
            kept = together(job, kept, second._replace(promises=able))
        holds = promises.holds & kept.holds
        return promises._replace(holds=holds, wait_s=kept.wait_s, binds=kept.binds)

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
        if self._witness is not None:
            fleet = self._fleet
            ids, untried = fleet.ids, fleet.untried
            self._witness(DecisionInputs(job, ids, len(fleet), promises, ahead_s, second, untried))

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

    def _job(
        self,
        query: RouteQuery,
        rows: Ints,
        now_s: float,
        second: DecodeChoice | None = None,
        moved: bool = False,
    ) -> Job:
        """The query on ``rows``. Prefill replicas among them would compute its prompt for
        ``second``, if given; ``moved``: see :class:`~sluice.scheduling.request.job.Job`."""
        fleet = self._fleet
        moved = moved or query.brings_kv
        if moved:
            cached = np.full(len(rows), max(0.0, query.prompt_tokens - 1.0))
            work_s = work_on(fleet.pieces, rows, float(query.prompt_tokens), cached)
            lead_s = np.zeros(len(rows))
        else:
            cached, work_s, lead_s = prefill_of(fleet, query, rows)
        tokens = self._expected(query).mean
        due_s = first_due_s(query, now_s, tokens)
        splits = np.zeros(len(rows), np.bool_)
        if query.brings_kv:
            lead_s[:] = fleet.transfer.seconds(query.prompt_tokens)
        if second is not None:
            splits = fleet.are(rows, "prefill")
            lead_s[splits] = second.kv_transfer_s
        return Job(query, now_s, rows, cached, work_s, due_s, tokens, lead_s, splits, moved)

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
        name, role = fleet.ids[row], fleet.roles[row]
        planned = query.slo.times_s if tier is Tier.GUARANTEED else None
        if second is None or not job.splits[chosen]:
            if query.prefill_key:
                # Of an earlier decision on it.
                fleet.release((query.prefill_key,))
            fleet.reserve(query.key, made)
            lead_s = float(job.lead_s[chosen])
            return RouteDecision(
                name, PLACED, tier, ttft_s, None, role, kv_transfer_s=lead_s, planned=planned
            )
        kv_transfer_s = second.kv_transfer_s
        fleet.reserve(
            query.prefill_key,
            made._replace(due_s=job.due_s - kv_transfer_s, tpot_s=inf, output_tokens=1.0),
        )
        # It arrives when its prompt is computed: by its due time, or as predicted from the work
        # ahead, whichever is later.
        due_in_s = job.due_s - job.now_s if job.due_s < inf else 0.0
        awaited_s = job.now_s + min(max(due_in_s, self._ahead_s(job)[chosen]), MOST_AWAITED_S)
        later = reservation_of(second.job, second.chosen, fleet.ids, made.promised)
        fleet.reserve(query.key, later._replace(awaited_s=float(awaited_s)))
        target = second.row
        return RouteDecision(
            fleet.ids[target], PLACED, tier, ttft_s, None, fleet.roles[target], name, kv_transfer_s,
            planned=planned,
        )  # fmt: skip


def _name(query: RouteQuery) -> Hashable:
    """What the endings of requests call it."""
    return query.request_id or query.key
