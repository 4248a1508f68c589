"""The compiled loops of :class:`sluice.scheduling.batching.batch.BatchBuilder`, which states their
rules.

The state between calls is three arrays: the counters, the predicted time by each piece of the
latency model, and the plan, ``int64[PLAN, rows]``.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

import numpy as np

from sluice.scheduling.latency.model import tokens_within
from sluice.scheduling.request.kernels import (
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
    """The state of an empty plan. ``limits`` are the fields of a
    :class:`~sluice.scheduling.batching.batch.BatchBudget` up to ``lookahead_tokens``."""
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
    """Take the blocks for ``tokens`` of a running request; return how many tokens fit. If ``draws``
    is set, it may take blocks from other running requests with ``draws``."""
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
    """Take the blocks for the drafted tokens of a decode whose own token was just taken; return how
    many drafts fit without using blocks that other running requests need."""
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
    """Take ``rows`` in order; return the tokens taken. ``limits`` are the other arguments of
    :meth:`~sluice.scheduling.batching.batch.BatchBuilder.take`. ``O(rows * pieces)``."""
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
