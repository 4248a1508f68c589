"""FairBatching: a time budget from the slack of decodes, spent in three groups."""

from __future__ import annotations

from math import inf

import numpy as np
from pydantic import Field

from sluice.scheduling.batching.base import BatchPolicy, PrefillShareOptions, least_useful_s
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import DEADLINE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import COMPUTED, TPOT, by_deadline, deadlines_s, is_prefill
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView


class FairBatchingOptions(PrefillShareOptions):
    """Options of :class:`FairBatching`."""

    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start. `envelope` is the paper's text; "
        "with it a request with an early first token may stall until its slack is spent, which "
        "a TPOT measured since the first token counts as a violation. `last_token` spends no "
        "slack at all, for objectives on the time between tokens.",
    )


class FairBatching(BatchPolicy):
    """Urgent decodes, prefills, other decodes (§3.3) within ``max(min slack, min TPOT)`` of the
    decodes (§3.2). ``O(n log n)``.

    Our readings: urgent decodes are not cut by the budget. Only a TPOT that a useful batch can meet
    (``least_useful_s``) sets it, and beside urgent decodes prefills keep that share; a
    ``prefill_share`` of 0 is the paper's text. Requests without a deadline come last, and may
    starve."""

    name = "fairbatching"
    source = "FairBatching §3.2, §3.3, Algorithm 1"
    local_order = DEADLINE
    Options = FairBatchingOptions
    options: FairBatchingOptions

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill the time budget group by group."""
        table, share = queue.table, self.options.prefill_share
        due_s = deadlines_s(table, self.options.anchor.code)
        prefill = is_prefill(table)
        decodes = by_deadline(np.flatnonzero(~prefill), due_s)
        prefills = by_deadline(np.flatnonzero(prefill), due_s)

        tpot_s = table[decodes, TPOT]
        useful_s = 0.0
        if share:
            useful_s = least_useful_s(latency.fixed_s, latency, share=share)
        paced = np.flatnonzero((tpot_s >= useful_s) & (tpot_s < inf))
        budget_s = least_tpot_s = inf
        if len(paced):
            least_tpot_s = float(tpot_s[paced].min())
            budget_s = max(float(due_s[decodes[paced[0]]]) - now_s, least_tpot_s)

        urgent = int(np.searchsorted(due_s[decodes], now_s + budget_s + least_tpot_s))
        batch.take(decodes[:urgent])
        due = int(np.searchsorted(due_s[prefills], inf))
        if urgent and due and share:
            deepest = int(table[prefills[:due], COMPUTED].max())
            budget_s = max(budget_s, least_useful_s(batch.cost_s, latency, deepest, share))
        rest = np.concatenate((prefills[:due], decodes[urgent:], prefills[due:]))
        batch.take(rest, budget_s)
        batch.ensure_progress(rest)
