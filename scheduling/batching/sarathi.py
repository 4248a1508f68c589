"""Sarathi: stall-free batching under a static token budget."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.fleet.local_orders import ARRIVAL
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import RUNNING, is_prefill
from sluice.scheduling.request.queue import QueueView


class SarathiOptions(PolicyOptions):
    """Options of :class:`Sarathi`."""

    token_budget: int = Field(
        default=512,
        ge=1,
        le=1_048_576,
        description="Maximum number of new tokens in a batch. Size it so that a batch of this many "
        "tokens takes no longer than the tightest time between tokens.",
    )


class Sarathi(BatchPolicy):
    """Every decode first, then prefill chunks, all in order of arrival (Sarathi-FCFS). ``O(n)``.

    Prefills that have begun come before waiting ones, as they hold KV blocks."""

    name = "sarathi"
    source = "Sarathi-Serve (OSDI 2024), Algorithm 3; FairBatching §2.3"
    local_order = ARRIVAL
    Options = SarathiOptions

    def __init__(self, options: SarathiOptions | None = None) -> None:
        options = options or SarathiOptions()
        super().__init__(options)
        self._token_budget = options.token_budget

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Decodes, then prefills that have begun, then waiting ones, up to the token budget."""
        running = queue.table[:, RUNNING] > 0
        prefill = is_prefill(queue.table)
        groups = (running & ~prefill, running & prefill, ~running)
        order = np.concatenate([np.flatnonzero(group) for group in groups])
        batch.take(order, tokens=self._token_budget)
