"""FCFS, and Sarathi and earliest deadline first under a static token budget."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sluice.scheduling.batching.base import BatchPolicy
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import ARRIVAL, DEADLINE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import RUNNING, by_deadline, deadlines_s, is_prefill
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView


class EDFOptions(PolicyOptions):
    """Options of :class:`EDF`."""

    token_budget: int = Field(
        default=512,
        ge=1,
        le=1_048_576,
        description="Maximum number of new tokens in a batch. ProServe varies it from 250 to "
        "2,500; 2,048 and 8,192 give FlowPrefill's chunked-prefill baselines.",
    )
    anchor: Anchor = Field(
        default=Anchor.ENVELOPE,
        description="Where the deadlines of later tokens start; `envelope` is ProServe's Eq. 3.",
    )


class EDF(BatchPolicy):
    """Requests by the deadline of their next token, up to a token budget. Those without a deadline
    may starve; late ones stay in front, the cause of collapse under overload. ``O(n log n)``."""

    name = "edf"
    source = "earliest deadline first, as in ProServe §3.2 and FlowPrefill §6.1 (DistServe-CP)"
    local_order = DEADLINE
    Options = EDFOptions
    options: EDFOptions

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill up to the token budget by deadline."""
        due_s = deadlines_s(queue.table, self.options.anchor.code)
        batch.take(by_deadline(np.arange(len(due_s)), due_s), tokens=self.options.token_budget)


class FCFS(BatchPolicy):
    """Running requests, then waiting ones, by arrival. A waiting request that does not fit blocks
    the ones behind it. ``O(n)``."""

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
    """Every decode, then prefill chunks, by arrival; begun prefills first, as they hold KV.
    ``O(n)``."""

    name = "sarathi"
    source = "Sarathi-Serve (OSDI 2024), Algorithm 3; FairBatching §2.3"
    local_order = ARRIVAL
    Options = SarathiOptions
    options: SarathiOptions

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Decodes, then prefills that have begun, then waiting ones, up to the token budget."""
        running = queue.table[:, RUNNING] > 0
        prefill = is_prefill(queue.table)
        groups = (running & ~prefill, running & prefill, ~running)
        order = np.concatenate([np.flatnonzero(group) for group in groups])
        batch.take(order, tokens=self.options.token_budget)
