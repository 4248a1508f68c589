"""Batch policies around another one, as simulations need them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sluice.scheduling.batching import (
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    BatchPolicy,
    make_policy,
)
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.rows import spare_after_s
from sluice.scheduling.fleet.state import rows_of
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request import kernels
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


class Rejecting(Wrapped):
    """Refuses new requests above the prefill admission budget within their TTFT (FairBatching
    §3.4). Those in ``refused`` run FCFS while there is no accepted one, so that every request
    ends."""

    def __init__(self, inner: BatchPolicy) -> None:
        super().__init__(inner)
        self._idle = make_policy("fcfs")
        self.refused: set[int] = set()
        self._known: set[int] = set()
        self._fleet = Fleet()

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """Decide on new requests; plan the accepted ones, or the refused ones if there are none."""
        keys: list[int] = queue.keys.tolist()
        self._known.intersection_update(keys)
        for row, key in enumerate(keys):
            if key not in self._known and not self._holds(queue, row, now_s, latency):
                self.refused.add(key)
            self._known.add(key)
        if self.refused.isdisjoint(keys):
            return super().plan(queue, now_s, latency, budget)
        refused = np.array([key in self.refused for key in keys])
        # A refused request that started while the engine was idle holds KV, and continues.
        rows = np.flatnonzero(~refused | (queue.table[:, kernels.RUNNING] > 0))
        if not len(rows):
            return self._idle.plan(queue, now_s, latency, budget)
        part = QueueView.of_table(queue.keys[rows], queue.table[rows], ())
        plan = super().plan(part, now_s, latency, budget)
        return BatchPlan(queue, rows[plan.rows], plan.tokens, plan.predicted_s)

    def _holds(self, queue: QueueView, row: int, now_s: float, latency: LatencyModel) -> bool:
        """Whether the request in ``row`` fits the budget that the accepted requests leave."""
        wanted = queue.table[row]
        before = [
            place
            for place, key in enumerate(queue.keys.tolist())
            if key in self._known and key not in self.refused
        ]
        rows = rows_of(queue.table[before])
        made = Report(rows, now_s, 0.0, now_s, latency, 0, 1, 1, len(before))
        self._fleet.report("engine", made, now_s)
        due_s, nothing = float(wanted[kernels.ARRIVAL] + wanted[kernels.TTFT]), np.zeros(1)
        work_s = nothing + kernels.most_work_s(
            latency.pieces, wanted[kernels.PENDING], wanted[kernels.COMPUTED]
        )
        own = np.zeros(1, np.int64)
        return bool(spare_after_s(self._fleet.arrays, own, now_s, due_s, nothing, work_s)[0] >= 0)
