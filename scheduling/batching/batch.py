"""What a plan is made of: its limits, the builder that collects it, and the plan itself.

A policy ranks; :class:`BatchBuilder` is the one place that enforces what a plan must hold, so no
policy can break an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np

from scheduling.batching import builder
from scheduling.kernels import COMPUTED, Floats, Ints
from scheduling.latency import UNBOUNDED_TOKENS, LatencyModel
from scheduling.request import QueueView
from scheduling.speculation import Lengths

_NONE: Ints = np.empty(0, np.int64)


class BatchBudget(NamedTuple):
    """Limits of one batch.

    Attributes:
        tokens: most new tokens in the batch.
        sequences: most sequences that may run at once; those that run already count.
        kv_blocks: free KV blocks (cached blocks that may be evicted count as free).
        block_tokens: tokens per KV block.
        reserve_prompt: a waiting request is admitted only if its whole sequence would fit.
        lookahead_tokens: so many tokens behind its own a planned request needs blocks for, too: a
            drafting model writes there.
        draft_s: time to draft one token for all decodes of a batch, seconds; 0 where that is free.
    """

    tokens: int
    sequences: int
    kv_blocks: int
    block_tokens: int
    reserve_prompt: bool = True
    lookahead_tokens: int = 0
    draft_s: float = 0.0


class Tiers(NamedTuple):
    """A queue with the promised requests before the best-effort ones.

    Attributes:
        order: ``int64[n]``, the queue's rows.
        promised: how many of them are promised.
    """

    order: Ints
    promised: int


class PlannedTokens(NamedTuple):
    """``tokens`` new tokens of one request in the next batch."""

    request_id: str
    tokens: int


class BatchPlan:
    """The next batch, in the order in which the engine should take it.

    Attributes:
        rows: ``int64[m]``, places in the planned queue.
        tokens: ``int64[m]``, new tokens of each.
        predicted_s: the step time that the latency model gives for it.
        evicted: ``int64[k]``, running best-effort requests to preempt before the batch: their KV
            goes, what they have generated stays.
        kept: ``int64[l]``, running requests outside the batch that an engine which runs out of
            blocks preempts last.
    """

    __slots__ = ("_entries", "_queue", "evicted", "kept", "predicted_s", "rows", "tokens")

    def __init__(
        self,
        queue: QueueView,
        rows: Ints,
        tokens: Ints,
        predicted_s: float,
        evicted: Ints = _NONE,
        kept: Ints = _NONE,
    ) -> None:
        self.rows = rows
        self.tokens = tokens
        self.predicted_s = predicted_s
        self.evicted = evicted
        self.kept = kept
        self._queue = queue
        self._entries: tuple[PlannedTokens, ...] | None = None

    @classmethod
    def empty(cls) -> BatchPlan:
        """A plan of nothing."""
        return cls(QueueView(), _NONE, _NONE, 0.0)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BatchPlan)
            and self.entries == other.entries
            and self.predicted_s == other.predicted_s
            and self.evicted_ids == other.evicted_ids
            and self.kept_ids == other.kept_ids
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def entries(self) -> tuple[PlannedTokens, ...]:
        """The batch by request id."""
        if self._entries is None:
            ids = self._queue.request_ids(self.rows)
            self._entries = tuple(map(PlannedTokens, ids, self.tokens.tolist()))
        return self._entries

    @property
    def evicted_ids(self) -> list[str]:
        """:attr:`evicted` by request id."""
        return self._queue.request_ids(self.evicted) if len(self.evicted) else []

    @property
    def kept_ids(self) -> list[str]:
        """:attr:`kept` by request id."""
        return self._queue.request_ids(self.kept) if len(self.kept) else []

    @property
    def evicted_tokens(self) -> int:
        """Computed tokens that the evictions throw away."""
        return int(self._queue.table[self.evicted, COMPUTED].sum()) if len(self.evicted) else 0


class BatchBuilder:
    """Collects a plan and holds its invariants.

    Each planned request is in the queue and appears once; a request gets at most its pending
    tokens, so a decode gets one, and with it up to as many drafted ones as ``lengths`` says; the
    sums stay within the budget's tokens, sequences and KV blocks.

    KV blocks, so that every plan is one that the engine can run:

    - A running request may draw on free blocks and on those of running requests that are not in the
      plan, which the engine then preempts whole, by recompute. What was drawn on is gone: those
      requests cannot be planned any more beyond what is left.
    - A waiting request draws on free blocks only, and only in a plan that preempts nothing: an
      engine admits nothing in a step in which it ran out of blocks. So admitting one, too, ends
      the drawing on others.
    - The first waiting request that does not fit ends admission while anything runs. Otherwise
      small prompts could keep taking the blocks that a long one waits for.
    - Drafted tokens draw on nobody, and leave the blocks that those that run need for what is
      pending; where blocks, tokens or time are short, fewer are checked.
    - A best-effort request draws on nobody, and nobody draws on it: those that must give way are
      named in the plan, and preempted before the batch.

    ``O(requests)`` to make, ``O(rows)`` per call, both compiled.

    Args:
        queue: what there is to plan.
        budget: the limits.
        latency: predicts the batch's time.
        tiers: in which order :mod:`scheduling.batching.best_effort` has the rows; rows are then
            numbered by it, and the budget is that of the promised ones.
        lengths: what decodes may check, by row of ``queue``; default: nothing is drafted.
    """

    __slots__ = (
        "_costs",
        "_drafts",
        "_granted",
        "_order",
        "_pieces",
        "_queue",
        "_state",
        "_table",
        "_tiers",
        "budget",
        "lengths",
    )

    def __init__(
        self,
        queue: QueueView,
        budget: BatchBudget,
        latency: LatencyModel,
        tiers: Tiers | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.budget = budget
        """The limits that the plan began with."""
        self.lengths: Lengths | None = None
        """What decodes may check, by row as numbered here; ``None`` where nothing is drafted."""
        self._queue = queue
        self._tiers = tiers
        self._table = queue.table if tiers is None else queue.table[tiers.order]
        self._pieces = latency.pieces
        self._state, self._costs, self._granted, self._order = builder.begin(
            self._table,
            self._pieces,
            budget.tokens,
            budget.sequences,
            budget.kv_blocks,
            budget.block_tokens,
            budget.reserve_prompt,
            len(self._table) if tiers is None else tiers.promised,
            budget.lookahead_tokens,
        )
        self._drafts = _NONE
        if lengths is not None:
            self.speculate(lengths if tiers is None else lengths.of(tiers.order))

    @property
    def table(self) -> Floats:
        """The rows as they are numbered here, ``float64[n, FIELDS]``. Read only."""
        return self._table

    @property
    def granted(self) -> Ints:
        """``int64[n]``, the tokens planned so far by row. Read only."""
        return self._granted

    @property
    def empty(self) -> bool:
        """Whether nothing has been planned yet."""
        return not self._state[builder.COUNT]

    @property
    def tokens_left(self) -> int:
        """What is left of the token budget."""
        return int(self._state[builder.TOKENS_LEFT])

    @property
    def cost_s(self) -> float:
        """Predicted time of the batch so far; of an empty one, the fixed time of a step."""
        return float(self._costs.max())

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return self.budget.block_tokens

    @property
    def sequences_left(self) -> int:
        """How many more waiting requests may begin to run; below zero if too many run."""
        return int(self._state[builder.SEQUENCES_LEFT])

    @property
    def free_blocks(self) -> int:
        """Free KV blocks left; below zero where the plan draws on running requests."""
        return int(self._state[builder.FREE_BLOCKS])

    @property
    def admits(self) -> bool:
        """Whether a waiting request is planned."""
        return bool(self._state[builder.ADMITTED])

    def speculate(self, lengths: Lengths) -> None:
        """Have decodes that are taken from now on check up to so many drafts; ``lengths`` is of the
        first rows, those of the others stay."""
        before = int(self._drafts.max(initial=0))
        if self.lengths is not None:
            lengths = lengths.before(self.lengths)
        self.lengths, self._drafts = lengths, lengths.drafts
        self._costs += self.budget.draft_s * (int(self._drafts.max(initial=0)) - before)

    def show(self, rows: int) -> None:
        """Have only the first ``rows`` rows be taken from now on."""
        self._state[builder.SHOWN] = rows

    def withhold(self, blocks: int, running: int) -> None:
        """Count ``running`` best-effort requests that hold ``blocks`` as staying; until then they
        are taken for gone."""
        self._state[builder.FREE_BLOCKS] -= blocks
        self._state[builder.NEEDED] -= blocks
        self._state[builder.SEQUENCES_LEFT] -= running
        self._state[builder.SEQUENCES_RUNNING] += running

    def reopen(self) -> None:
        """Let waiting requests pass one that did not fit."""
        self._state[builder.CLOSED] = 0

    def spare(self, blocks: int) -> None:
        """Have every admission from now on leave ``blocks`` free while anything runs, so that those
        that run can grow."""
        self._state[builder.SPARE_BLOCKS] = blocks

    def add(self, row: int, tokens: int = UNBOUNDED_TOKENS) -> int:
        """Take up to ``tokens`` (default: all pending) of the request in ``row``; return how many.

        Returns 0, and plans nothing, where a limit leaves no room, or the request is planned
        already or not of this queue. :attr:`cost_s` grows by the predicted time of what was taken.
        """
        return self.take(np.array([row]), tokens=tokens)

    def take(
        self,
        rows: Ints,
        until_s: float = inf,
        tokens: int = UNBOUNDED_TOKENS,
        in_order: bool = False,
    ) -> int:
        """Take the requests in ``rows`` (``int64[n]``) in order; return the tokens taken.

        Args:
            until_s: the batch's predicted time must stay within it. The prefill that does not fit
                is cut to what does, and ends it. A decode that does not fit cannot be cut and is
                left out, as is a prefill of which not one token fits.
            tokens: most tokens to take in all.
            in_order: whether the first request that gets nothing ends it, unless the batch is still
                empty.
        """
        return builder.take(
            self._table,
            self._pieces,
            rows,
            until_s,
            tokens,
            in_order,
            self._state,
            self._costs,
            self._granted,
            self._order,
            self._drafts,
        )

    def ensure_progress(self, rows: Iterable[int]) -> None:
        """Where the plan is empty, take at most one block's tokens of the first that fits.

        For policies with a time budget: one that is too small for any work must not stop the
        engine, and must be exceeded by little.
        """
        if not self.empty:
            return
        for row in rows:
            if self.add(row, self.block_tokens):
                return

    def plan(self, evicted: Ints = _NONE, kept: Ints = _NONE) -> BatchPlan:
        """The plan collected so far; ``evicted`` and ``kept`` are rows as numbered here."""
        rows = self._order[: self._state[builder.COUNT]]
        tokens = self._granted[rows]
        predicted_s = self.cost_s
        if self.lengths is not None and self.budget.draft_s:
            checked = np.minimum(tokens - 1, self._drafts[rows]).max(initial=0)
            predicted_s -= self.budget.draft_s * float(self._drafts.max(initial=0) - checked)
        if self._tiers is not None:
            order = self._tiers.order
            rows, evicted, kept = order[rows], order[evicted], order[kept]
        return BatchPlan(self._queue, rows, tokens, predicted_s, evicted, kept)
