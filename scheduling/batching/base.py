"""The contract of a local policy: which tokens run in the engine's next batch.

A policy ranks; :class:`BatchBuilder` is the one place that enforces what a plan must hold, so no
policy can break an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from scheduling.latency import LatencyModel
from scheduling.request import QueueView, RequestView


class BatchBudget(NamedTuple):
    """Limits of one batch.

    Attributes:
        tokens: most new tokens in the batch.
        sequences: most sequences that may run at once, those that run already counted.
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


class PolicyOptions(BaseModel):
    """Base of every policy's options: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchBuilder:
    """Collects a plan and holds its invariants.

    For every plan: each request is in the queue and appears once; a decode gets one token; a
    request gets at most its pending tokens; the sums stay within the budget's tokens, sequences
    and KV blocks. A running request may also draw on the blocks of running requests that are not in
    the plan (the engine preempts those, by recompute, from the end of its list); a waiting one may
    not, and none is admitted once a plan has drawn on them.

    ``O(1)`` per call.
    """

    __slots__ = (
        "_block_tokens",
        "_entries",
        "_free_blocks",
        "_latency",
        "_overdrawn",
        "_planned",
        "_reclaimable",
        "_reserve_prompt",
        "_sequences",
        "context_tokens",
        "cost_s",
        "tokens_left",
    )

    def __init__(self, queue: QueueView, budget: BatchBudget, latency: LatencyModel) -> None:
        running = 0
        reclaimable = 0
        for request in queue.requests:
            if request.running:
                running += 1
                reclaimable += request.kv_blocks
        self.tokens_left = budget.tokens
        self.cost_s = latency.fixed_s
        self._sequences = budget.sequences - running
        self._free_blocks = budget.kv_blocks
        self._reclaimable = reclaimable
        self._block_tokens = budget.block_tokens
        self._reserve_prompt = budget.reserve_prompt
        self._overdrawn = False
        self._latency = latency
        self._entries: list[PlannedTokens] = []
        self._planned: set[str] = set()

    def add(self, request: RequestView, tokens: int | None = None) -> int:
        """Take up to ``tokens`` (default: all pending) of ``request``; return how many were taken.

        Returns 0, and changes nothing, where a limit leaves no room or the request is planned
        already. :attr:`cost_s` grows by the predicted time of what was taken.
        """
        granted = request.pending_tokens
        if tokens is not None and tokens < granted:
            granted = tokens
        if granted > self.tokens_left:
            granted = self.tokens_left
        if granted <= 0 or request.request_id in self._planned:
            return 0
        granted = self._reserve(request, granted)
        if granted <= 0:
            return 0
        self.tokens_left -= granted
        self.cost_s += self._latency.work_s(granted, request.computed_tokens)
        self._planned.add(request.request_id)
        self._entries.append(PlannedTokens(request.request_id, granted))
        return granted

    def _reserve(self, request: RequestView, tokens: int) -> int:
        """Take the KV blocks and the place for ``tokens``; return how many tokens fit."""
        block = self._block_tokens
        computed = request.computed_tokens
        if not request.running:
            if self._sequences <= 0 or self._overdrawn:
                return 0
            upto = computed + (request.pending_tokens if self._reserve_prompt else tokens)
            blocks = -(-upto // block)
            if blocks > self._free_blocks:
                if self._reserve_prompt:
                    return 0
                blocks = self._free_blocks
                tokens = min(tokens, blocks * block - computed)
                if tokens <= 0:
                    return 0
            self._sequences -= 1
            self._free_blocks -= blocks
            return tokens
        others = self._reclaimable - request.kv_blocks
        blocks = -(-(computed + tokens) // block) - request.kv_blocks
        if blocks > self._free_blocks + others:
            blocks = self._free_blocks + others
            tokens = (request.kv_blocks + blocks) * block - computed
            if tokens <= 0:
                return 0
        self._reclaimable = others
        if blocks > 0:
            self._free_blocks -= blocks
            if self._free_blocks < 0:
                self._overdrawn = True
                self._reclaimable += self._free_blocks
                self._free_blocks = 0
        return tokens

    def add_all(self, requests: Iterable[RequestView]) -> None:
        """Take each request whole, in order, as far as the limits allow."""
        for request in requests:
            if self.tokens_left <= 0:
                return
            self.add(request)

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
