"""SlideBatching: density first for urgent requests, deadline first for the others."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from operator import attrgetter, itemgetter
from typing import Literal

from pydantic import Field

from scheduling.batching.base import BatchBuilder, BatchPolicy
from scheduling.batching.prefill_share import least_useful_s
from scheduling.latency import LatencyModel
from scheduling.objective import Anchor
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView, RequestView

_Ranked = tuple[float, int, float, float, RequestView]
"""Time left, place in the queue, predicted work, density, and the request: sorts by time left."""


class SlideBatchingOptions(PolicyOptions):
    """Options of :class:`SlideBatching`."""

    boundary: Literal["phi_a", "phi_c"] = Field(
        default="phi_a",
        description="How long a request may have to wait: `phi_a` for the whole queue (Eq. 8), "
        "`phi_c` for those due before it (Eq. 9).",
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Aggressiveness: a request is urgent if it is due within gamma times that "
        "wait. 0 is deadline first for all, a large value density first for all.",
    )
    eta_s: float = Field(
        default=0.05,
        gt=0,
        le=10,
        description="Least time budget of a batch, seconds. The least attainable TPOT objective "
        "in the queue caps it.",
    )
    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start: `envelope` is Eq. 3 and right for "
        "TDG, `first_token` its footnote for first tokens that cannot be buffered, and right for "
        "a TPOT measured since the first token.",
    )
    late: Literal["exclude", "include"] = Field(
        default="exclude",
        description="Whether requests that can no longer meet their deadline limit the time "
        "budget: `include` is the literal Algorithm 1.",
    )
    first_weight: float = Field(
        default=5.5,
        gt=0,
        le=10_000,
        description="Worth of a first token in units of a later one, w_p / w_d. The paper takes "
        "the workload's mean input length over its mean output length; the default is "
        "about that of the Azure 2023 conversation trace (1,237 over 222 tokens).",
    )


class SlideBatching(BatchPolicy):
    """Splits the queue where the load says and fills a time budget. ``O(n log n)``.

    Per request: ``exec``, the predicted time of its pending tokens; ``remain``, the time to the
    deadline of its next token; ``density``, its priority times the token's weight over ``exec``.

    1. ``budget = max(least remain, eta)``.
    2. Urgent are those with ``remain < gamma * phi``, where ``phi = budget / (budget - t_c)`` times
       the sum of ``exec`` over the queue (``phi_a``, Eq. 8) or over those due no later (``phi_c``,
       Eq. 9), and ``t_c`` is the fixed time of a step.
    3. Urgent ones by density descending, then the normal ones by ``remain`` ascending, until the
       budget is full; the prefill that does not fit is chunked to it.

    Our readings:

    - Read literally, one request that is already late pins the least ``remain``, and with it every
      budget, to eta for as long as it lives, though no batch can save it. So by default those
      that would be late even alone in the next batch do not count there; if none is left that
      counts, the budget is eta. They stay in the queue, mostly urgent, and compete by density.
    - An eta above a TPOT objective would make every minimal batch late, so the least stated TPOT
      caps it, of those that a batch with a useful share of prefill could hold
      (:mod:`scheduling.batching.prefill_share`); and where eta itself is not above ``t_c``, twice
      ``t_c`` is taken. Urgent decodes are mostly denser than prefills, so the budget leaves urgent
      prefills that share beside the decodes due within two budgets, which is when one left out
      now could come at the earliest. Those due later run ahead of their pace and cannot for long.
    - Requests without a deadline come after all others, decodes before prefills, and delay none of
      those, so their ``exec`` is in no sum.
    """

    name = "slidebatching"
    source = "ProServe §4.2, Algorithm 1, Eq. 8 and 9"
    Options = SlideBatchingOptions

    def __init__(self, options: SlideBatchingOptions | None = None) -> None:
        options = options or SlideBatchingOptions()
        super().__init__(options)
        self._phi_c = options.boundary == "phi_c"
        self._gamma = options.gamma
        self._eta_s = options.eta_s
        self._anchor = options.anchor
        self._count_late = options.late == "include"
        self._first_weight = options.first_weight

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Rank the queue, then fill the time budget."""
        ranked, budget_s = self._rank(queue, now_s, latency)
        due = bisect_left(ranked, inf, key=itemgetter(0))
        unbound = [entry[4] for entry in ranked[due:]]
        unbound.sort(key=attrgetter("is_prefill"))
        del ranked[due:]

        factor = self._gamma
        if budget_s < inf:
            factor *= budget_s / (budget_s - latency.fixed_s)
        if self._phi_c:
            urgent, normal = _split_by_position(ranked, factor)
        else:
            urgent, normal = _split_at(ranked, factor * sum([entry[2] for entry in ranked]))
        urgent.sort(key=itemgetter(3), reverse=True)
        order = [entry[4] for entry in urgent + normal] + unbound
        if budget_s < inf:
            budget_s = max(budget_s, _least_budget_s(urgent, 2 * budget_s, latency))
        batch.fill(order, budget_s)
        batch.ensure_progress(order)

    def _rank(
        self, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> tuple[list[_Ranked], float]:
        """The queue by time left, and the time budget: infinite where no deadline is stated."""
        fixed_s = latency.fixed_s
        useful_s = least_useful_s(fixed_s, latency)
        work_of = latency.work_s
        anchor = self._anchor
        count_late = self._count_late
        first_weight = self._first_weight
        eta_s = self._eta_s if self._eta_s > fixed_s else 2 * fixed_s
        least_remain_s = inf
        ranked: list[_Ranked] = []
        for index, request in enumerate(queue.requests):
            slo = request.slo
            emitted = request.emitted_tokens
            # RequestView.next_deadline_s(), without a call more per request.
            due_s = slo.deadline_s(emitted + 1, request.arrival_s, request.first_token_s, anchor)
            remain_s = due_s - now_s
            work_s = work_of(request.pending_tokens, request.computed_tokens)
            if remain_s < least_remain_s and (count_late or remain_s >= fixed_s + work_s):
                least_remain_s = remain_s
            tpot_s = slo.tpot_s
            if tpot_s is not None and useful_s <= tpot_s < eta_s:
                eta_s = tpot_s
            # Worth of the request's next token per second of work.
            weight = slo.priority * first_weight if emitted == 0 else slo.priority
            density = weight / work_s if work_s > 0 else inf
            ranked.append((remain_s, index, work_s, density, request))
        ranked.sort()
        if least_remain_s == inf and ranked and ranked[0][0] < inf:
            return ranked, eta_s  # every deadline is lost already
        return ranked, max(least_remain_s, eta_s)


def _least_budget_s(urgent: list[_Ranked], within_s: float, latency: LatencyModel) -> float:
    """Least time budget that leaves urgent prefills their share beside the decodes due
    ``within_s``; 0 where one of the two is missing."""
    decodes_s = 0.0
    computed = []
    for remain_s, _, work_s, _, request in urgent:
        if request.is_prefill:
            computed.append(request.computed_tokens)
        elif remain_s < within_s:
            decodes_s += work_s
    if not computed or decodes_s <= 0:
        return 0.0
    return least_useful_s(latency.fixed_s + decodes_s, latency, max(computed))


def _split_at(ranked: list[_Ranked], boundary_s: float) -> tuple[list[_Ranked], list[_Ranked]]:
    """Those with less time left than ``boundary_s`` (``phi_a``), and the rest."""
    cut = bisect_left(ranked, boundary_s, key=itemgetter(0))
    return ranked[:cut], ranked[cut:]


def _split_by_position(ranked: list[_Ranked], factor: float) -> tuple[list[_Ranked], list[_Ranked]]:
    """Those with less time left than ``factor`` times the work up to them (``phi_c``), the rest."""
    urgent: list[_Ranked] = []
    normal: list[_Ranked] = []
    queued_s = 0.0
    for entry in ranked:
        queued_s += entry[2]
        (urgent if entry[0] < factor * queued_s else normal).append(entry)
    return urgent, normal
