"""The contract of a local policy: which tokens run in the engine's next batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from sluice.scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, PlannedTokens
from sluice.scheduling.batching.best_effort import BestEffort
from sluice.scheduling.batching.prefill_share import least_useful_s
from sluice.scheduling.fleet.local_orders import LOCAL_ORDERS
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.latency.speculation import AdaptiveLengths, Lengths, Mask, Speculation
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import BEST_EFFORT, DRAFTED
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

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

    A policy never sees best-effort requests: it plans the guaranteed ones alone, and
    :attr:`best_effort` serves the others with the remaining time and memory. It needs no code for
    speculation: :attr:`speculation` chooses how many drafted tokens each planned decode verifies,
    within the batch's limits.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    local_order: ClassVar[int]
    """In which it takes guaranteed prefills, one of :mod:`sluice.scheduling.fleet.local_orders`:
    routers predict by it."""
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init_subclass__(cls) -> None:
        if getattr(cls, "local_order", None) not in LOCAL_ORDERS:
            raise TypeError(
                f"{cls.__name__} must state `local_order`, one of the orders in "
                f"sluice.scheduling.fleet.local_orders"
            )

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()
        self.best_effort = BestEffort()
        """Plans the best-effort requests."""
        self.speculation: Speculation = AdaptiveLengths()
        """Chooses how many drafted tokens each decode verifies."""

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """Plan the next batch of ``queue`` at ``now_s`` (the clock of the views' times)."""
        table = queue.table
        lengths = None
        if table[:, DRAFTED].any():
            lengths = self.lengths(queue, now_s, latency, budget, self.paced(queue))
        if table[:, BEST_EFFORT].any():
            return self.best_effort.plan(self.fill, queue, now_s, latency, budget, lengths)
        batch = BatchBuilder(queue, budget, latency, lengths=lengths)
        self.fill(batch, queue, now_s, latency)
        return batch.plan()

    def paced(self, queue: QueueView) -> Mask | None:
        """Rows whose TPOT sets the batch time, which drafts can lengthen. Default: none, so each
        decode takes the number of drafts that makes its tokens cheapest."""
        return None

    def lengths(
        self,
        queue: QueueView,
        now_s: float,
        latency: LatencyModel,
        budget: BatchBudget,
        paced: Mask | None,
    ) -> Lengths:
        """How many drafts each decode of ``queue`` verifies, by :attr:`speculation`."""
        return self.speculation.choose(
            queue,
            now_s,
            latency,
            budget.tokens,
            budget.draft_s,
            getattr(self.options, "anchor", Anchor.FIRST_TOKEN),
            least_useful_s(latency.fixed_s, latency),
            paced,
        )

    @abstractmethod
    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Add requests to ``batch`` in order of preference."""
