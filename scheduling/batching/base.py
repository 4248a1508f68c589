"""The contract of a local policy: which tokens run in the engine's next batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, PlannedTokens
from scheduling.batching.best_effort import BestEffort
from scheduling.batching.prefill_share import least_useful_s
from scheduling.kernels import BEST_EFFORT, DRAFTED
from scheduling.latency import LatencyModel
from scheduling.objective import Anchor
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView
from scheduling.speculation import AdaptiveLengths, Lengths, Mask, Speculation

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
    :attr:`best_effort` gives them what is left. Nor need it know of speculation:
    :attr:`speculation` says how many drafted tokens come with a decode that the policy takes, as
    far as there is room for them.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()
        self.best_effort = BestEffort()
        """How requests are served to which nothing was promised."""
        self.speculation: Speculation = AdaptiveLengths()
        """How many drafted tokens decodes check, where some are drafted."""

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
        """Rows whose TPOT the time of a batch goes by, where drafts can make it longer; default:
        none, so that a decode takes the drafts that make its tokens cheapest."""
        return None

    def lengths(
        self,
        queue: QueueView,
        now_s: float,
        latency: LatencyModel,
        budget: BatchBudget,
        paced: Mask | None,
    ) -> Lengths:
        """How many drafts the decodes of ``queue`` check, by :attr:`speculation`."""
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
