"""The best-effort tier: requests to which nothing was promised run on what the others leave."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf

import numpy as np
from pydantic import Field

from scheduling.batching.aged_lane import LONGEST_STEPS, AgedLane
from scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, Tiers
from scheduling.batching.moore_hodgson import fitting
from scheduling.batching.prefill_share import least_useful_s
from scheduling.batching.triage_rows import expected_tokens
from scheduling.deadline import FIRST
from scheduling.kernels import (
    ARRIVAL,
    BEST_EFFORT,
    COMPUTED,
    EMITTED,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    PROMISED,
    PROMPT,
    RUNNING,
    TENANT,
    TPOT,
    WEIGHT,
    Floats,
    Ints,
    compiled,
    deadlines_s,
    is_prefill,
    pending_work_s,
)
from scheduling.latency import LatencyModel
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView
from scheduling.speculation import Lengths

Fill = Callable[[BatchBuilder, QueueView, float, LatencyModel], None]
"""A policy's plan of the promised requests."""

USABLE = 0.9
"""Share of the promised requests' slack that best-effort work may use: steps vary around their
prediction."""


LONGEST_S = 0.05
"""How long a batch may last at least where no decode is waited for: by a latency model whose empty
step costs next to nothing, a number of such steps would be no time."""


class BestEffortOptions(PolicyOptions):
    """Options of the best-effort tier."""

    patience_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="A best-effort request that has waited longer is aged.",
    )
    aged_share: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="Share of the engine's time, and of its running sequences, for aged "
        "best-effort requests in order of arrival, whatever was promised to others.",
    )
    reserve: float = Field(
        default=0.1,
        ge=0,
        le=0.9,
        description="Share of the KV blocks and of the sequences that best-effort requests leave "
        "free when they begin, so that the next promised one need not evict.",
    )
    lost_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Most of the engine's time that evictions may waste: after one that threw away "
        "`s` seconds of work none begins for `s / lost_share`, while anything is promised.",
    )


class BestEffort:
    """Plans a queue of two tiers. ``O(n log n)`` beside the promised requests' policy.

    1. *Promised requests* are planned by the policy exactly as if the best-effort ones were not
       there and their blocks and sequences were free; only the lane of step 4 comes before.
    2. *Eviction*: where that plan needs blocks or sequences that best-effort requests hold, the
       plan names running ones to preempt, as few as needed, and of those that are enough the one
       that loses least. They keep what they have generated, and compute its KV again with the
       prompt's in one prefill.
    3. *Leftovers*: best-effort work fills the batch until the first promised decode that can be on
       time would be late or out of pace, and until no longer than 20 empty steps or 50 ms, so that
       a promised newcomer does not wait long. While a promised prefill is left that could run, all
       time is its own. Decodes come first, then the prefills of step 4, then those that can be on
       time by their own objective, by deadline, then the others by arrival. One begins only while
       no promised request waits, and where its predicted length fits beside those of all that run
       with a reserve to spare; evicted work closes admission for a time (``lost_share``). So at
       most that share of the time, and what one burst of promised work evicts, is computed again.
    4. *Ageing* (:class:`~scheduling.batching.aged_lane.AgedLane`): the oldest requests that have
       waited longer than ``patience_s``, ``max(1, aged_share * running)`` at once, have a share of
       the time whatever is promised, and are not evicted: those that answer are in every batch. So
       with ``W`` seconds of prefill of the aged ones before it and of its own, a request gets its
       first token at most ``patience_s + W / aged_share`` after its arrival, plus the answers of
       those before it, plus the time for which all memory is held by others; from twice the
       patience on none of these begins until it fits.

    Where the requests are several tenants', these take turns, by tokens and by weight: in the
    orders of step 3 the one comes first before which, of the same tenant, least is ahead or
    running. So one that sends thousands of requests keeps no other one's few waiting behind them
    all. The lane is of the oldest, whosesoever they are, so that what step 4 says of the wait
    holds.

    Where nothing else can run, running best-effort requests are evicted one by one until something
    can.

    SLOs-Serve §4.1 has a tier by this name, too: it preempts without a bound on the waste, and does
    not age.
    """

    def __init__(self, options: BestEffortOptions | None = None) -> None:
        options = options or BestEffortOptions()
        self._reserve = options.reserve
        self._lost_share = options.lost_share
        self._lane = AgedLane(options.patience_s, options.aged_share)
        self._closed_until_s = -inf

    @property
    def patience_s(self) -> float:
        """The wait after which a request is aged."""
        return self._lane.patience_s

    def plan(
        self,
        fill: Fill,
        queue: QueueView,
        now_s: float,
        latency: LatencyModel,
        budget: BatchBudget,
        lengths: Lengths | None = None,
    ) -> BatchPlan:
        """Plan ``queue``, whose promised requests ``fill`` plans, with ``lengths`` where something
        is drafted."""
        table = queue.table
        apart = table[:, BEST_EFFORT] > 0
        running = table[:, RUNNING] > 0
        aged = self._lane.aged(table, np.flatnonzero(apart), now_s)
        lane = aged[: self._lane.places(int(np.count_nonzero(running)))]
        apart[lane] = False
        yielding, promised = np.flatnonzero(apart), np.flatnonzero(table[:, BEST_EFFORT] == 0)
        holders = yielding[running[yielding]]
        free = budget._replace(
            sequences=budget.sequences - int(np.count_nonzero(running[lane])),
            kv_blocks=budget.kv_blocks + int(table[holders, KV_BLOCKS].sum()),
        )
        count = len(promised)
        order = np.concatenate((promised, lane, yielding))
        batch = BatchBuilder(queue, free, latency, Tiers(order, count), lengths)
        # From here on rows are numbered as the builder has them.
        lane = np.arange(count, count + len(lane))
        holders = np.flatnonzero(running[order])
        holders = holders[holders >= count + len(lane)]
        self._serve_aged(batch, lane, count > 0, now_s, latency)
        if count:
            batch.show(count)
            fill(batch, queue.select(promised), now_s, latency)
            batch.show(len(order))
        evicted = self._make_room(batch, holders)
        staying = np.setdiff1d(holders, evicted)
        batch.withhold(int(batch.table[staying, KV_BLOCKS].sum()), len(staying))
        begins = not len(evicted) and (not count or now_s >= self._closed_until_s)
        rows = np.setdiff1d(np.arange(count, len(order)), evicted)
        self._fill_leftover(batch, rows, count, lane, begins, now_s, latency)
        if batch.empty:
            evicted = _break_standstill(batch, evicted, holders, lane)
        if count:
            self._charge(batch.table[evicted, COMPUTED], now_s, latency)
        kept = lane[(batch.table[lane, RUNNING] > 0) & (batch.granted[lane] == 0)]
        return batch.plan(evicted, np.setdiff1d(kept, evicted))

    def _serve_aged(
        self, batch: BatchBuilder, lane: Ints, pressed: bool, now_s: float, latency: LatencyModel
    ) -> None:
        """The lane: its decodes, and where others are served before it (``pressed``), its share of
        the time for its prefills."""
        table = batch.table
        answers = (table[lane, RUNNING] > 0) & ~is_prefill(table[lane])
        batch.take(lane[answers])
        if pressed and not answers.all():
            self._lane.take(batch, table, lane[~answers], now_s, latency)

    def _make_room(self, batch: BatchBuilder, holders: Ints) -> Ints:
        """The rows of ``holders`` to evict, so that what is planned finds its blocks and places."""
        held = batch.table[holders, KV_BLOCKS]
        blocks = int(held.sum()) - batch.free_blocks
        places = len(holders) - batch.sequences_left if batch.admits else 0
        if blocks <= 0 and places <= 0:
            return holders[:0]
        return holders[victims(held, batch.table[holders, COMPUTED], blocks, places)]

    def _fill_leftover(
        self,
        batch: BatchBuilder,
        rows: Ints,
        promised: int,
        lane: Ints,
        begins: bool,
        now_s: float,
        latency: LatencyModel,
    ) -> None:
        """Give ``rows``, which begin with the ``lane``, the time that the ``promised`` rows before
        them leave."""
        table = batch.table
        yielding = promised + len(lane)
        fixed_s = latency.fixed_s
        left_s = deadlines_s(table, FIRST) - now_s
        work_s = pending_work_s(table, latency.pieces)
        until_s, waits = leftover_s(
            table,
            promised,
            batch.granted,
            left_s,
            work_s,
            batch.cost_s,
            fixed_s,
            least_useful_s(fixed_s, latency),
            batch.free_blocks,
            batch.sequences_left,
            batch.block_tokens,
        )
        until_s = min(USABLE * until_s, max(LONGEST_STEPS * fixed_s, LONGEST_S))
        running = table[rows, RUNNING] > 0
        decode = running & ~is_prefill(table[rows])
        batch.take(rows[decode], until_s)
        rows, running = rows[~decode], running[~decode]
        if not (begins and not waits):
            rows = rows[running]
        else:
            overdue = lane[self._lane.overdue(table, lane, now_s)]
            waiting = rows[~running]
            waiting = in_turns(table, waiting, int(np.count_nonzero(waiting < yielding)))
            admissible = self._admissible(batch, waiting, overdue, yielding)
            rows = np.concatenate((rows[running], admissible))
        on_time = (left_s[rows] < inf) & (left_s[rows] >= fixed_s + work_s[rows])
        # Rows are numbered in order of arrival.
        due_s = np.where(on_time, left_s[rows], inf)
        due_s[rows < yielding] = -inf
        order = rows[np.lexsort((rows, due_s))]
        batch.take(in_turns(table, order, int(np.count_nonzero(rows < yielding))), until_s)

    def _admissible(self, batch: BatchBuilder, waiting: Ints, overdue: Ints, yielding: int) -> Ints:
        """Those of ``waiting`` that may begin: with the reserve to spare, and so that all that runs
        has room for its predicted length. None passes one that is ``overdue`` and does not fit.

        The batch's budget counts what the rows from ``yielding`` on hold as free.
        """
        budget, table = batch.budget, batch.table
        waiting = waiting[: max(0, batch.sequences_left - int(self._reserve * budget.sequences))]
        if not len(waiting):
            return waiting
        running = table[:, RUNNING] > 0
        total = budget.kv_blocks + float(table[:yielding][running[:yielding], KV_BLOCKS].sum())
        claims = blocks_to_come(table, batch.granted, budget.block_tokens)
        active = running | (batch.granted > 0)
        most = total - self._reserve * total
        room = batch.free_blocks - self._reserve * total - claims[active].sum()
        fits = fitting(np.minimum(claims[waiting], most), room)
        stopped = np.flatnonzero(~fits & np.isin(waiting, overdue))
        if len(stopped):
            fits[stopped[0] :] = False
        return waiting[fits]

    def _charge(self, computed: Floats, now_s: float, latency: LatencyModel) -> None:
        """Close admission for as long as it takes to make good the loss of ``computed`` tokens."""
        lost_s = sum(latency.work_s(int(tokens), 0) for tokens in computed if tokens)
        if lost_s > 0:
            self._closed_until_s = max(self._closed_until_s, now_s) + lost_s / self._lost_share


def longest_wait_s(table: Floats, now_s: float) -> float:
    """The longest time for which a best-effort request that does not run has had no token, since
    its arrival or its last one; 0 where all run."""
    rows = (table[:, BEST_EFFORT] > 0) & (table[:, RUNNING] == 0)
    if not rows.any():
        return 0.0
    since_s = np.fmax(table[rows, ARRIVAL], table[rows, LAST_TOKEN])
    return max(0.0, now_s - float(since_s.min()))


def _break_standstill(batch: BatchBuilder, evicted: Ints, holders: Ints, lane: Ints) -> Ints:
    """Where nothing is planned, plan a little of whatever fits, and evict until something does;
    return what is evicted: no more than before if that is of no use."""
    batch.spare(0)
    batch.reopen()
    rows = np.arange(len(batch.table))
    gone = evicted.tolist()
    running = lane[batch.table[lane, RUNNING] > 0]
    victims = [row for row in (*running.tolist(), *holders.tolist()) if row not in gone]
    while True:
        batch.ensure_progress(row for row in rows.tolist() if row not in gone)
        if not batch.empty:
            return np.array(gone, np.int64)
        if not victims:
            return evicted
        gone.append(victims.pop())
        batch.withhold(-int(batch.table[gone[-1], KV_BLOCKS]), -1)
        batch.reopen()


def in_turns(table: Floats, order: Ints, first: int = 0) -> Ints:
    """The rows ``order`` of a queue, but for the ``first`` ones with their tenants in turns: each
    tenant's in that order, and next the one before which least is ahead or running of its tenant's
    best-effort requests, in tokens over weight, of equals one that has begun. ``O(n log n)``;
    ``O(n)`` where all are one tenant's."""
    tenants = table[order, TENANT]
    if not len(order) or (tenants == tenants[0]).all():
        return order
    ahead = tokens_ahead(table, order)
    waits = table[order, RUNNING] == 0
    ahead[:first], waits[:first] = -inf, False
    turns: Ints = order[np.lexsort((waits, ahead))]
    return turns


@compiled
def tokens_ahead(table: Floats, order: Ints) -> Floats:
    """For each row of ``order``: the tokens of its tenant's best-effort requests that run, and of
    those before it, over the tenant's weight. ``O(n log n)``."""
    names = np.unique(table[order, TENANT])
    ahead = np.zeros(names.shape[0])
    ordered = np.zeros(table.shape[0], np.bool_)
    ordered[order] = True
    for row in range(table.shape[0]):
        if table[row, BEST_EFFORT] == 0.0 or table[row, RUNNING] == 0.0 or ordered[row]:
            continue
        place = np.searchsorted(names, table[row, TENANT])
        if place < names.shape[0] and names[place] == table[row, TENANT]:
            ahead[place] += table[row, PROMPT] + expected_tokens(table[row])
    tags = np.empty(order.shape[0])
    for place, row in enumerate(order):
        tenant = np.searchsorted(names, table[row, TENANT])
        tags[place] = ahead[tenant] / table[row, WEIGHT]
        ahead[tenant] += table[row, PROMPT] + expected_tokens(table[row])
    return tags


@compiled
def victims(held: Floats, computed: Floats, blocks: int, places: int) -> Ints:
    """Which requests to evict so that ``blocks`` and ``places`` come free.

    While blocks lack: of those that hold enough the one that has least computed; where none does,
    the one that holds most. Then, while places lack, the one that has least computed. Of equals the
    last. ``O(n)`` for each that is chosen.

    Args:
        held: ``float64[n]``, blocks of each.
        computed: ``float64[n]``, tokens that each would lose.
    """
    chosen = np.empty(held.shape[0], np.int64)
    gone = np.zeros(held.shape[0], np.bool_)
    count = 0
    while (blocks > 0 or count < places) and count < held.shape[0]:
        least, most = -1, -1
        for row in range(held.shape[0]):
            if gone[row]:
                continue
            if held[row] >= blocks and (least < 0 or computed[row] <= computed[least]):
                least = row
            if most < 0 or held[row] >= held[most]:
                most = row
        pick = least if least >= 0 else most
        gone[pick] = True
        chosen[count] = pick
        count += 1
        blocks -= int(held[pick])
    return chosen[:count]


@compiled
def leftover_s(
    table: Floats,
    promised: int,
    granted: Ints,
    left_s: Floats,
    work_s: Floats,
    cost_s: float,
    fixed_s: float,
    holdable_s: float,
    free_blocks: int,
    places: int,
    block_tokens: int,
) -> tuple[float, bool]:
    """How long a batch may last so that no promised request is harmed, infinite if none can be; and
    whether one waits for memory or a place.

    A decode is harmed by a batch that ends after its next token is due, or that is longer than its
    TPOT. One that cannot be on time is caught up with in batches of half its TPOT. A TPOT below
    ``holdable_s`` can be held in no useful batch and counts for nothing, unless it was promised:
    then admission has said that it can be held.

    Args:
        promised: rows of promised requests, the first ones.
        granted: tokens that each row gets in the batch.
        left_s, work_s: per row, time until its next token is due, and work of what is pending.
        cost_s: time of the batch so far.
        fixed_s: time of an empty step.
        free_blocks, places: what is left of memory and sequences.
    """
    until_s = inf
    waits = False
    next_s = fixed_s
    for row in range(promised):
        if table[row, EMITTED] > 0.0 and table[row, PENDING] <= 1.0:
            next_s += work_s[row]
    for row in range(promised):
        pending = table[row, PENDING]
        if granted[row] == 0 and table[row, RUNNING] == 0.0:
            waits = True
            blocks = ceil((table[row, COMPUTED] + pending) / block_tokens) - table[row, KV_BLOCKS]
            if places > 0 and blocks <= free_blocks:
                until_s = 0.0
        elif granted[row] < pending and (table[row, EMITTED] == 0.0 or pending > 1.0):
            until_s = 0.0
        else:
            spare_s = left_s[row] if granted[row] > 0 else left_s[row] - next_s
            tpot_s = table[row, TPOT] if table[row, EMITTED] > 0.0 else inf
            if spare_s >= cost_s:
                until_s = min(until_s, spare_s)
            else:
                tpot_s /= 2.0
            if table[row, TPOT] >= holdable_s or table[row, PROMISED] > 0.0:
                until_s = min(until_s, tpot_s)
    return until_s, waits


@compiled
def blocks_to_come(table: Floats, granted: Ints, block_tokens: int) -> Floats:
    """Per row, the KV blocks that its predicted length needs beyond those that it has with the
    tokens ``granted`` now. ``O(rows)``."""
    more = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        whole = ceil((table[row, PROMPT] + expected_tokens(table[row])) / block_tokens)
        now = ceil((table[row, COMPUTED] + granted[row]) / block_tokens)
        more[row] = max(0.0, whole - max(now, table[row, KV_BLOCKS]))
    return more
