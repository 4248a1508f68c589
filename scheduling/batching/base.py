"""The contract of a local policy: which tokens run in the engine's next batch.

A policy ranks; :class:`BatchBuilder` is the one place that enforces what a plan must hold, so no
policy can break an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from scheduling.latency import LatencyModel
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView, RequestView

__all__ = [
    "BatchBudget",
    "BatchBuilder",
    "BatchPlan",
    "BatchPolicy",
    "PlannedTokens",
    "PolicyOptions",
]


class BatchBudget(NamedTuple):
    """Limits of one batch.

    Attributes:
        tokens: most new tokens in the batch.
        sequences: most sequences that may run at once; those that run already count.
        kv_blocks: free KV blocks (cached blocks that may be evicted count as free).
        block_tokens: tokens per KV block.
        reserve_prompt: a waiting request is admitted only if its whole sequence would fit.
    """

    tokens: int
    sequences: int
    kv_blocks: int
    block_tokens: int
    reserve_prompt: bool = True


class PlannedTokens(NamedTuple):
    """``tokens`` new tokens of one request in the next batch."""

    request_id: str
    tokens: int


class BatchPlan(NamedTuple):
    """The next batch, in the order in which the engine should take it.

    ``predicted_s`` is the step time that the latency model gives for it.
    """

    entries: tuple[PlannedTokens, ...]
    predicted_s: float


class BatchBuilder:
    """Collects a plan and holds its invariants.

    Each planned request is in the queue and appears once; a request gets at most its pending
    tokens, so a decode gets one; the sums stay within the budget's tokens, sequences and KV blocks.

    KV blocks, so that every plan is one that the engine can run:

    - A running request may draw on free blocks and on those of running requests that are not in the
      plan, which the engine then preempts whole, by recompute. What was drawn on is gone: those
      requests cannot be planned any more beyond what is left.
    - A waiting request draws on free blocks only, and only in a plan that preempts nothing: an
      engine admits nothing in a step in which it ran out of blocks. So admitting one, too, ends
      the drawing on others.
    - The first waiting request that does not fit ends admission while anything runs. Otherwise
      small prompts could keep taking the blocks that a long one waits for.

    ``O(requests)`` to make, ``O(1)`` per call.

    Attributes:
        tokens_left: what is left of the token budget.
        cost_s: predicted time of the batch so far; of an empty one, the fixed time of a step.
    """

    __slots__ = (
        "_admitted",
        "_block_tokens",
        "_closed",
        "_entries",
        "_free_blocks",
        "_latency",
        "_open",
        "_reclaimable",
        "_reserve_prompt",
        "_running",
        "_sequences",
        "_work_s",
        "cost_s",
        "tokens_left",
    )

    def __init__(self, queue: QueueView, budget: BatchBudget, latency: LatencyModel) -> None:
        held = [request.kv_blocks for request in queue.requests if request.running]
        self.tokens_left = budget.tokens
        self.cost_s = latency.fixed_s
        self._running = len(held)
        self._sequences = budget.sequences - len(held)
        self._free_blocks = budget.kv_blocks  # below zero: drawn from running requests
        self._reclaimable = sum(held)
        self._block_tokens = budget.block_tokens
        self._reserve_prompt = budget.reserve_prompt
        self._admitted = False
        self._closed = False
        self._latency = latency
        self._work_s = latency.work_s
        self._entries: list[PlannedTokens] = []
        self._open = {request.request_id for request in queue.requests}

    @property
    def empty(self) -> bool:
        """Whether nothing has been planned yet."""
        return not self._entries

    def add(self, request: RequestView, tokens: int | None = None) -> int:
        """Take up to ``tokens`` (default: all pending) of ``request``; return how many were taken.

        Returns 0, and plans nothing, where a limit leaves no room, or the request is planned
        already or not of this queue. :attr:`cost_s` grows by the predicted time of what was taken.
        """
        pending = request.pending_tokens
        granted = self._take(request, pending if tokens is None else min(tokens, pending))
        if granted:
            self.cost_s += self._work_s(granted, request.computed_tokens)
        return granted

    def fill(self, requests: Iterable[RequestView], until_s: float) -> None:
        """Take ``requests`` in order while the batch's predicted time stays within ``until_s``.

        The prefill that does not fit is cut to what does, and ends it. A decode that does not fit
        cannot be cut and is left out, as is a prefill of which not one token fits.
        """
        for request in requests:
            left_s = until_s - self.cost_s
            if left_s <= 0 or self.tokens_left <= 0:
                return
            pending = request.pending_tokens
            work_s = self._work_s(pending, request.computed_tokens)
            if work_s <= left_s:
                granted = self._take(request, pending)
                if granted == pending:
                    self.cost_s += work_s
                elif granted:
                    self.cost_s += self._work_s(granted, request.computed_tokens)
            elif pending > 1:
                within = self._latency.tokens_within(left_s, request.computed_tokens)
                if within > 0 and self.add(request, within):
                    return

    def ensure_progress(self, requests: Iterable[RequestView]) -> None:
        """Where the plan is empty, take at most one block's tokens of the first that fits.

        For policies with a time budget: one that is too small for any work must not stop the
        engine, and must be exceeded by little.
        """
        for request in requests:
            if self._entries:
                return
            self.add(request, self._block_tokens)

    def _take(self, request: RequestView, tokens: int) -> int:
        """Plan up to ``tokens`` of ``request`` within every limit; the caller counts the cost."""
        if tokens > self.tokens_left:
            tokens = self.tokens_left
        request_id = request.request_id
        if tokens <= 0 or request_id not in self._open:
            return 0
        tokens = self._extend(request, tokens) if request.running else self._admit(request, tokens)
        if tokens > 0:
            self._open.remove(request_id)
            self.tokens_left -= tokens
            self._entries.append(PlannedTokens(request_id, tokens))
        return tokens

    def _extend(self, request: RequestView, tokens: int) -> int:
        """Take the blocks for ``tokens`` of a running request; return how many tokens fit."""
        block = self._block_tokens
        held = request.kv_blocks
        others = self._reclaimable - held
        room = self._free_blocks
        if not self._admitted:
            room += others
        blocks = max(0, -(-(request.computed_tokens + tokens) // block) - held)
        if blocks > room:
            if room < 0:
                return 0
            blocks = room
            tokens = (held + blocks) * block - request.computed_tokens
            if tokens <= 0:
                return 0
        self._reclaimable = others
        self._free_blocks -= blocks
        return tokens

    def _admit(self, request: RequestView, tokens: int) -> int:
        """Take the place and the blocks for a waiting request; return how many tokens fit."""
        if self._closed or self._sequences <= 0 or self._free_blocks < 0:
            return 0
        block = self._block_tokens
        held = request.kv_blocks
        computed = request.computed_tokens
        upto = computed + (request.pending_tokens if self._reserve_prompt else tokens)
        blocks = max(0, -(-upto // block) - held)
        if blocks > self._free_blocks:
            fit = (held + self._free_blocks) * block - computed
            if self._reserve_prompt or fit <= 0:
                self._closed = self._running > 0
                return 0
            blocks = self._free_blocks
            tokens = min(tokens, fit)
        self._sequences -= 1
        self._free_blocks -= blocks
        self._admitted = True
        return tokens

    def plan(self) -> BatchPlan:
        """The plan collected so far."""
        return BatchPlan(tuple(self._entries), self.cost_s)


class BatchPolicy(ABC):
    """Chooses the tokens of the engine's next batch.

    A policy is one file with one subclass, registered by ``name`` in
    ``scheduling/batching/__init__.py``. It may keep state between calls, but is called from one
    thread. It must be work-conserving: with a request that fits, the plan is not empty.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """Plan the next batch of ``queue`` at ``now_s`` (the clock of the views' times)."""
        batch = BatchBuilder(queue, budget, latency)
        self.fill(batch, queue, now_s, latency)
        return batch.plan()

    @abstractmethod
    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Add requests to ``batch`` in order of preference."""
