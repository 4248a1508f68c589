"""Batch plans. ``BatchBuilder`` alone enforces a plan's invariants, so no policy can break an
engine."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.latency.model import UNBOUNDED_TOKENS, LatencyModel, tokens_within
from sluice.scheduling.latency.speculation import Lengths
from sluice.scheduling.request.kernels import (
    BEST_EFFORT,
    COMPUTED,
    FIXED,
    KV_BLOCKS,
    PENDING,
    RUNNING,
    Floats,
    Ints,
    compiled,
    work_s,
)
from sluice.scheduling.request.queue import QueueView

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"


# The counters.
COUNT = 0  # planned rows
TOKENS_LEFT = 1
SEQUENCES_LEFT = 2
FREE_BLOCKS = 3  # below zero: drawn from running requests
RECLAIMABLE = 4  # blocks of running requests that are not in the plan
ADMITTED = 5  # whether a waiting request is planned
CLOSED = 6  # whether admission has ended
SEQUENCES_RUNNING = 7
BLOCK_TOKENS = 8
RESERVE_PROMPT = 9
SPARE_BLOCKS = 10  # free blocks that admission leaves while anything runs
PROMISED = 11  # rows below draw on each other
SHOWN = 12  # rows below may be taken
LOOKAHEAD = 13  # tokens for which a planned request needs blocks beyond its own
NEEDED = 14  # blocks that drafts must leave for other running requests
COUNTERS = 15

# The plan.
GRANTED = 0  # tokens of each row
ORDER = 1  # the planned rows in order, in the first places
DRAFTS = 2  # drafted tokens of each row that it may take beside its pending ones
PLAN = 3

EVICTED = -1  # in place of tokens: the row is preempted before the batch


@compiled
def begin(
    table: Floats, pieces: Floats, promised: int, limits: tuple[int, int, int, int, bool, int]
) -> tuple[Ints, Floats, Ints]:
    """The state of an empty plan. ``limits``: ``BatchBudget`` up to ``lookahead_tokens``."""
    tokens, sequences, kv_blocks, block_tokens, reserve_prompt, lookahead = limits
    running, needed = 0, 0
    held = 0.0
    for row in range(promised):
        if table[row, RUNNING] > 0.0:
            running += 1
            held += table[row, KV_BLOCKS]
            needed += pending_blocks(table[row], block_tokens, lookahead)
    for row in range(promised, table.shape[0]):
        if table[row, RUNNING] > 0.0:
            # No request is evicted to make space for drafts.
            needed += int(table[row, KV_BLOCKS])
            needed += pending_blocks(table[row], block_tokens, lookahead)
    state = np.zeros(COUNTERS, np.int64)
    state[TOKENS_LEFT] = tokens
    state[SEQUENCES_LEFT] = sequences - running
    state[FREE_BLOCKS] = kv_blocks
    state[RECLAIMABLE] = int(held)
    state[SEQUENCES_RUNNING] = running
    state[BLOCK_TOKENS] = block_tokens
    state[RESERVE_PROMPT] = reserve_prompt
    state[PROMISED] = promised
    state[NEEDED] = needed
    state[LOOKAHEAD] = lookahead
    state[SHOWN] = table.shape[0]
    return state, pieces[:, FIXED].copy(), np.zeros((PLAN, table.shape[0]), np.int64)


@compiled
def pending_blocks(row: Floats, block_tokens: int, lookahead: int) -> int:
    """Blocks that the pending tokens of a row need beyond those that it holds."""
    upto = int(row[COMPUTED]) + int(row[PENDING]) + lookahead
    return max(0, -(-upto // block_tokens) - int(row[KV_BLOCKS]))


@compiled
def extend(state: Ints, draws: bool, held: int, computed: int, tokens: int) -> int:
    """Take blocks for a running request, from others if it ``draws``; return the tokens."""
    block, lookahead = state[BLOCK_TOKENS], state[LOOKAHEAD]
    others = state[RECLAIMABLE]
    room = state[FREE_BLOCKS]
    if draws:
        others -= held
        if not state[ADMITTED]:
            room += others
    blocks = max(0, -(-(computed + tokens + lookahead) // block) - held)
    if blocks > room:
        if room < 0:
            return 0
        blocks = room
        tokens = (held + blocks) * block - computed - lookahead
        if tokens <= 0:
            return 0
    state[RECLAIMABLE] = others
    state[FREE_BLOCKS] -= blocks
    return tokens


@compiled
def extend_drafts(state: Ints, held: int, computed: int, drafts: int) -> int:
    """Take free blocks that no running request needs for a decode's drafts; return how many fit."""
    block = state[BLOCK_TOKENS]
    room = max(0, state[FREE_BLOCKS] - state[SPARE_BLOCKS] - state[NEEDED])
    upto = computed + 1 + state[LOOKAHEAD]
    own = max(held, -(-upto // block))
    blocks = min(room, max(0, -(-(upto + drafts) // block) - own))
    state[FREE_BLOCKS] -= blocks
    return max(0, min(drafts, (own + blocks) * block - upto))


@compiled
def admit(state: Ints, held: int, computed: int, pending: int, tokens: int) -> int:
    """Take a sequence slot and the blocks for a waiting request; return how many tokens fit."""
    free = state[FREE_BLOCKS]
    if state[SEQUENCES_RUNNING]:
        free -= state[SPARE_BLOCKS]
    if state[CLOSED] or state[SEQUENCES_LEFT] <= 0 or free < 0:
        return 0
    block, lookahead = state[BLOCK_TOKENS], state[LOOKAHEAD]
    upto = computed + (pending if state[RESERVE_PROMPT] else tokens) + lookahead
    blocks = max(0, -(-upto // block) - held)
    if blocks > free:
        fit = (held + free) * block - computed - lookahead
        if state[RESERVE_PROMPT] or fit <= 0:
            state[CLOSED] = state[SEQUENCES_RUNNING] > 0
            return 0
        blocks = free
        tokens = min(tokens, fit)
    state[SEQUENCES_LEFT] -= 1
    state[FREE_BLOCKS] -= blocks
    state[ADMITTED] = 1
    return tokens


@compiled
def evict(table: Floats, rows: Ints, state: Ints, plan: Ints) -> None:
    """Count the running ``rows``, of which none is planned, as preempted; none is taken later."""
    for row in rows:
        held = int(table[row, KV_BLOCKS])
        state[FREE_BLOCKS] += held
        state[RECLAIMABLE] -= held
        state[NEEDED] -= pending_blocks(table[row], state[BLOCK_TOKENS], state[LOOKAHEAD])
        state[SEQUENCES_LEFT] += 1
        state[SEQUENCES_RUNNING] -= 1
        plan[GRANTED, row] = EVICTED


@compiled
def take(
    table: Floats,
    pieces: Floats,
    rows: Ints,
    limits: tuple[float, int, bool],
    state: Ints,
    costs: Floats,
    plan: Ints,
) -> int:
    """Take ``rows`` in order; return the tokens taken. ``limits``: see ``BatchBuilder.take``."""
    until_s, tokens, in_order = limits
    taken = 0
    for row in rows:
        if state[TOKENS_LEFT] <= 0 or taken >= tokens or costs.max() >= until_s:
            break
        if row < 0 or row >= state[SHOWN] or plan[GRANTED, row] != 0:
            continue
        pending, computed = int(table[row, PENDING]), int(table[row, COMPUTED])
        wanted = pending + plan[DRAFTS, row]
        if until_s < inf:
            wanted = tokens_within(pieces, costs, until_s, computed, wanted)
        asked = min(wanted, tokens - taken, state[TOKENS_LEFT])
        if asked > 0:
            held = int(table[row, KV_BLOCKS])
            if table[row, RUNNING] > 0.0:
                checked = max(0, asked - pending)
                asked = extend(state, row < state[PROMISED], held, computed, asked - checked)
                if row < state[PROMISED] and asked > 0:
                    state[NEEDED] -= pending_blocks(
                        table[row], state[BLOCK_TOKENS], state[LOOKAHEAD]
                    )
                if checked > 0 and asked == pending:
                    asked += extend_drafts(state, held, computed, checked)
            else:
                asked = admit(state, held, computed, pending, asked)
        if asked > 0:
            plan[GRANTED, row] = asked
            plan[ORDER, state[COUNT]] = row
            state[COUNT] += 1
            state[TOKENS_LEFT] -= asked
            for piece in range(pieces.shape[0]):
                costs[piece] += work_s(pieces[piece], asked, computed)
            taken += asked
            if wanted < pending:
                break
        elif in_order and state[COUNT] > 0:
            break
    return taken


_NONE: Ints = np.empty(0, np.int64)


class BatchBudget(NamedTuple):
    """Limits of one batch. ``sequences`` includes the running ones, and ``kv_blocks`` cached blocks
    that may be evicted. With ``reserve_prompt`` a request is admitted only if its whole sequence
    would fit. ``lookahead_tokens`` need blocks, too; ``draft_s``: seconds to draft one token for
    all decodes."""

    tokens: int
    sequences: int
    kv_blocks: int
    block_tokens: int
    reserve_prompt: bool = True
    lookahead_tokens: int = 0
    draft_s: float = 0.0


class Tiers(NamedTuple):
    """A queue's rows with the ``promised`` guaranteed requests before the best-effort ones."""

    order: Ints
    promised: int


class PlannedTokens(NamedTuple):
    """``tokens`` new tokens of one request in the next batch."""

    request_id: str
    tokens: int


class BatchPlan:
    """The next batch, in the order in which the engine should take it.

    Attributes:
        rows, tokens: ``int64[m]``, indices in the planned queue, and new tokens of each.
        evicted: requests to preempt before: they lose their KV and keep their generated tokens.
        kept: running requests outside the batch that an engine preempts last."""

    __slots__ = ("_queue", "_tokens_of", "evicted", "kept", "predicted_s", "rows", "tokens")

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
        self._tokens_of: dict[str, int] | None = None

    @classmethod
    def empty(cls) -> BatchPlan:
        """An empty plan."""
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
    def tokens_of(self) -> dict[str, int]:
        """New tokens by request id, in the plan's order. Read only."""
        if self._tokens_of is None:
            ids = self._queue.request_ids(self.rows)
            self._tokens_of = dict(zip(ids, self.tokens.tolist(), strict=True))
        return self._tokens_of

    @property
    def entries(self) -> tuple[PlannedTokens, ...]:
        """The batch by request id."""
        return tuple(map(PlannedTokens._make, self.tokens_of.items()))

    @property
    def evicted_ids(self) -> list[str]:
        """:attr:`evicted` by request id."""
        return self._queue.request_ids(self.evicted) if len(self.evicted) else []

    @property
    def kept_ids(self) -> list[str]:
        """:attr:`kept` by request id."""
        return self._queue.request_ids(self.kept) if len(self.kept) else []

    @property
    def yielded(self) -> Ints:
        """The best-effort requests in :attr:`evicted`."""
        if not len(self.evicted):
            return self.evicted
        yielded: Ints = self.evicted[self._queue.table[self.evicted, BEST_EFFORT] > 0]
        return yielded

    @property
    def evicted_tokens(self) -> int:
        """Computed tokens that :attr:`yielded` lose."""
        rows = self.yielded
        return int(self._queue.table[rows, COMPUTED].sum()) if len(rows) else 0


class BatchBuilder:
    """Collects a plan and enforces its invariants. ``O(requests)`` to build, ``O(rows)`` per call.

    Rules for KV blocks, which make every plan one that the engine can run:

    - A running request may take free blocks and those of running requests outside the plan, which
      the engine then preempts whole. Waiting and best-effort requests and drafts take free blocks
      only.
    - An engine that ran out of blocks admits no request in that step: a plan admits or preempts,
      not both.
    - The first waiting request that does not fit ends admission while any request runs: small
      prompts could keep taking the blocks that a long one waits for.

    With ``tiers``, rows are numbered by its order, and the budget is that of the promised requests.
    ``lengths``: drafts that decodes may verify."""

    __slots__ = (
        "_costs",
        "_evicted",
        "_pieces",
        "_plan",
        "_queue",
        "_state",
        "_tiers",
        "block_tokens",
        "budget",
        "lengths",
        "table",
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
        self.block_tokens = budget.block_tokens
        self.lengths: Lengths | None = None
        """Drafts that decodes may verify, by the builder's row; ``None`` where nothing is
        drafted."""
        self._queue = queue
        self._evicted = _NONE
        self._tiers = tiers
        self.table: Floats = queue.table if tiers is None else queue.table[tiers.order]
        """The rows in the builder's order, ``float64[n, FIELDS]``. Read only."""
        self._pieces = latency.pieces
        promised = len(self.table) if tiers is None else tiers.promised
        self._state, self._costs, self._plan = begin(self.table, self._pieces, promised, budget[:6])
        if lengths is not None:
            self.speculate(lengths if tiers is None else lengths.of(tiers.order))

    @property
    def granted(self) -> Ints:
        """``int64[n]``, the tokens planned so far by row. Read only."""
        granted: Ints = self._plan[GRANTED]
        return granted

    @property
    def empty(self) -> bool:
        """Whether nothing has been planned yet."""
        return not self._state[COUNT]

    @property
    def cost_s(self) -> float:
        """Predicted time of the batch so far; of an empty one, the fixed time of a step."""
        return float(self._costs.max())

    @property
    def sequences_left(self) -> int:
        """How many more waiting requests may start; below zero if too many run."""
        return int(self._state[SEQUENCES_LEFT])

    @property
    def free_blocks(self) -> int:
        """Free KV blocks left; below zero where the plan takes blocks of running requests."""
        return int(self._state[FREE_BLOCKS])

    @property
    def admits(self) -> bool:
        """Whether the plan admits a waiting request."""
        return bool(self._state[ADMITTED])

    def speculate(self, lengths: Lengths) -> None:
        """Set the maximum number of drafts of the decodes taken from now on, of the first rows."""
        drafts = self._plan[DRAFTS]
        before = int(drafts.max(initial=0))
        self.lengths = lengths if self.lengths is None else lengths.before(self.lengths)
        drafts[: len(self.lengths.drafts)] = self.lengths.drafts
        self._costs += self.budget.draft_s * (int(drafts.max(initial=0)) - before)

    def show(self, rows: int) -> None:
        """From now on, take only the first ``rows`` rows."""
        self._state[SHOWN] = rows

    def withhold(self, blocks: int, running: int) -> None:
        """Count ``running`` best-effort requests with ``blocks`` as still running, not as free."""
        self._state[FREE_BLOCKS] -= blocks
        self._state[NEEDED] -= blocks
        self._state[SEQUENCES_LEFT] -= running
        self._state[SEQUENCES_RUNNING] += running

    def reopen(self) -> None:
        """Let waiting requests pass one that did not fit."""
        self._state[CLOSED] = 0

    def spare(self, blocks: int) -> None:
        """From now on, every admission leaves ``blocks`` free while any request runs."""
        self._state[SPARE_BLOCKS] = blocks

    def evict(self, rows: Ints) -> None:
        """Preempt the running requests in ``rows``, none of which is planned, before the batch."""
        evict(self.table, rows, self._state, self._plan)
        self._evicted = rows

    def add(self, row: int, tokens: int = UNBOUNDED_TOKENS) -> int:
        """Take up to ``tokens`` of ``row``; return how many, 0 where none fit or it is planned."""
        return self.take(np.array([row]), tokens=tokens)

    def take(
        self,
        rows: Ints,
        until_s: float = inf,
        tokens: int = UNBOUNDED_TOKENS,
        in_order: bool = False,
    ) -> int:
        """Take the requests in ``rows`` in order; return the tokens taken. The first prefill that
        does not fit ``until_s`` is chunked and ends it; a decode that does not fit is skipped.
        ``in_order``: stop at the first request that gets nothing, unless the batch is still empty.
        """
        if not len(rows):
            return 0
        return take(
            self.table,
            self._pieces,
            rows,
            (until_s, tokens, in_order),
            self._state,
            self._costs,
            self._plan,
        )

    def ensure_progress(self, rows: Iterable[int]) -> None:
        """For an empty plan, take at most one block's tokens, whatever the time budget."""
        if not self.empty:
            return
        for row in rows:
            if self.add(row, self.block_tokens):
                return

    def plan(self, evicted: Ints = _NONE, kept: Ints = _NONE) -> BatchPlan:
        """The plan collected so far; ``evicted`` and ``kept`` are rows in the builder's order."""
        granted, order, drafts = self._plan
        rows = order[: self._state[COUNT]]
        tokens = granted[rows]
        predicted_s = float(self._costs.max())
        if self.lengths is not None and self.budget.draft_s:
            checked = np.minimum(tokens - 1, drafts[rows]).max(initial=0)
            predicted_s -= self.budget.draft_s * float(drafts.max(initial=0) - checked)
        if len(self._evicted):
            evicted = np.concatenate((self._evicted, evicted))
        if self._tiers is not None:
            order = self._tiers.order
            rows, evicted, kept = order[rows], order[evicted], order[kept]
        return BatchPlan(self._queue, rows, tokens, predicted_s, evicted, kept)
