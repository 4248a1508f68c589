"""GoRouting: the gain that a request adds to each replica, and capacity kept for later requests."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import random
from math import inf
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.local_orders import (
    ARRIVAL,
    BY_PRIORITY,
    DEADLINE,
    SHORTEST,
    SLIDE,
)
from sluice.scheduling.fleet.rows import (
    BEGUN_S,
    DECODE_SHARES,
    FIXED_S,
    LENT_DUE_S,
    LENT_PRIORITY,
    LENT_QUEUED,
    LENT_WORK_S,
    MIN_RATE,
    ORDER,
    PACE_S,
    PREFILL_DUE_S,
    PREFILL_S,
    PRIORITY,
    QUEUE_PACE_S,
    QUEUED,
    RUNNING,
    WAITING,
    WORK_S,
    FleetArrays,
    Prefill,
)
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import Job, Numbers
from sluice.scheduling.request.kernels import Floats, Ints, compiled
from sluice.scheduling.routing.base import RoutingPolicy

MIN_WORK_S = 1e-12
"""Work counts as at least this much, seconds: by some models it takes no time."""

MAX_INSERTED = 48
"""At most this number of requests is put in order by insertion, as a sort takes longer."""

NOTHING = Prefill(0.0, inf, inf, 0.0, 0.0)
"""No request."""


class GoRoutingOptions(PolicyOptions):
    """Options of :class:`GoRouting`. The paper names alpha, mu and lambda and gives no values."""

    alpha: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Candidates are the replicas with at least this share of the maximum gain.",
    )
    mu: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="A replica is lightly loaded while its queue takes less than this share of "
        "the request's TTFT objective. The idlest of these is chosen.",
    )
    lambda_: float = Field(
        default=0.5,
        alias="lambda",
        ge=0,
        le=1,
        description="A replica is heavily loaded if its queue with the request would take more "
        "than this share of its TTFT objective. Such a replica is chosen only if no other "
        "candidate is left.",
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="`gamma` of the replicas, if they run `slidebatching`.",
    )
    fallback: Literal["idlest", "random"] = Field(
        default="idlest",
        description="Replica for a request that adds no gain anywhere: the one with the shortest "
        "queue, or, as in the paper, a random one.",
    )
    seed: int | None = Field(
        default=None, description="Seed of the draws; default: from the operating system."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.mu > self.lambda_:
            raise ValueError(f"mu must not be above lambda, got {self.mu} and {self.lambda_}")
        return self


class GoRouting(RoutingPolicy):
    """Among the replicas with about the maximum gain, takes a lightly loaded one, or else the
    fullest one below a load bound.

    For each replica, with ``Q`` its promised prefills and ``r`` the request:

    1. ``exec(Q)``, the time of the queue: ``phi_a(Q)`` (Eq. 8) beside its decodes, or on a prefill
       replica ``phi_p(Q)``, a batch for each prompt; minus the work since the last step's end.
    2. ``gain(Q)``, the priorities of the prefills that end in time in the replica's local order
       (``fleet.local_orders``; SlideBatching takes urgent ones, less than ``gamma * exec(Q)`` left,
       by priority per second of work, then the others by deadline), best-effort ones last.
    3. ``delta = gain(Q + r) - gain(Q)``.

    Candidates ``C`` have ``delta >= alpha * max delta``. If ``max delta`` is above 0: among the
    lightly loaded in ``C`` (``exec(Q) < mu * TTFT``) the least ``exec(Q)``; else among ``C``
    without the heavily loaded (``exec(Q + r) > lambda * TTFT``) the **greatest**; else in ``C`` the
    least. Ties go to the first in the list. Our readings:

    - Only prefills that could be on time if they were next count in the budget of ``phi_a``, at
      least twice the fixed time of a step; a late one would keep it at the minimum. The minimum
      TPOT is over those that can be met, of decodes and of ``Q``, for ``Q + r`` also of ``r``.
    - The paper adds one step of the decodes, ``n_d * b_d``, however long the queue is. Here they
      take the share of each second that their TPOTs need.
    - Best-effort requests yield to promised ones: ``r`` can make them late, and they add nothing to
      ``exec(Q)``. Work that a replica has not reported yet has not begun.
    - The weight of a first token is the same for all requests, so it is left out; an infinite
      deadline is always met. The TTFT runs from arrival to the first deadline of any objective.
    - The fallback is the paper's ``RANDOMSELECT`` only where ``fallback`` is ``random``.
    - On a prefill replica the prefill is due earlier by the KV transfer and the first steps on the
      decode replica, so prefill and mixed replicas may be compared.

    With ``q`` promised prefills of which ``u`` do not go by deadline, and ``b`` best-effort ones:
    ``O(b)`` if the whole queue is on time, else ``O(q + u log u + b)``."""

    name = "go_routing"
    source = "ProServe §4.3, Algorithm 2"
    passed_over = "the request gains less there, or its room is kept"
    Options = GoRoutingOptions

    def __init__(self, options: GoRoutingOptions | None = None) -> None:
        options = options or GoRoutingOptions()
        super().__init__(options)
        self._shares = options.alpha, options.mu, options.lambda_
        self._gamma = options.gamma
        # Spreads load; not used for secrets.
        self._random = random.Random(options.seed) if options.fallback == "random" else None

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica by Algorithm 2."""
        chosen: int = choose(fleet.arrays, job[1:], self._shares, self._gamma)
        if chosen >= 0:
            return chosen
        if self._random is not None:
            return self._random.randrange(len(job.rows))
        return -1 - chosen


class QueueTime(NamedTuple):
    """Time of a queue from now on, seconds, may be negative: ``total_s``, and of it ``stretch`` per
    second of work, ``each_s`` per request, and ``offset_s`` less work done already."""

    total_s: float
    stretch: float
    each_s: float
    offset_s: float


@compiled
def choose(
    fleet: FleetArrays, job: Numbers, shares: tuple[float, float, float], gamma: float
) -> int:
    """The place of the replica by Algorithm 2; where none gains, ``-1`` less the idlest one's.
    ``shares``: ``alpha``, ``mu`` and ``lambda``."""
    alpha, mu, lambda_ = shares
    exec_s, with_s, delta = gains(fleet, job, gamma, True)
    most = delta.max()
    if most <= 0.0:
        return -1 - int(np.argmin(exec_s))
    ttft_s = job[6] - job[5] + job[7]
    light = fullest = idlest = -1
    for place in range(exec_s.shape[0]):
        if delta[place] < alpha * most:
            continue
        own_s = exec_s[place]
        if own_s < mu * ttft_s and (light < 0 or own_s < exec_s[light]):
            light = place
        if with_s[place] <= lambda_ * ttft_s and (fullest < 0 or own_s > exec_s[fullest]):
            fullest = place
        if idlest < 0 or own_s < exec_s[idlest]:
            idlest = place
    if light >= 0:
        return light
    return fullest if fullest >= 0 else idlest


@compiled
def gains(
    fleet: FleetArrays, job: Numbers, gamma: float, own: bool
) -> tuple[Floats, Floats, Floats]:
    """``exec(Q)``, ``exec(Q + r)`` and ``delta`` of each replica of ``job``, see ``GoRouting``.
    ``own``: by each replica's local order and with best-effort requests; else by SlideBatching's,
    without."""
    rows, _, work_s, lead_s, splits, now_s, job_due_s, _, job_tpot_s, priority = job[:10]
    count = rows.shape[0]
    exec_s, with_s, delta = np.empty(count), np.empty(count), np.empty(count)
    figures, _, starts, prefills, _, lent = fleet
    for place in range(count):
        row, alone = rows[place], splits[place]
        of, queue = figures[row], prefills[starts[row] :]
        tpot_s = inf if alone else job_tpot_s
        due_s = job_due_s - lead_s[place]
        new = Prefill(work_s[place], due_s, tpot_s, priority, 0.0)
        before = time_of_queue(of, queue, now_s, NOTHING, 0.0, alone)
        after = time_of_queue(of, queue, now_s, new, 1.0, alone)
        exec_s[place] = max(0.0, before.total_s)
        with_s[place] = max(0.0, after.total_s)
        order = of[ORDER] if own else SLIDE
        delta[place] = delta_of(of, queue, now_s, new, gamma, order, before, after)
        lends = int(of[LENT_QUEUED])
        if own and lends > 0:
            others = lent[starts[row] :][:lends]
            delta[place] += lent_gain(others, now_s, after) - lent_gain(others, now_s, before)
    return exec_s, with_s, delta


@compiled
def time_of_queue(
    figures: Floats, prefills: Floats, now_s: float, new: Prefill, more: float, alone: bool
) -> QueueTime:
    """Time of the queue from now on, with ``more`` (0 or 1) requests like ``new``."""
    fixed_s = figures[FIXED_S]
    queued = figures[QUEUED] + more
    offset_s = 0.0
    if figures[WAITING] + figures[RUNNING] > 0.0:
        offset_s = min(0.0, figures[BEGUN_S] - now_s)
    total_s = figures[PREFILL_S] + new.work_s
    if alone:
        return QueueTime(total_s + queued * fixed_s + offset_s, 1.0, fixed_s, offset_s)
    budget_s = min(figures[PACE_S], figures[QUEUE_PACE_S], new.tpot_s)
    if more > 0.0 and new.due_s - now_s >= fixed_s + new.work_s:
        budget_s = min(budget_s, new.due_s - now_s)
    for item in range(int(figures[QUEUED])):
        left_s = prefills[item, PREFILL_DUE_S] - now_s
        if left_s >= budget_s:
            break
        if left_s >= fixed_s + prefills[item, WORK_S]:
            budget_s = left_s
            break
    budget_s = max(budget_s, 2.0 * fixed_s)
    taken = figures[DECODE_SHARES]
    if budget_s < inf and fixed_s > 0.0:
        taken += fixed_s / budget_s
    stretch = 1.0 / max(MIN_RATE, 1.0 - taken)
    return QueueTime(stretch * total_s + offset_s, stretch, 0.0, offset_s)


@compiled
def delta_of(
    figures: Floats,
    prefills: Floats,
    now_s: float,
    new: Prefill,
    gamma: float,
    order: float,
    before: QueueTime,
    after: QueueTime,
) -> float:
    """Gain of the queue with the request minus the gain without it."""
    queued = int(figures[QUEUED])
    # If all end before the first deadline, all are on time in any order.
    first_s = new.due_s - now_s
    if queued > 0:
        first_s = min(first_s, prefills[0, PREFILL_DUE_S] - now_s)
    if first_s >= max(0.0, after.total_s):
        return new.priority
    # A request that is urgent without the new one is also urgent with it.
    urgent_s = urgent_below_s(order, gamma, after.total_s)
    urgent = 0
    while urgent < queued and is_urgent(prefills[urgent, PREFILL_DUE_S] - now_s, urgent_s):
        urgent += 1
    dense = by_worth(prefills, urgent, order)
    without = gain_of(prefills[:queued], dense, now_s, gamma, order, before, NOTHING)
    return gain_of(prefills[:queued], dense, now_s, gamma, order, after, new) - without


@compiled
def by_worth(prefills: Floats, urgent: int, order: float) -> Ints:
    """The first ``urgent`` prefills by worth descending, equal ones as they are."""
    worth, dense = np.empty(urgent), np.empty(urgent, np.int64)
    for item in range(urgent):
        own = worth_of(order, prefills[item, PRIORITY], prefills[item, WORK_S])
        if urgent > MAX_INSERTED:
            worth[item] = -own
            continue
        place = item
        while place > 0 and worth[place - 1] < own:
            worth[place], dense[place] = worth[place - 1], dense[place - 1]
            place -= 1
        worth[place], dense[place] = own, item
    return np.argsort(worth, kind="mergesort") if urgent > MAX_INSERTED else dense


@compiled
def urgent_below_s(order: float, gamma: float, total_s: float) -> float:
    """Requests with less time left than this are urgent: they go by worth, before the others, which
    go by deadline. Infinite: all are."""
    if order == DEADLINE:
        return -inf
    return gamma * max(0.0, total_s) if order == SLIDE else inf


@compiled
def is_urgent(left_s: float, urgent_s: float) -> bool:
    """Whether a request is, with ``left_s`` until its deadline; that may be infinite."""
    return left_s < urgent_s or urgent_s == inf


@compiled
def worth_of(order: float, priority: float, work_s: float) -> float:
    """By what urgent requests go, descending; equal ones by deadline."""
    if order == ARRIVAL:
        return 0.0
    if order == BY_PRIORITY:
        return priority
    return (1.0 if order == SHORTEST else priority) / max(work_s, MIN_WORK_S)


@compiled
def lent_gain(lent: Floats, now_s: float, takes: QueueTime) -> float:
    """Sum of the priorities of the best-effort prefills that end in time behind a queue."""
    gain, ends_s = 0.0, takes.total_s
    for item in range(lent.shape[0]):
        own_s = takes.stretch * lent[item, LENT_WORK_S] + takes.each_s
        if max(0.0, ends_s + own_s) <= lent[item, LENT_DUE_S] - now_s:
            ends_s += own_s
            gain += lent[item, LENT_PRIORITY]
    return gain


@compiled
def gain_of(
    prefills: Floats,
    dense: Ints,
    now_s: float,
    gamma: float,
    order: float,
    takes: QueueTime,
    new: Prefill,
) -> float:
    """Priorities, summed, of the prefills that end in time in the local order, with ``new`` if its
    priority is above 0. ``dense``: prefills that may be urgent, by worth descending."""
    work_s, due_s, _, priority, _ = new
    urgent_s = urgent_below_s(order, gamma, takes.total_s)
    own_s = due_s - now_s
    own_worth = worth_of(order, priority, work_s)
    own_end = takes.stretch * work_s + takes.each_s
    to_come = priority > 0.0
    gain, ends_s = 0.0, takes.offset_s
    urgent = 0
    for place in range(dense.shape[0] + 1):
        item = dense[place] if place < dense.shape[0] else -1
        if item >= 0 and not is_urgent(prefills[item, PREFILL_DUE_S] - now_s, urgent_s):
            continue
        # The new request goes before the first one of lower worth, or after all.
        if (
            to_come
            and is_urgent(own_s, urgent_s)
            and (
                item < 0
                or worth_of(order, prefills[item, PRIORITY], prefills[item, WORK_S]) < own_worth
            )
        ):
            to_come = False
            ends_s += own_end
            gain += priority if max(0.0, ends_s) <= own_s else 0.0
        if item >= 0:
            urgent += 1
            ends_s += takes.stretch * prefills[item, WORK_S] + takes.each_s
            if max(0.0, ends_s) <= prefills[item, PREFILL_DUE_S] - now_s:
                gain += prefills[item, PRIORITY]
    # By deadline: the urgent ones came first.
    for item in range(urgent, prefills.shape[0]):
        left_s = prefills[item, PREFILL_DUE_S] - now_s
        if to_come and own_s < left_s:
            to_come = False
            ends_s += own_end
            gain += priority if max(0.0, ends_s) <= own_s else 0.0
        ends_s += takes.stretch * prefills[item, WORK_S] + takes.each_s
        gain += prefills[item, PRIORITY] if max(0.0, ends_s) <= left_s else 0.0
    if to_come:
        ends_s += own_end
        gain += priority if max(0.0, ends_s) <= own_s else 0.0
    return gain
