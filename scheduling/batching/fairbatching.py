"""FairBatching: a time budget from the slack of decodes, spent in three groups."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from operator import itemgetter

from pydantic import Field

from scheduling.batching.base import BatchBuilder, BatchPolicy
from scheduling.batching.prefill_share import least_useful_s
from scheduling.latency import LatencyModel
from scheduling.objective import Anchor
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView, RequestView


class FairBatchingOptions(PolicyOptions):
    """Options of :class:`FairBatching`."""

    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start. `envelope` is the paper's text; "
        "with it a request that got its first token early may stall until its slack is spent, "
        "which a TPOT measured since the first token counts as a miss.",
    )


class FairBatching(BatchPolicy):
    """Urgent decodes, then prefills, then the other decodes, within a time budget. ``O(n log n)``.

    With ``slack = deadline of the next token - now``:

    1. ``budget = max(least slack, least TPOT)`` over the decodes (§3.2): the batch ends before
       the first decode is due, but is never so small that it is all overhead. Without a decode
       only the engine's token limit binds.
    2. Three groups (§3.3), each by slack ascending: decodes with ``slack < budget + least TPOT``,
       which would be late if left out now; prefills; the other decodes.
    3. Taken in that order until the budget is full; the prefill that does not fit is chunked to it.

    Our readings:

    - The first group is not cut by the time budget: §3.3 says that urgent decodes are always
      included and that the policy falls back to Sarathi's behaviour under extreme load.
    - Only decodes that state a TPOT set the budget. One whose TPOT no batch with a useful share of
      prefill could hold (:mod:`scheduling.batching.prefill_share`) does not; and with urgent
      decodes in the batch, prefills that have a deadline keep that share beside them.
    - Requests without a deadline have infinite slack and come after all others, decodes before
      prefills, so that an answer that has begun is not held up by those that have not.
    - A prefill that recomputes after a preemption is a prefill, with the deadline of its next
      token.
    """

    name = "fairbatching"
    source = "FairBatching §3.2, §3.3, Algorithm 1"
    Options = FairBatchingOptions

    def __init__(self, options: FairBatchingOptions | None = None) -> None:
        options = options or FairBatchingOptions()
        super().__init__(options)
        self._anchor = options.anchor

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill the time budget group by group."""
        anchor = self._anchor
        useful_s = least_useful_s(latency.fixed_s, latency)
        # Ordering by deadline is ordering by slack; the index keeps ties in order of arrival.
        decodes: list[tuple[float, int, RequestView]] = []
        prefills: list[tuple[float, int, RequestView]] = []
        first_due_s = min_tpot_s = inf
        for index, request in enumerate(queue.requests):
            due_s = request.next_deadline_s(anchor)
            if request.is_prefill:
                prefills.append((due_s, index, request))
                continue
            decodes.append((due_s, index, request))
            tpot_s = request.slo.tpot_s
            if tpot_s is not None and tpot_s >= useful_s:
                first_due_s = min(first_due_s, due_s)
                min_tpot_s = min(min_tpot_s, tpot_s)
        decodes.sort()
        prefills.sort()
        budget_s = max(first_due_s - now_s, min_tpot_s)
        urgent_before_s = now_s + budget_s + min_tpot_s

        urgent = 0
        for due_s, _, request in decodes:
            if due_s >= urgent_before_s:
                break
            urgent += 1
            batch.add(request)
        due = bisect_left(prefills, inf, key=itemgetter(0))
        if urgent and due:
            deepest = max([entry[2].computed_tokens for entry in prefills[:due]])
            budget_s = max(budget_s, least_useful_s(batch.cost_s, latency, deepest))
        entries = prefills[:due] + decodes[urgent:] + prefills[due:]
        rest = [request for _, _, request in entries]
        batch.fill(rest, budget_s)
        batch.ensure_progress(rest)
