"""What replicas can guarantee a request, beside what is kept for others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy, Promises
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.pairs import DecodeChoice, together
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.jobs import job_of
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.pacing import shared_out
from sluice.scheduling.placement.retry_after import RetryAfter
from sluice.scheduling.request.job import Job, RouteDecision, RouteQuery
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.tenancy.fair_shares import FairShares


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
