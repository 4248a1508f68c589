"""First come, first served: the order of a stock vLLM v1 engine."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.fleet.local_orders import ARRIVAL
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import RUNNING
from sluice.scheduling.request.queue import QueueView


class FCFS(BatchPolicy):
    """Running requests first, then waiting ones, each in order of arrival. ``O(n)``.

    The last prefill is chunked to the token limit. A waiting request that does not fit blocks the
    ones behind it."""

    name = "fcfs"
    source = "vLLM v1 scheduler, first-come-first-served policy with chunked prefill"
    local_order = ARRIVAL

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill up to the token limit in order of arrival."""
        running = queue.table[:, RUNNING] > 0
        batch.take(np.flatnonzero(running))
        batch.take(np.flatnonzero(~running), in_order=True)
