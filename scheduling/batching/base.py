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
from sluice.scheduling.batching.batch import BatchBudget, BatchBuilder, BatchPlan, Tiers
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
    PRIORITY,
    PROGRAM,
    PROMISED,
    PROMPT,
    RUNNING,
    TENANT,
    TPOT,
    TTFT,
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
from sluice.scheduling.tenancy.attained import BEGAN, OWN, SHARED, Attained


class EarnedTime:
    """Seconds that a share of the engine has earned and not spent; 0 while none is owed."""

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


LONGEST_STEPS = 20
"""Longest batch, in empty steps, where no decode limits it."""

BRIEF_STEPS = 1.8
"""Longest batch, in empty steps, that work of less worth than the promised prompts may fill while
more of these are expected: with 3 the P95 of their TTFT was 20 % longer, with 1.8 10 %."""

BRIEF_SHARE = 0.1
"""The same as a share of such a prompt's time, and beyond the time of what is promised."""

AHEAD_TTFT = 0.5
"""How far ahead of their TPOT promised decodes get before best-effort prompts fill all the time
that they leave, as a share of the least TTFT: time in which they can wait for a promise to come.
Without it, admission promised up to 8 points fewer under load."""

MAX_AHEAD_S = 1.0
"""But no further: with a TTFT of 30 s best-effort prompts got a fifth fewer tokens for nothing."""

GAIN_SHARE = 0.25
"""Before, best-effort prompts get this share of the time by which a batch is shorter than TPOT."""

EXPECTED_FOR_S = 60.0
"""How long after a promised prompt others are expected, seconds."""

STILL_EARNED = 0.5
"""Share of the rest of a prompt that must be earned to continue it, as chunks cost extra."""


class AgedLane:
    """Gives requests older than ``patience_s`` the share ``share`` of the time, by arrival.

    With ``W`` seconds of work in a request and the aged ones before it, its prompt is computed at
    most ``patience_s + W / share`` after its arrival, plus times without memory or sequence and the
    decode time of those before it. A long prompt begins once its whole work is earned, and then has
    up to half of each batch, so that it holds its KV for a short time only."""

    def __init__(self, patience_s: float, share: float) -> None:
        self.patience_s = patience_s
        self._share = share
        self._earned = EarnedTime(share)

    def places(self, running: int) -> int:
        """How many of ``running`` sequences belong to the lane: at least one."""
        return max(1, int(self._share * running))

    def aged(self, table: Floats, rows: Ints, now_s: float) -> Ints:
        """The ``rows`` past the patience, by arrival. Call it once per plan: it earns time."""
        aged = rows[now_s - table[rows, ARRIVAL] > self.patience_s]
        self._earned.earn(now_s, len(aged) > 0)
        by_arrival: Ints = aged[np.argsort(table[aged, ARRIVAL], kind="stable")]
        return by_arrival

    def in_turn(self, table: Floats, aged: Ints, most_tokens: float) -> Ints:
        """Those before the first above ``most_tokens``; only that one if it is the oldest."""
        long = table[aged, COMPUTED] + table[aged, PENDING] > most_tokens
        return aged[: max(1, int(np.argmax(long)))] if long.any() else aged

    def overdue(self, table: Floats, rows: Ints, now_s: float) -> NDArray[np.bool_]:
        """Which of ``rows`` have waited longer than twice the patience, and so block admission."""
        late: NDArray[np.bool_] = now_s - table[rows, ARRIVAL] > 2 * self.patience_s
        return late

    def under_way(
        self, table: Floats, aged: Ints, latency: LatencyModel, most_tokens: float
    ) -> int:
        """The first that has begun and is short or has its rest earned; else -1."""
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
        """Spend the earned time on ``aged``, in order; above ``most_tokens`` a prompt is long."""
        fits = fitting(blocks_needed(table, aged, batch.block_tokens), batch.free_blocks)
        fits |= self.overdue(table, aged, now_s)
        aged = aged[fits]
        if not len(aged):
            return
        first = table[aged[0]]
        # Each chunk reads all of the context before it, so that none is smaller.
        tokens = min(int(first[PENDING]), 64)
        chunk_s = needed_s = latency.work_s(tokens, int(first[COMPUTED]))
        # Time earned while nothing fitted must not be spent in one batch.
        most_s = share_s = max(chunk_s, LONGEST_STEPS * latency.fixed_s)
        before_s = batch.cost_s
        if _tokens(first) > most_tokens:
            rest_s = _rest_s(first, latency)
            needed_s = max(chunk_s, STILL_EARNED * rest_s) if first[RUNNING] > 0 else rest_s
            most_s = max(most_s, latency.work_s(_tokens(first), 0))
            share_s = max(chunk_s, 0.5 * (until_s - before_s))
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
    """Minimum seconds of a batch in which prefill gets its ``share`` beside ``taken_s`` of all
    else. A TPOT hardly longer than a step would stop all prefill, so it does not set the budget;
    FairBatching §3.2 and ProServe §4.2 do not cover it."""
    return (taken_s + latency.work_s(1, computed_tokens)) / (1 - share)


Fill = Callable[[BatchBuilder, QueueView, float, LatencyModel], None]
"""A policy's plan of the guaranteed requests."""

RESERVE = 0.1
"""Share of KV blocks and sequences that best-effort requests leave free when they start."""


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
    """Plans a queue of two tiers, ``O(n log n)`` beside the policy of the promised requests.

    1. *Promised requests* are planned as if best-effort blocks and sequences were free; only the
       aged lane comes before.
    2. *Eviction*: where that plan needs what best-effort requests hold, it preempts as few of them
       as needed; they keep their tokens.
    3. *Leftovers*: best-effort work fills the batch until a promised decode would be late, for at
       most 20 empty steps or 50 ms, and prompts for less until promised decodes are ahead
       (``AHEAD_TTFT``). A request starts only while no promised one waits and its
       predicted length fits. Tenants take turns, by tokens per weight; of tenants that have as
       many, and of one's own requests, those go first that have attained least (``attained``).
       What is worth less than the promised prompts of the last minute is to delay the next one
       by no more than a tenth: it fills a batch for 1.8 empty steps, or a tenth of such a
       prompt's time, and is in no batch with a promised prompt.
    4. *Ageing* (``AgedLane``): the oldest requests past ``patience_s`` get a share of the time and
       are not evicted; from twice the patience on, none behind one starts until it fits.

    SLOs-Serve §4.1 preempts its best-effort tier without a bound on the waste, and has no ageing.
    """

    def __init__(self, options: BestEffortOptions | None = None) -> None:
        self.options = options = options or BestEffortOptions()
        self._lane = AgedLane(options.patience_s, options.aged_share)
        self._closed_until_s = self._prompted_s = -inf
        self._prompt_s = self._worth = 0.0
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
        attained_s = None if queue.attained_s is None else queue.attained_s[order]
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
        self._fill_leftover(batch, rows, count, lane, begins, now_s, latency, attained_s)
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
        attained_s: Floats | None,
    ) -> None:
        table = batch.table
        yielding = promised + len(lane)
        fixed_s = latency.fixed_s
        left_s = deadlines_s(table, FIRST) - now_s
        work_s = pending_work_s(table, latency.pieces)
        until_s, waits, prompts, ahead = leftover_s(
            table[:promised],
            batch.granted,
            left_s,
            work_s,
            (batch.cost_s, fixed_s, least_useful_s(fixed_s, latency)),
            (batch.free_blocks, batch.sequences_left, batch.block_tokens),
        )
        # Step times vary, and by some models an empty step is almost free.
        until_s = min(0.9 * until_s, max(LONGEST_STEPS * fixed_s, 0.05))
        brief_s = min(until_s, self._brief_s(prompts, batch.cost_s, now_s, fixed_s))

        def take(taken: Ints) -> None:
            if brief_s < until_s:
                less = table[taken, PRIORITY] < self._worth
                batch.take(taken[~less], until_s)
                batch.take(taken[less], brief_s)
            else:
                batch.take(taken, until_s)

        running = table[rows, RUNNING] > 0
        decode = running & ~is_prefill(table[rows])
        take(rows[decode])
        slack_s, tpot_s, ttft_s = ahead
        if tpot_s < inf:
            some_s = batch.cost_s + GAIN_SHARE * max(0.0, tpot_s - batch.cost_s)
            until_s = min(until_s, max(some_s, slack_s - min(AHEAD_TTFT * ttft_s, MAX_AHEAD_S)))
            brief_s = min(brief_s, until_s)
        rows, running = rows[~decode], running[~decode]
        if attained_s is not None:
            attained_s[:yielding] = -inf  # the lane goes first, by arrival
        if not (begins and not waits):
            rows = rows[running]
        else:
            overdue = lane[self._lane.overdue(table, lane, now_s)]
            waiting = rows[~running]
            if attained_s is not None:
                waiting = by_least(table, waiting, attained_s)
            waiting = in_turns(table, waiting, int(np.count_nonzero(waiting < yielding)))
            admissible = self._admissible(batch, waiting, overdue, yielding)
            rows = np.concatenate((rows[running], admissible))
        if attained_s is not None:
            rows = by_least(table, rows, attained_s)
        on_time = (left_s[rows] < inf) & (left_s[rows] >= fixed_s + work_s[rows])
        due_s = np.where(on_time, left_s[rows], inf)
        due_s[rows < yielding] = -inf
        # Rows are numbered in order of arrival.
        ties = rows if attained_s is None else np.arange(len(rows))
        order = rows[np.lexsort((ties, due_s))]
        take(in_turns(table, order, int(np.count_nonzero(rows < yielding))))

    def _brief_s(
        self, prompts: tuple[int, float, float, bool], cost_s: float, now_s: float, fixed_s: float
    ) -> float:
        """Until when work of less worth than promised prompts may fill the batch."""
        count, work_s, worth, begun = prompts
        known = now_s - self._prompted_s < EXPECTED_FOR_S
        if count:
            self._prompt_s += (0.1 if known else 1.0) * (work_s / count - self._prompt_s)
            self._worth, self._prompted_s = worth, now_s
        elif not known:
            return inf
        if begun:
            return 1.001 * cost_s  # only what costs nothing
        longer_s = (1.0 + BRIEF_SHARE) * cost_s
        return max(longer_s, BRIEF_STEPS * fixed_s, BRIEF_SHARE * self._prompt_s)

    def _admissible(self, batch: BatchBuilder, waiting: Ints, overdue: Ints, yielding: int) -> Ints:
        """The ``waiting`` requests that may start with the reserve left free; none passes an
        ``overdue`` one that does not fit. The blocks of the rows from ``yielding`` on count as
        free."""
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
        """Start no best-effort request beside promised ones until the time to compute the lost
        tokens again is a twentieth of the time since."""
        lost_s = sum(latency.work_s(int(tokens), 0) for tokens in computed if tokens)
        if lost_s > 0:
            self._closed_until_s = max(self._closed_until_s, now_s) + 20.0 * lost_s


def longest_wait_s(table: Floats, now_s: float) -> float:
    """Longest time since arrival or last token of a best-effort request that does not run."""
    rows = (table[:, BEST_EFFORT] > 0) & (table[:, RUNNING] == 0)
    if not rows.any():
        return 0.0
    since_s = np.fmax(table[rows, ARRIVAL], table[rows, LAST_TOKEN])
    return max(0.0, now_s - float(since_s.min()))


def _break_standstill(batch: BatchBuilder, evicted: Ints, holders: Ints, lane: Ints) -> Ints:
    """For an empty plan: plan a little of any request that fits, else evict until one fits."""
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


def by_least(table: Floats, rows: Ints, attained_s: Floats) -> Ints:
    """``rows`` by what their tenants and programs have attained, ties as they are. ``O(n log
    n)``."""
    tenants, attained_s = table[rows, TENANT], attained_s[rows]
    own: Ints = np.lexsort((attained_s[:, BEGAN], attained_s[:, OWN]))
    if len(own) and not (tenants == tenants[0]).all():
        own = own_in_places(tenants, np.argsort(attained_s[:, SHARED], kind="stable"), own)
    return rows[own]


@compiled
def own_in_places(tenants: Floats, places: Ints, own: Ints) -> Ints:
    """``places`` with each tenant's own rows in the order of ``own``: what a tenant's programs have
    attained does not change its places. ``O(n log n)``."""
    count = places.shape[0]
    by_tenant = np.argsort(tenants, kind="mergesort")
    first, ordered, turned = np.empty(count, np.int64), np.empty_like(own), np.empty_like(own)
    begins = 0
    for place, row in enumerate(by_tenant):
        if tenants[row] != tenants[by_tenant[begins]]:
            begins = place
        first[row] = begins
    taken = np.zeros(count, np.int64)
    for row in own:
        begins = first[row]
        ordered[begins + taken[begins]] = row
        taken[begins] += 1
    for place in range(count - 1, -1, -1):
        begins = first[places[place]]
        taken[begins] -= 1
        turned[place] = ordered[begins + taken[begins]]
    return turned


def in_turns(table: Floats, order: Ints, first: int = 0) -> Ints:
    """``order`` so that behind the ``first`` rows the tenant with the fewest tokens over weight
    running or ahead is next. ``O(n log n)``; ``O(n)`` with a single tenant."""
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
    """Per row of ``order``: its tenant's tokens over weight that run or are before it."""
    names = table[order, TENANT]
    names = names[np.argsort(names, kind="mergesort")]
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
    """Requests to evict so that ``blocks`` KV blocks and ``places`` sequence slots come free: a
    sufficient one with the fewest ``computed`` tokens, else the largest. ``O(n)`` per chosen
    request."""
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
) -> tuple[float, bool, tuple[int, float, float, bool], tuple[float, float, float]]:
    """Maximum seconds of a batch that makes no promised request late (or infinite), whether a
    promised request waits for memory or a slot, of the promised prompts their number, work in
    seconds, highest priority, and whether any is in the batch, and of the promised decodes the
    least slack, TPOT and TTFT (0: none). A late decode catches up in batches of half its TPOT.

    Args:
        times_s: of the batch so far, of an empty step, and the least TPOT that a useful batch can
            meet: a shorter one counts only if admission has promised it.
        space: KV blocks and sequence slots left, and tokens per block."""
    cost_s, fixed_s, holdable_s = times_s
    free_blocks, places, block_tokens = space
    until_s = inf
    waits = False
    next_s = fixed_s
    for row in range(table.shape[0]):
        if not needs_prefill(table[row, EMITTED], table[row, PENDING]):
            next_s += work_s[row]
    prompts, prompt_s, worth, begun = 0, 0.0, 0.0, False
    slack_s = least_tpot_s = ttft_s = inf
    for row in range(table.shape[0]):
        pending = table[row, PENDING]
        if table[row, EMITTED] == 0.0:
            prompts += 1
            prompt_s += work_s[row]
            worth = max(worth, table[row, PRIORITY])
            begun |= granted[row] > 0
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
                if table[row, EMITTED] > 0.0:
                    slack_s = min(slack_s, left_s[row])
                    least_tpot_s = min(least_tpot_s, table[row, TPOT])
                    ttft_s = min(ttft_s, table[row, TTFT])
    ahead = (slack_s, least_tpot_s, ttft_s if ttft_s < inf else 0.0)
    return until_s, waits, (prompts, prompt_s, worth, begun), ahead


@compiled
def blocks_to_come(table: Floats, granted: Ints, block_tokens: int) -> Floats:
    """Per row, the KV blocks that its predicted length needs beyond those with ``granted``."""
    more = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        whole = ceil((table[row, PROMPT] + expected_tokens(table[row])) / block_tokens)
        now = ceil((table[row, COMPUTED] + granted[row]) / block_tokens)
        more[row] = max(0.0, whole - max(now, table[row, KV_BLOCKS]))
    return more


@compiled
def kinds_of(table: Floats) -> tuple[bool, bool, bool]:
    """Whether any request drafts, is best effort, counts for a program."""
    drafted = best_effort = programs = False
    for row in range(table.shape[0]):
        drafted |= table[row, DRAFTED] > 0.0
        best_effort |= table[row, BEST_EFFORT] > 0.0
        programs |= table[row, PROGRAM] > 0.0
    return drafted, best_effort, programs


class BatchPolicy(ABC):
    """Chooses the tokens of the engine's next batch. It may keep state, is called from one thread,
    and must be work-conserving: with a request that fits, the plan is not empty. ``best_effort``
    plans best-effort requests and ``speculation`` drafts, so a policy sees neither."""

    name: ClassVar[str]
    source: ClassVar[str]
    local_order: ClassVar[int]
    """The order of promised prefills, by ``fleet.local_orders``: routers predict by it."""
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
        self.attained = Attained()
        """Counts what programs and tenants have had of the engine."""

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        """Plan the next batch of ``queue`` at ``now_s`` (the clock of the views' times)."""
        table = queue.table
        drafted, best_effort, programs = kinds_of(table)
        if programs:
            queue.attained_s = self.attained.of(table, now_s)
        lengths = None
        if drafted:
            lengths = self.lengths(queue, now_s, latency, budget, self.paced(queue))
        if best_effort:
            plan = self.best_effort.plan(self.fill, queue, now_s, latency, budget, lengths)
        else:
            batch = BatchBuilder(queue, budget, latency, lengths=lengths)
            self.fill(batch, queue, now_s, latency)
            plan = batch.plan()
        if programs:
            self.attained.charge(table, plan.rows, plan.tokens, latency, now_s)
        return plan

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
