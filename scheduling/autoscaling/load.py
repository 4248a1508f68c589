"""The load of a pool of replicas, from which its size is decided; each role is a pool.

Prefill demand is counted when a request asks to be placed, so requests rejected for lack of
replicas count too. All demand is engine time per second and does not depend on the number of
replicas."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission.base import DecodeChoice
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.request.job import Job, RouteDecision, Tier
from sluice.scheduling.request.kernels import Floats, Ints, compiled
from sluice.scheduling.roles import ROLES, Role

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"


MEMORY = 256
"""Requests that are remembered: the rate of their work is then known to a tenth or so."""

MIN_SPAN_S = 1.0
"""Minimum time over which a rate is taken, seconds."""

EXCESS = 2.0
"""Expected work counts this many times, as requests come in bursts and decode afterwards. Measured
beside 1 and 3, see docs/results/promises.md."""


class RecentDemand:
    """The last :data:`MEMORY` requests that asked for a promise, of all replicas."""

    def __init__(self) -> None:
        self._asked = np.zeros((MEMORY, 4))
        self._count = 0

    def add(self, now_s: float, work_s: float, slack_s: float, priority: float) -> None:
        """A request asked at ``now_s`` for a prefill of ``work_s`` within ``slack_s``. ``O(1)``."""
        self._asked[self._count % MEMORY] = now_s, work_s, slack_s, priority
        self._count += 1

    def overtaking_s(self, now_s: float, work_s: Floats, slack_s: float, priority: float) -> float:
        """Prefill work, seconds over all replicas, that a request of ``work_s`` on each should
        leave to requests expected later, due earlier and with more priority per second of work.

        A past request ``j`` that is due within ``s_j`` stands for ``(slack - s_j) / span`` such
        requests, with ``span`` the time since the oldest. It counts with the share of its worth
        that would be lost, so that equals do not yield to each other. ``O(MEMORY)``, compiled."""
        if slack_s == inf:
            return 0.0
        found: float = _overtaking_s(self._asked, self._count, now_s, work_s, slack_s, priority)
        return found


@compiled
def _overtaking_s(
    asked: Floats, count: int, now_s: float, work_on_s: Floats, slack_s: float, priority: float
) -> float:
    oldest_s = asked[count % MEMORY if count > MEMORY else 0, 0]
    span_s = max(now_s - oldest_s, MIN_SPAN_S)
    worth = priority / max(work_on_s.min(), 1e-9)
    total = 0.0
    for row in range(min(count, MEMORY)):
        work_s, before_s = asked[row, 1], slack_s - max(0.0, asked[row, 2])
        other = asked[row, 3] / max(work_s, 1e-9)
        if before_s > 0.0 and other > worth:
            total += work_s * before_s * (1.0 - worth / other)
    return EXCESS * total / span_s


@compiled
def _least_fixed_s(figures: Floats, rows: Ints) -> float:
    least_s = inf
    for row in rows:
        least_s = min(least_s, figures[row, figure.FIXED_S])
    return least_s


MAX_UNPLACED = 4096
"""Unplaced requests that are tracked, so that their retries do not count as new requests."""

MAX_SCALING = 4.0
"""Maximum factor by which the decodes of promised requests are scaled up for requests without a
promise."""

MAX_SLACK_S = 60.0
"""Maximum time until a first token is due that counts, seconds: it may be infinite."""

_MEANS = ("capacity", "head_room", "kv_share")
"""Fields of a :class:`Load` that are means over replicas."""


class Load(NamedTuple):
    """The load of a pool at ``now_s``, as plain numbers for metrics; counts are since the start.

    Attributes:
        ready: replicas that take requests; quarantined ones do not.
        asked: requests with an objective that asked for a promise.
        asked_s, asked_s2: predicted prefill times of these, seconds, and their squares.
        slack_s2: these times multiplied by the times left until the first tokens were due, at most
            ``MAX_SLACK_S``, seconds squared.
        unpromised, unpromised_s: of ``asked`` and ``asked_s``, what no replica could promise
            although an idle one could have.
        judged, attained: requests with an objective that ended, and those that met it.
        decode_share: engine time that promised decodes take now, seconds per second over all
            replicas, without the fixed time of steps.
        capacity: share of a second beside the fixed time of steps at the TPOTs of its decodes; mean
            over replicas with decodes.
        head_room: prefill admission budget over that of an idle replica, mean over the replicas: 0
            and below has no room for another prompt within the reference TTFT.
        kv_share: share of the KV blocks that requests other than best-effort ones hold.
        best_effort_s: predicted time of the waiting best-effort prefills, over all replicas.
        ongoing: requests at replicas or on their way there, of both tiers.
        arrived: requests of any kind that asked to be placed, each time they ask."""

    now_s: float
    ready: float
    asked: float = 0.0
    asked_s: float = 0.0
    asked_s2: float = 0.0
    slack_s2: float = 0.0
    unpromised: float = 0.0
    unpromised_s: float = 0.0
    judged: float = 0.0
    attained: float = 0.0
    decode_share: float = 0.0
    capacity: float = 1.0
    head_room: float = 1.0
    kv_share: float = 0.0
    best_effort_s: float = 0.0
    ongoing: float = 0.0
    arrived: float = 0.0

    @property
    def lost(self) -> float:
        """Requests that were not promised their objective, or missed it, since the start. One
        that did both counts twice."""
        return self.unpromised + self.judged - self.attained

    def follows(self, other: Load) -> bool:
        """Whether it was taken after ``other`` without a restart of the controller between them."""
        return self.now_s > other.now_s and all(
            getattr(self, name) >= getattr(other, name)
            for name in ("asked", "asked_s", "unpromised", "judged", "attained")
        )


class Pressure(NamedTuple):
    """The demand on a pool over ``span_s`` seconds up to now against its ``ready`` replicas.

    ``demand``: engine time per second that the prefills of all requests that asked for a promise
    and the promised decodes took, in replicas that do nothing else; the decodes are scaled up by
    the share of the work that was not promised, as in ``HeadRoom``."""

    span_s: float
    ready: float
    demand: float

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Pressure:
        """From the loads of a pool at several times, the earliest first."""
        first, last = loads[0], loads[-1]
        span_s = last.now_s - first.now_s
        if span_s <= 0.0:
            return cls(0.0, last.ready, 0.0)
        asked_s = last.asked_s - first.asked_s
        promised_s = asked_s - (last.unpromised_s - first.unpromised_s)
        scaling = asked_s / max(promised_s, asked_s / MAX_SCALING) if asked_s > 0.0 else 1.0
        decodes = sum(load.decode_share for load in loads) / len(loads)
        capacity = sum(load.capacity for load in loads) / len(loads)
        return cls(span_s, last.ready, (asked_s / span_s + decodes * scaling) / capacity)


def sum_of(loads: Sequence[Load]) -> Load:
    """The load on the pools of ``loads``, at least one, together: sums, and means weighted by the
    replicas that are ready. ``now_s`` is the first one's."""
    added = {
        name: sum(getattr(load, name) for load in loads)
        for name in Load._fields
        if name not in ("now_s", *_MEANS)
    }
    ready = added["ready"]
    if not ready:
        return Load(loads[0].now_s, **added)
    means = {name: sum(getattr(load, name) * load.ready for load in loads) for name in _MEANS}
    return Load(loads[0].now_s, **added, **{name: total / ready for name, total in means.items()})


class _Counts:
    """Requests and their prefill work, of all replicas or of those of a role."""

    __slots__ = ("asked", "asked_s", "asked_s2", "slack_s2", "unpromised", "unpromised_s")

    def __init__(self) -> None:
        self.asked = self.unpromised = 0
        self.asked_s = self.asked_s2 = self.slack_s2 = self.unpromised_s = 0.0


class Demand:
    """Counts the demand, decision by decision. ``O(replicas)`` each. A split request asks both
    roles, and counts as refused by the one that could not promise it: decode, if that could not."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._of_role = {role: _Counts() for role in ROLES}
        self._unplaced: dict[int, None] = {}
        self.recent = RecentDemand()
        """The latest requests that an idle replica could have served in time and whose tenants
        were not over their shares."""
        self.arrived = 0
        """See :attr:`Load.arrived`; the placer counts them."""

    def count(
        self, job: Job, decision: RouteDecision, fleet: Fleet, second: DecodeChoice | None = None
    ) -> None:
        """Count a decision, with ``second`` as decode choice of a split request. Requests that ask
        for no promise are in ``Load.best_effort_s`` instead."""
        query = job.query
        if Tier.GUARANTEED not in query.tiers or not query.slo.stated:
            return
        key, placed = query.key, decision.prefill_id or decision.replica_id
        again = key in self._unplaced
        if placed is None:
            self._unplaced[key] = None
            if len(self._unplaced) > MAX_UNPLACED:
                del self._unplaced[next(iter(self._unplaced))]
        elif again:
            del self._unplaced[key]
        if again:
            return
        if placed is None:
            place = int(job.work_s.argmin())
        else:
            place = int(job.rows.searchsorted(fleet.row_of[placed]))
        work_s = float(job.work_s[place])
        role = fleet.roles[job.rows[place]]
        if second is not None and not job.splits[place]:
            second = None
        slack_s = job.due_s - job.now_s - float(job.lead_s[place])
        asked = [(self._all, work_s), (self._of_role[role], work_s)]
        if second is not None:
            asked.append((self._of_role["decode"], second.work_s))
        for counts, own_s in asked:
            counts.asked += 1
            counts.asked_s += own_s
            counts.asked_s2 += own_s * own_s
            counts.slack_s2 += own_s * min(max(0.0, slack_s), MAX_SLACK_S)
        # What is too long even for an idle replica does not ask for more of them.
        able = _least_fixed_s(fleet.figures, job.rows) + work_s <= slack_s
        if able and not decision.over_share:
            self.recent.add(job.now_s, work_s, slack_s, job.priority)
        if not able or (placed is not None and decision.tier is not Tier.BEST_EFFORT):
            return
        if second is None or second.able:
            unpromised = self._of_role[role], work_s
        elif second.wait_s < inf:
            unpromised = self._of_role["decode"], second.work_s
        else:
            return
        for counts, own_s in (unpromised, (self._all, work_s)):
            counts.unpromised += 1
            counts.unpromised_s += own_s

    def load(
        self,
        fleet: Fleet,
        now_s: float,
        judged: float = 0.0,
        attained: float = 0.0,
        role: Role | None = None,
    ) -> Load:
        """The load now, of the replicas of ``role`` or of all. ``O(replicas)``. A split request
        that ended counts in ``judged`` of both roles."""
        rows = fleet.capacity(now_s)
        asked = self._all
        if role is not None:
            rows, asked = fleet.of_role(rows, role), self._of_role[role]
        figures = fleet.figures[rows]
        counted = Load(
            now_s,
            float(len(rows)),
            float(asked.asked),
            asked.asked_s,
            asked.asked_s2,
            asked.slack_s2,
            float(asked.unpromised),
            asked.unpromised_s,
            judged,
            attained,
            arrived=float(self.arrived),
        )
        if not len(rows):
            return counted
        step_s = figures[:, figure.STEP_ENDS_S] - figures[:, figure.BEGUN_S]
        decode_s = figures[:, figure.DECODE_S]
        busy = (step_s > 0) & (decode_s > 0)
        decodes = figures[:, figure.DECODES] > 0
        usable = 1.0 - figures[decodes, figure.FIXED_S] / figures[decodes, figure.DECODE_PACE_S]
        idle_s = np.maximum(fleet.settings.reference_ttft_s - figures[:, figure.FIXED_S], 1e-9)
        budget = fleet.budgets_s(rows, now_s) / idle_s
        total = figures[:, figure.TOTAL_BLOCKS].sum()
        kept = (figures[:, figure.FREE_BLOCKS] + figures[:, figure.LENT_BLOCKS]).sum()
        return counted._replace(
            decode_share=float((decode_s[busy] / step_s[busy]).sum()),
            capacity=float(np.clip(usable, 0.3, 1.0).mean()) if decodes.any() else 1.0,
            head_room=float(np.minimum(budget, 1.0).mean()),
            kv_share=float(np.clip(1.0 - kept / total, 0.0, 1.0)) if total > 0 else 0.0,
            best_effort_s=float(figures[:, figure.BEST_EFFORT_S].sum()),
            ongoing=float(figure.requests_at(figures).sum()),
        )
