"""Shortest job first under a static token budget."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import (
    COMPUTED,
    DECODE_CONTEXT,
    DECODE_SEQUENCE,
    EMITTED,
    EXPECTED,
    PENDING,
    Floats,
    pending_work_s,
)
from sluice.scheduling.request.queue import QueueView


class SJFOptions(PolicyOptions):
    """Options of :class:`SJF`."""

    token_budget: int = Field(
        default=512,
        ge=1,
        le=1_048_576,
        description="Maximum number of new tokens in a batch. ProServe varies it from 250 to "
        "2,500.",
    )


class SJF(BatchPolicy):
    """Requests by predicted remaining work, up to a token budget. ``O(n log n)``.

    Work is the marginal time of the pending tokens and of the decode steps that are predicted after
    them. Without a predicted output length it is the time of the pending tokens alone, which puts
    decodes first. A request that exceeds its prediction counts as about to end.

    The papers do not say what length their SJF ranks by; ProServe §6 names rankings by output
    length and by prefill time, and this is their sum. Long requests can wait without bound.
    """

    name = "sjf"
    source = "shortest job first, as in ProServe §3.2"
    Options = SJFOptions

    def __init__(self, options: SJFOptions | None = None) -> None:
        options = options or SJFOptions()
        super().__init__(options)
        self._token_budget = options.token_budget

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill up to the token budget, the shortest first."""
        left_s = pending_work_s(queue.table, latency.pieces)
        left_s += later_work_s(queue.table, latency.pieces)
        batch.take(np.argsort(left_s, kind="stable"), tokens=self._token_budget)


def later_work_s(table: Floats, pieces: Floats) -> Floats:
    """Per row, the marginal time of the output after its next token; 0 where no length is
    predicted. ``O(n)`` per piece of the model."""
    tokens = np.nan_to_num(np.maximum(table[:, EXPECTED] - table[:, EMITTED] - 1, 0.0))
    # The steps' contexts grow by one each, so the mean one stands for all.
    context = table[:, COMPUTED] + table[:, PENDING] + (tokens - 1) / 2
    per_token_s = pieces[:, DECODE_SEQUENCE, None] + pieces[:, DECODE_CONTEXT, None] * context
    work: Floats = tokens * per_token_s.max(axis=0)
    return work
