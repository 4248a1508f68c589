"""Sarathi with strict priorities: a baseline of ProServe's evaluation."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.batching.base import BatchBuilder
from sluice.scheduling.batching.sarathi import Sarathi
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import PRIORITY, is_prefill
from sluice.scheduling.request.queue import QueueView


class SarathiPriority(Sarathi):
    """Every decode first, then prefill chunks; in both, the higher priority first, then the earlier
    arrival. ``O(n log n)``.

    The static token budget is Sarathi's. The paper ranks strictly, so a prefill that has begun
    yields to a waiting one of higher priority, and low priorities can starve.
    """

    name = "sarathi_priority"
    source = "ProServe §5.1, baseline Sarathi-Priority"

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Decodes, then prefills, each by priority, up to the token budget."""
        table = queue.table
        # The rows are in order of arrival and the sort is stable.
        batch.take(np.lexsort((-table[:, PRIORITY], is_prefill(table))), tokens=self._token_budget)
