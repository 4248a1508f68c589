"""The contract of a local policy: which tokens run in the engine's next batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, PlannedTokens
from scheduling.batching.best_effort import BestEffort
from scheduling.kernels import BEST_EFFORT
from scheduling.latency import LatencyModel
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView

__all__ = [
    "BatchBudget",
    "BatchBuilder",
    "BatchPlan",
    "BatchPolicy",
    "PlannedTokens",
    "PolicyOptions",
]


class BatchPolicy(ABC):
    """Chooses the tokens of the engine's next batch.

    A policy is one file with one subclass, registered by ``name`` in
    ``scheduling/batching/__init__.py``. It may keep state between calls, but is called from one
    thread. It must be work-conserving: with a request that fits, the plan is not empty.

    It never sees best-effort requests: it plans the others as if those were not there, and
    :attr:`best_effort` gives them what is left.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()
        self.best_effort = BestEffort()
        """How requests are served to which nothing was promised."""

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """Plan the next batch of ``queue`` at ``now_s`` (the clock of the views' times)."""
        if queue.table[:, BEST_EFFORT].any():
            return self.best_effort.plan(self.fill, queue, now_s, latency, budget)
        batch = BatchBuilder(queue, budget, latency)
        self.fill(batch, queue, now_s, latency)
        return batch.plan()

    @abstractmethod
    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Add requests to ``batch`` in order of preference."""
