"""The contract of a local policy: which tokens run in the engine's next batch."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import ceil, inf, isnan
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.assumptions import PREFILL_SHARE, UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.batching.batch import (
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    PlannedTokens,
    Tiers,
)
from sluice.scheduling.fleet.local_orders import LOCAL_ORDERS
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.latency.speculation import AdaptiveLengths, Lengths, Mask, Speculation
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.deadline import FIRST
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    BEST_EFFORT,
    COMPUTED,
    DRAFTED,
    EMITTED,
    EXPECTED,
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
    needs_prefill,
    pending_work_s,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView


class EarnedTime:
    """Time that a share of the engine has earned and not spent, ``seconds``; 0 while none is
    owed."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        self._share = share
        self._earned_at_s: float | None = None

    def earn(self, now_s: float, owed: bool) -> None:
        """Advance to ``now_s``; ``owed``: whether any request is owed the time."""
        if not owed:
            self.seconds, self._earned_at_s = 0.0, None
            return
        if self._earned_at_s is not None:
            self.seconds += self._share * max(0.0, now_s - self._earned_at_s)
        self._earned_at_s = now_s


@compiled
def fitting(size: Floats, room: float) -> NDArray[np.bool_]:
    """Per job, whether it is taken if each in turn is taken where it still fits ``room``."""
    taken = np.zeros(size.shape[0], np.bool_)
    for job in range(size.shape[0]):
        if size[job] <= room:
            room -= size[job]
            taken[job] = True
    return taken


@compiled
def expected_tokens(row: Floats) -> float:
    """The predicted length of a row's output, tokens: more than it has emitted."""
    expected = row[EXPECTED]
    if isnan(expected):
        expected = UNKNOWN_OUTPUT_TOKENS
    return max(expected, row[EMITTED] + 1.0)


@compiled
def blocks_needed(table: Floats, rows: Ints, block_tokens: int) -> Floats:
    """KV blocks that the whole sequence of each of ``rows`` needs beyond those it holds."""
    needed = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        upto = ceil((table[row, COMPUTED] + table[row, PENDING]) / block_tokens)
        needed[place] = max(0.0, upto - table[row, KV_BLOCKS])
    return needed


AGED_CHUNK_TOKENS = 64
"""Smallest chunk of an aged prompt. Each chunk reads all of the context before it, so tiny chunks
would cost more than they compute."""

LONGEST_STEPS = 20
"""Longest batch, in empty steps, where no decode limits it: long enough that the fixed time per
step is a small overhead, short enough that a new request does not wait long."""


MOST_OF_BATCH = 0.5
"""Share of a batch's time, beside what was taken before, for a prompt that the lane has begun."""

STILL_EARNED = 0.5
"""Share of the rest of a prompt that the lane must have earned to continue it. It has earned all
of it when it begins; chunks cost more than the whole."""


class AgedLane:
    """Gives requests older than ``patience_s`` the share ``share`` of the time, by arrival.

    Let ``W`` be the work, seconds, of a request and of the aged requests before it. Its prompt is
    computed at most ``patience_s + W / share`` after its arrival, plus the time for which no memory
    or sequence is free, plus the decode time of the aged requests before it, of which
    :meth:`places` run at once. A long prompt on a small share would hold its KV for long: it begins
    once its whole work is earned, then has up to half of each batch, and the bound has the time of
    these batches in addition."""

    def __init__(self, patience_s: float, share: float) -> None:
        self.patience_s = patience_s
        self._share = share
        self._earned = EarnedTime(share)

    def places(self, running: int) -> int:
        """How many of ``running`` sequences belong to the lane: at least one."""
        return max(1, int(self._share * running))

    def aged(self, table: Floats, rows: Ints, now_s: float) -> Ints:
        """The requests of ``rows`` that have waited longer than the patience, by arrival. Call it
        once per plan: the lane earns time while there are any."""
        aged = rows[now_s - table[rows, ARRIVAL] > self.patience_s]
        self._earned.earn(now_s, len(aged) > 0)
        by_arrival: Ints = aged[np.argsort(table[aged, ARRIVAL], kind="stable")]
        return by_arrival

    def in_turn(self, table: Floats, aged: Ints, most_tokens: float) -> Ints:
        """The requests of ``aged`` before the first of more than ``most_tokens``; that one alone if
        it is the oldest."""
        long = table[aged, COMPUTED] + table[aged, PENDING] > most_tokens
        return aged[: max(1, int(np.argmax(long)))] if long.any() else aged

    def overdue(self, table: Floats, rows: Ints, now_s: float) -> NDArray[np.bool_]:
        """Which of ``rows`` have waited longer than twice the patience, and so block admission."""
        late: NDArray[np.bool_] = now_s - table[rows, ARRIVAL] > 2 * self.patience_s
        return late

    def under_way(
        self, table: Floats, aged: Ints, latency: LatencyModel, most_tokens: float
    ) -> int:
        """The first of ``aged`` that has begun, if it has at most ``most_tokens`` or the lane has
        earned its rest; else -1."""
        begun = aged[table[aged, RUNNING] > 0]
        if not len(begun):
            return -1
        first = table[begun[0]]
        earned = self._earned.seconds >= STILL_EARNED * _rest_s(first, latency)
        return int(begun[0]) if earned or _tokens(first) <= most_tokens else -1

    def take(
        self,
        batch: BatchBuilder,
        table: Floats,
        aged: Ints,
        now_s: float,
        latency: LatencyModel,
        until_s: float = inf,
        most_tokens: float = inf,
    ) -> None:
        """Spend the earned time on the prefills ``aged``, in order, in a batch that ends at
        ``until_s``; a prompt of more than ``most_tokens`` is a long one."""
        fits = fitting(blocks_needed(table, aged, batch.block_tokens), batch.free_blocks)
        fits |= self.overdue(table, aged, now_s)
        aged = aged[fits]
        if not len(aged):
            return
        first = table[aged[0]]
        tokens = min(int(first[PENDING]), AGED_CHUNK_TOKENS)
        chunk_s = needed_s = latency.work_s(tokens, int(first[COMPUTED]))
        # Time earned while nothing fitted must not be spent in one batch.
        most_s = share_s = max(chunk_s, LONGEST_STEPS * latency.fixed_s)
        before_s = batch.cost_s
        if _tokens(first) > most_tokens:
            rest_s = _rest_s(first, latency)
            needed_s = max(chunk_s, STILL_EARNED * rest_s) if first[RUNNING] > 0 else rest_s
            most_s = max(most_s, latency.work_s(_tokens(first), 0))
            share_s = max(chunk_s, MOST_OF_BATCH * (until_s - before_s))
        earned = self._earned
        earned.seconds = min(earned.seconds, most_s)
        if earned.seconds >= needed_s:
            batch.take(aged, before_s + min(earned.seconds, share_s))
            earned.seconds -= batch.cost_s - before_s


def _tokens(row: Floats) -> int:
    """Tokens of a whole prompt."""
    return int(row[COMPUTED] + row[PENDING])


def _rest_s(row: Floats, latency: LatencyModel) -> float:
    """Work of what is left of a prompt, seconds."""
    return latency.work_s(int(row[PENDING]), int(row[COMPUTED]))


class PrefillShareOptions(PolicyOptions):
    """The option of policies that reserve a share of each batch for prefill."""

    prefill_share: float = Field(
        default=PREFILL_SHARE,
        ge=0,
        le=0.9,
        description="Minimum share of a batch's time that decodes leave to prefills; a TPOT that "
        "leaves less does not set the time budget. 0 is the literal paper: decodes can stop all "
        "prefill.",
    )


def least_useful_s(
    taken_s: float,
    latency: LatencyModel,
    computed_tokens: int = 0,
    share: float = PREFILL_SHARE,
) -> float:
    """Minimum time, seconds, of a batch in which prefill gets its ``share`` beside the ``taken_s``
    of all else. The next token of a prefill reads its ``computed_tokens``, so one token must fit.

    A TPOT hardly longer than a step would stop all prefill on the replica, and would mostly be
    violated anyway: it does not set the budget. FairBatching §3.2 and ProServe §4.2 do not
    cover it.
    """
    return (taken_s + latency.work_s(1, computed_tokens)) / (1 - share)


Fill = Callable[[BatchBuilder, QueueView, float, LatencyModel], None]
"""A policy's plan of the guaranteed requests."""

USABLE = 0.9
"""Share of the guaranteed requests' slack that best-effort work may use: step times vary around
their prediction."""


LONGEST_S = 0.05
"""Lower bound of the batch limit of :data:`LONGEST_STEPS` empty steps, seconds: by a latency model
with an almost free empty step, that limit would be too short."""


RESERVE = 0.1
"""Share of the KV blocks and of the sequences that best-effort requests leave free when they start,
so that the next promised request need not evict."""

LOST_SHARE = 0.05
"""Maximum share of the engine's time that evictions may waste: after an eviction that discarded
``s`` seconds of work, no best-effort request starts for ``s / LOST_SHARE`` while any request is
promised."""


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
        "best-effort requests in order of arrival, whatever else is guaranteed.",
    )


class BestEffort:
    """Plans a queue of two tiers. ``O(n log n)``, plus the cost of the guaranteed requests' policy.

    1. *Guaranteed requests* are planned by the policy as if the blocks and sequences of best-effort
       requests were free; only the aged lane of step 4 comes before.
    2. *Eviction*: where that plan needs what best-effort requests hold, it preempts as few of them
       as needed, and among single sufficient ones the one that loses least. They keep their tokens.
    3. *Leftovers*: best-effort work fills the batch until the first guaranteed decode that can be
       on time would be late or out of pace, and for at most 20 empty steps or 50 ms. While a
       guaranteed prefill that could run has work left, it gets all the time. The order is: decodes;
       the prefills of step 4; prefills that can meet their own objective, by deadline; the others
       by arrival. A request starts only while no guaranteed request waits, and where its predicted
       length fits beside those of all running requests. Evicted work closes admission for a time
       (:data:`LOST_SHARE`), which bounds recomputed work.
    4. *Ageing* (:class:`AgedLane`): the ``max(1, aged_share * running)`` oldest requests that have
       waited longer than ``patience_s`` get a share of the time whatever is guaranteed, and are not
       evicted. From twice the patience on, no best-effort request behind one starts until it fits.

    Tenants take turns in step 3, by tokens per weight, so that a tenant with thousands of requests
    does not block another tenant's few. Where nothing else can run, running best-effort requests
    are evicted one by one until a request can run. SLOs-Serve §4.1 preempts its best-effort tier
    without a bound on the waste, and has no ageing."""

    def __init__(self, options: BestEffortOptions | None = None) -> None:
        options = options or BestEffortOptions()
        self._lane = AgedLane(options.patience_s, options.aged_share)
        self._closed_until_s = -inf
        self.patience_s = options.patience_s
        """The wait after which a request is aged, seconds."""

    def plan(
        self,
        fill: Fill,
        queue: QueueView,
        now_s: float,
        latency: LatencyModel,
        budget: BatchBudget,
        lengths: Lengths | None = None,
    ) -> BatchPlan:
        """Plan ``queue``; ``fill`` plans its guaranteed requests, ``lengths`` are the drafts."""
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
        # From here on, rows are numbered in the builder's order.
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
        table = batch.table
        answers = (table[lane, RUNNING] > 0) & ~is_prefill(table[lane])
        batch.take(lane[answers])
        if pressed and not answers.all():
            self._lane.take(batch, table, lane[~answers], now_s, latency)

    def _make_room(self, batch: BatchBuilder, holders: Ints) -> Ints:
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
        table = batch.table
        yielding = promised + len(lane)
        fixed_s = latency.fixed_s
        left_s = deadlines_s(table, FIRST) - now_s
        work_s = pending_work_s(table, latency.pieces)
        until_s, waits = leftover_s(
            table[:promised],
            batch.granted,
            left_s,
            work_s,
            (batch.cost_s, fixed_s, least_useful_s(fixed_s, latency)),
            (batch.free_blocks, batch.sequences_left, batch.block_tokens),
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
        """The requests of ``waiting`` that may start beside the predicted lengths of all running
        ones, with the reserve left free; none passes an ``overdue`` one that does not fit. The
        budget counts the blocks of the rows from ``yielding`` on as free."""
        budget, table = batch.budget, batch.table
        waiting = waiting[: max(0, batch.sequences_left - int(RESERVE * budget.sequences))]
        if not len(waiting):
            return waiting
        running = table[:, RUNNING] > 0
        total = budget.kv_blocks + float(table[:yielding][running[:yielding], KV_BLOCKS].sum())
        claims = blocks_to_come(table, batch.granted, budget.block_tokens)
        active = running | (batch.granted > 0)
        most = total - RESERVE * total
        room = batch.free_blocks - RESERVE * total - claims[active].sum()
        fits = fitting(np.minimum(claims[waiting], most), room)
        stopped = np.flatnonzero(~fits & np.isin(waiting, overdue))
        if len(stopped):
            fits[stopped[0] :] = False
        return waiting[fits]

    def _charge(self, computed: Floats, now_s: float, latency: LatencyModel) -> None:
        """Close admission until the loss of ``computed`` tokens is within :data:`LOST_SHARE`."""
        lost_s = sum(latency.work_s(int(tokens), 0) for tokens in computed if tokens)
        if lost_s > 0:
            self._closed_until_s = max(self._closed_until_s, now_s) + lost_s / LOST_SHARE


def longest_wait_s(table: Floats, now_s: float) -> float:
    """Longest time since arrival or last token of a best-effort request that does not run; else
    0."""
    rows = (table[:, BEST_EFFORT] > 0) & (table[:, RUNNING] == 0)
    if not rows.any():
        return 0.0
    since_s = np.fmax(table[rows, ARRIVAL], table[rows, LAST_TOKEN])
    return max(0.0, now_s - float(since_s.min()))


def _break_standstill(batch: BatchBuilder, evicted: Ints, holders: Ints, lane: Ints) -> Ints:
    """For an empty plan: plan a little work of any request that fits, and evict until one fits.
    Return the evicted rows, unchanged if more evictions would not help."""
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
    """``order``, rows of a queue, so that tenants take turns behind the ``first`` rows: the next
    row is the one whose tenant has the fewest tokens over weight running or ahead, a running one on
    a tie. ``O(n log n)``; ``O(n)`` with a single tenant."""
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
    """Per row of ``order``: the tokens over weight of its tenant's requests that run or are before
    it."""
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
    """Which requests to evict so that ``blocks`` KV blocks and ``places`` sequence slots come free.

    While blocks are missing: of the requests that hold enough, the one with the fewest ``computed``
    tokens; if none does, the one that holds most. Then, while slots are missing, the one with the
    fewest computed tokens. Ties go to the last. ``O(n)`` per chosen request."""
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
    granted: Ints,
    left_s: Floats,
    work_s: Floats,
    times_s: tuple[float, float, float],
    space: tuple[int, int, int],
) -> tuple[float, bool]:
    """Maximum time of a batch that harms no guaranteed request, infinite if it can harm none; and
    whether a guaranteed request waits for memory or a sequence slot.

    A batch harms a decode if it ends after the decode's next token is due, or is longer than its
    TPOT; a late decode catches up in batches of half its TPOT.

    Args:
        times_s: of the batch so far, of an empty step, and the least TPOT that a useful batch can
            meet: a shorter one is ignored unless admission has guaranteed it.
        space: KV blocks and sequence slots left, and tokens per block."""
    cost_s, fixed_s, holdable_s = times_s
    free_blocks, places, block_tokens = space
    until_s = inf
    waits = False
    next_s = fixed_s
    for row in range(table.shape[0]):
        if not needs_prefill(table[row, EMITTED], table[row, PENDING]):
            next_s += work_s[row]
    for row in range(table.shape[0]):
        pending = table[row, PENDING]
        if granted[row] == 0 and table[row, RUNNING] == 0.0:
            waits = True
            blocks = ceil((table[row, COMPUTED] + pending) / block_tokens) - table[row, KV_BLOCKS]
            if places > 0 and blocks <= free_blocks:
                until_s = 0.0
        elif granted[row] < pending and needs_prefill(table[row, EMITTED], pending):
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
    """Per row, the KV blocks that its predicted length needs beyond those it has with
    ``granted``."""
    more = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        whole = ceil((table[row, PROMPT] + expected_tokens(table[row])) / block_tokens)
        now = ceil((table[row, COMPUTED] + granted[row]) / block_tokens)
        more[row] = max(0.0, whole - max(now, table[row, KV_BLOCKS]))
    return more


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

    A policy is one file with one subclass, registered by ``name`` in ``batching/__init__.py``. It
    may keep state and is called from one thread. It must be work-conserving: with a request that
    fits, the plan is not empty. It never sees best-effort requests (:attr:`best_effort` plans
    those), and needs no code for speculation (:attr:`speculation`).
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
        """Rows whose TPOT sets the batch time, which drafts can lengthen; default: none."""
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
