"""What replicas can guarantee a request, beside what is kept for others."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy, Promises
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_S, FIXED_S, PREFILL_S
from sluice.scheduling.pairs import DecodeChoice, together
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.jobs import job_of
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.retry_after import RetryAfter
from sluice.scheduling.request.job import Job, RouteDecision, RouteQuery
from sluice.scheduling.request.kernels import Floats, Ints, compiled, most_work_s
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.tenancy.fair_shares import FairShares

# An end-to-end time as a first token and a pace.
#
# Admission and engines plan first tokens and paces. An end-to-end time says neither, so it is
# shared out: ``TTFT + (tokens - 1) * TPOT`` is the end-to-end time, where ``tokens`` bounds the
# length of the output. A replica that meets both meets the end-to-end time, if the output is no
# longer than that.
#
# How it is shared out is ours: both get as many times what a replica would take for them now, but
# the first token no more than :data:`MOST_FIRST` times; the pace gets the rest. A pace is what
# costs others' time, as each step of a decode has a fixed part, so slack is worth more there.
#
# This is for guaranteed requests, where the length is a bound and the replicas' work is known.
# Code that only expects a length, for requests without a guarantee, converts an end-to-end time by
# :func:`sluice.scheduling.request.deadline.paced`.

LEAST_SPARE = 1.25
"""The shares follow a replica's current load if it would end this many times sooner than required.
Otherwise they are those of an idle replica, so that admission can tell "never" from "not now"."""

MOST_FIRST = 2.0
"""The first token gets at most this many times its predicted time, so that slack goes to the
pace."""

LEAST_FIRST = 0.1
"""But at least this share of the whole time, where that is ample: a short prompt of a long answer
need not run at once, and may go to a busier replica."""

_LEAST_S = 1e-9


def shared_out(query: RouteQuery, tokens: float, fleet: Fleet, rows: Ints) -> SLO:
    """The objective of ``query`` with its end-to-end time shared out; itself where it states none.

    The shares are those of the replica that would end first. A TTFT or TPOT that is stated and
    tighter stays, and leaves the rest to the other. The end-to-end time itself is gone from the
    result: a replica that expects a longer output than ``tokens`` would make earlier deadlines of
    it than those that were guaranteed. ``O(rows)``, vectorised.

    Args:
        tokens: bound of the output's length, >= 1.
        fleet: what the replicas have to do.
        rows: of the fleet, those that may serve it; at least one.
    """
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    if e2e_s == inf:
        return query.slo
    later = max(0.0, tokens - 1.0)
    busy_s, busy_first_s, idle_s, idle_first_s = quickest(
        fleet.figures, fleet.pieces, rows, float(query.prompt_tokens), later
    )
    left_s = e2e_s - query.waited_s
    if left_s >= LEAST_SPARE * busy_s:
        first_s = min(left_s / busy_s, MOST_FIRST) * busy_first_s
        first = query.waited_s + max(first_s, LEAST_FIRST * left_s)
    else:
        first = min(e2e_s / idle_s, MOST_FIRST) * idle_first_s
    if not 0.0 < first < inf:
        # Of a model of extreme figures: what it cannot predict cannot be shared out.
        return query.slo
    if later == 0.0:
        return query.slo.with_times((min(ttft_s, e2e_s), query.slo.tpot_s, None))
    pace = (e2e_s - first) / later
    if ttft_s < first:
        first, pace = ttft_s, (e2e_s - ttft_s) / later
    if tpot_s < pace:
        pace, first = tpot_s, min(ttft_s, e2e_s - later * tpot_s)
    return query.slo.with_times((max(first, _LEAST_S), max(pace, _LEAST_S), None))


@compiled
def quickest(
    figures: Floats, pieces: Floats, rows: Ints, prompt_tokens: float, later: float
) -> tuple[float, float, float, float]:
    """The predicted time of the whole answer, ``later`` tokens behind the first one, at the replica
    that would end first, and of the first token there; then both as if all of them were idle.

    Nothing of the prompt counts as cached, and the context of the decode is that half-way through.
    """
    busy_s = idle_s = inf
    busy_first_s = idle_first_s = 0.0
    for row in rows:
        of = figures[row]
        first_s = of[FIXED_S] + most_work_s(pieces[row], max(1.0, prompt_tokens), 0.0)
        step_s = of[FIXED_S] + most_work_s(pieces[row], 1.0, prompt_tokens + 0.5 * later)
        whole_s = max(first_s + later * step_s, _LEAST_S)
        if whole_s < idle_s:
            idle_s, idle_first_s = whole_s, first_s
        first_s += of[PREFILL_S]
        whole_s = max(first_s + later * (step_s + of[DECODE_S]), _LEAST_S)
        if whole_s < busy_s:
            busy_s, busy_first_s = whole_s, first_s
    return busy_s, busy_first_s, idle_s, idle_first_s


class Tested(NamedTuple):
    """What replicas can guarantee.

    Attributes:
        job: the request on the replicas that were tested.
        promises: of each of them.
        apart: the job by the plan of each replica with margins of its own, and that plan, by its
            place in ``job``.
        able: whether one of them may guarantee it.
        over_share: one could, but its tenant is over its share.
    """

    job: Job
    promises: Promises
    apart: dict[int, tuple[Job, SLO]]
    able: bool
    over_share: bool = False


class Guarantees:
    """Plans objectives by the margins, and tests what replicas can guarantee.

    Args:
        fleet: the replica table.
        calibration: by how much earlier than due a guarantee is planned; ``None``: not earlier.
        lengths: observed output lengths.
        shares: fair shares of the tenants.
        returns: refused requests that will retry.
    """

    def __init__(
        self,
        fleet: Fleet,
        calibration: Calibration | None,
        lengths: OutputLengths,
        shares: FairShares,
        returns: RetryAfter,
    ) -> None:
        self._fleet = fleet
        self._calibration = calibration
        self._lengths = lengths
        self._shares = shares
        self._returns = returns

    def plan(self, stated: SLO, now_s: float, replica_id: str = "") -> SLO:
        """By when what is stated is planned, by one replica or by any that is not set apart."""
        if self._calibration is None:
            return stated
        return self._calibration.plan(stated, now_s, replica_id)

    def shared_out(self, query: RouteQuery, planned: SLO, rows: Ints) -> RouteQuery:
        """The query with the objective by which a guarantee is planned on ``rows``; an end-to-end
        time is shared out."""
        query = query._replace(slo=planned)
        if planned.e2e_s is None:
            return query
        bound = self._lengths.of(query).bound
        return query._replace(slo=shared_out(query, bound, self._fleet, rows))

    def tested(
        self,
        job: Job,
        second: DecodeChoice | None,
        admission: AdmissionPolicy,
        stated: SLO,
        among: int,
    ) -> Tested:
        """What the replicas of ``job`` can guarantee, beside what is kept for others.

        Args:
            second: the decode choice, if the request could be split.
            admission: tests them.
            stated: its objective; the job has the planned one.
            among: number of replicas that could serve it, which keep for others together.
        """
        promises = admission.promises(job, self._fleet)
        apart = self._set_apart(job, promises, admission, stated)
        if second is not None:
            promises = together(job, promises, second)
        elif not job.moved:
            promises = promises._replace(ttft_s=promises.ttft_s + job.lead_s)
        # Others than sound ones are among the candidates only where there are no sound ones.
        sound = self._fleet.is_sound(int(job.rows[0]), job.now_s)
        if not sound or not promises.holds.any():
            return Tested(job, promises, apart, able=False)
        # Each replica keeps its part of what is due.
        line_tokens = self._returns.kept_tokens(job.query, job.now_s) / among
        reserve_tokens = self._shares.reserve_tokens(job.query.tenant, job.now_s)
        for tokens, over_share in ((line_tokens, False), (reserve_tokens, True)):
            if tokens > 0.0:
                promises = self._with_room_left(job, promises, second, admission, tokens)
                if not promises.holds.any():
                    return Tested(job, promises, apart, able=False, over_share=over_share)
        return Tested(job, promises, apart, able=True)

    def _set_apart(
        self, job: Job, promises: Promises, admission: AdmissionPolicy, stated: SLO
    ) -> dict[int, tuple[Job, SLO]]:
        """See :attr:`Tested.apart`; what those replicas can guarantee by it is put into
        ``promises``. ``O(their number)``, which is small.
        """
        if self._calibration is None:
            return {}
        found: dict[int, tuple[Job, SLO]] = {}
        for replica_id in self._calibration.apart:
            (places,) = np.nonzero(job.rows == self._fleet.row_of.get(replica_id, -1))
            if not len(places) or job.splits[places[0]]:
                continue
            row = job.rows[places]
            planned = self.plan(stated, job.now_s, replica_id)
            query = self.shared_out(job.query, planned, row)
            own = job_of(self._fleet, query, row, job.now_s, self._lengths.of(query).mean)
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

    def made(self, job: Job, stated: SLO, planned: SLO, decision: RouteDecision) -> None:
        """``decision`` guarantees ``job``. It counts in its tenant's share, and its margin is known
        until the request has ended."""
        query, tokens = job.query, job.output_tokens
        self._shares.promise(query, tokens, job.now_s)
        self._returns.promised(query, tokens, job.now_s)
        if query.brings_kv:
            # Two replicas serve it, so neither is to blame for its times.
            self.forget(query)
        elif self._calibration is not None:
            # A pair keeps a guarantee together, so neither of the two is to blame for it.
            replica_id = (decision.replica_id or "") if decision.prefill_id is None else ""
            self._calibration.promised(_name(query), stated, planned, replica_id)

    def forget(self, query: RouteQuery) -> None:
        """Forget the margin of an earlier guarantee of the request."""
        if self._calibration is not None:
            self._calibration.dropped(_name(query))


def _name(query: RouteQuery) -> Hashable:
    """What the endings of requests call it."""
    return query.request_id or query.key
