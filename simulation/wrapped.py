"""The frame of batch policies around another one, as simulations need them."""

from __future__ import annotations

from collections.abc import Callable

from sluice.scheduling.batching import BatchBudget, BatchBuilder, BatchPlan, BatchPolicy
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.queue import QueueView


class Wrapped(BatchPolicy):
    """Plans as ``inner`` does, in its order. Subclasses extend :meth:`plan`."""

    name = "wrapped"
    source = "ours"
    local_order = SLIDE

    def __init__(self, inner: BatchPolicy) -> None:
        super().__init__()
        self.local_order = inner.local_order  # type: ignore[misc]
        self.inner = inner

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """The plan of ``inner``."""
        return self.inner.plan(queue, now_s, latency, budget)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """As ``inner``."""
        self.inner.fill(batch, queue, now_s, latency)


Note = Callable[[BatchPlan, QueueView, float, LatencyModel], None]
"""Gets the plan of a batch, the queue, the time and the latency model."""


class Noted(Wrapped):
    """Plans as ``inner`` does, and calls ``note`` for each batch."""

    def __init__(self, inner: BatchPolicy, note: Note) -> None:
        super().__init__(inner)
        self._note = note

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """The plan of ``inner``."""
        plan = super().plan(queue, now_s, latency, budget)
        self._note(plan, queue, now_s, latency)
        return plan
