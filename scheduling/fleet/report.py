"""A report of a replica, and how a fleet takes it in, see :mod:`sluice.scheduling.fleet.rows`."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from math import ceil, inf, nan
from typing import Any, NamedTuple

import numpy as np

from sluice.scheduling.assumptions import MIN_STEPS, TTFT_SHARE, UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.fleet.rows import (
    BATCH_S,
    BEGUN_S,
    BEST_EFFORT_S,
    BLOCK_TOKENS,
    BLOCKS_PER_S,
    CLAIMED_BLOCKS,
    CONTEXT,
    DECODE_PACE_S,
    DECODE_S,
    DECODE_SHARES,
    DECODES,
    DUE_S,
    EXPECTED_BLOCKS,
    FIXED_S,
    FREE_BLOCKS,
    FREED_WITHIN_S,
    KV_ANSWER_S,
    LATER_S,
    LENT_BLOCKS,
    LENT_PLACES,
    LENT_QUEUED,
    LOADS,
    NEEDED_BLOCKS,
    ORDER,
    PACE_S,
    PLACES,
    PROMISED,
    QUEUE_PACE_S,
    QUEUED,
    RESERVED,
    RUNNING,
    SPENT_S,
    SPENT_UNTIL_S,
    STEP_ENDS_S,
    STEP_WORK_S,
    STOP_S,
    TOKENS,
    TOTAL_BLOCKS,
    WAITING,
    FleetArrays,
    Prompt,
    add_later,
    add_load,
    advance,
    lend,
    pace_of,
    put_in_order,
    room_s,
    settle,
    take,
)
from sluice.scheduling.fleet.transfer import NO_TRANSFERS, Transfers
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.deadline import FIRST
from sluice.scheduling.request.expected import CLAIM, claim, peak, whole
from sluice.scheduling.request.kernels import (
    FIXED,
    Floats,
    compiled,
    most_work_s,
    needs_prefill,
    next_due_s,
    paced,
)
from sluice.scheduling.roles import Role

# Decisions that no replica has confirmed yet.
#
# What is known of a replica is as old as its last report. Without this ledger every request that
# arrives between two reports would go to the same, seemingly idle replica.

_MAX_STALE = 1_024
"""Ended reservations whose ends may be kept beside those of the others."""


class Reservation(NamedTuple):
    """What one decision takes of a replica.

    Attributes:
        promised: a best-effort request takes only what is left.
        new_tokens: prompt tokens to prefill there; ``cached_tokens`` more are in its cache.
        kv_tokens: tokens for which it needs KV blocks that it does not share.
        due_s: when its first token is due; infinite, as ``tpot_s``, if no time is stated.
        output_tokens: expected length of its output.
        awaited_s: until when silence is normal, because another replica computes its prompt first.
        later_stages: how many of its stages follow the first.
        later_tokens: of prompt, that enter before the next of them that has any."""

    replica_id: str
    made_s: float
    promised: bool
    new_tokens: float
    cached_tokens: float
    kv_tokens: float
    due_s: float
    tpot_s: float
    priority: float
    output_tokens: float
    awaited_s: float = -inf
    later_stages: float = 0.0
    later_tokens: float = 0.0


Taken = tuple[
    float, bool, float, float, float, float, float, float, float, float, float, float
]  # fmt: skip
"""A :class:`Reservation` for compiled loops: ``made[1:]``, all its fields after the replica."""

_NONE_CHANGED: frozenset[str] = frozenset()


class Ledger:
    """Reservations by request key, and by replica in the order in which they were made.

    One ends when the replica reports the request or the router gives it up, when the replica
    leaves, or at age ``ttl_s``, seconds, counted from ``awaited_s``; beyond ``limit`` the next to
    expire goes. Methods name the replicas whose reservations changed. Times must not run backwards.
    ``O(log n)`` amortised per reservation."""

    def __init__(self, ttl_s: float, limit: int = 100_000) -> None:
        if ttl_s <= 0 or limit <= 0:
            raise ValueError(f"ttl_s and limit must be positive, got {ttl_s} and {limit}")
        self._ttl_s = ttl_s
        self._limit = limit
        self._entries: dict[int, Reservation] = {}
        # When each expires, and its key: a heap, which also holds some that have ended already.
        self._ends: list[tuple[float, int]] = []
        self._of_replica: dict[str, dict[int, Reservation]] = {}
        self.next_s = inf
        """Before this time none expires."""
        self.expired = 0
        """Reservations that ended by age or because the ledger was full, since the start."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def of(self, key: int) -> Reservation | None:
        """What is reserved for a request, if anything is."""
        return self._entries.get(key)

    def at(self, replica_id: str) -> Iterable[Reservation]:
        """What is reserved at a replica, oldest first."""
        return self._of_replica.get(replica_id, {}).values()

    def reserve(self, key: int, made: Reservation) -> Collection[str]:
        """Make a reservation; an earlier one of ``key`` ends, and only another replica is named.
        Raises ``ValueError`` for negative tokens."""
        if made.new_tokens < 0:
            raise ValueError(f"a reservation needs tokens >= 0, got {made.new_tokens}")
        changed: Collection[str] = _NONE_CHANGED
        if key in self._entries:
            changed = {self._end(key)}
        elif len(self._entries) >= self._limit:
            changed = {self._end_next()}
        self._entries[key] = made
        ends_s = max(made.made_s, made.awaited_s) + self._ttl_s
        self.next_s = min(self.next_s, ends_s)
        heapq.heappush(self._ends, (ends_s, key))
        if len(self._ends) > 2 * len(self._entries) + _MAX_STALE:
            self._rebuild_ends()
        self._of_replica.setdefault(made.replica_id, {})[key] = made
        return changed

    def release(self, keys: Iterable[int]) -> set[str]:
        """End the reservations of ``keys``; unknown ones are ignored. ``O(len(keys))``."""
        if not self._entries:
            return set()
        entries = self._entries
        return {self._end(key) for key in keys if key in entries}

    def drop_replica(self, replica_id: str) -> int:
        """End every reservation at a replica and return how many there were."""
        keys = self._of_replica.pop(replica_id, {})
        for key in keys:
            del self._entries[key]
        return len(keys)

    def expire(self, now_s: float) -> set[str]:
        """End the reservations whose time is up."""
        changed: set[str] = set()
        # What is on top may have ended: only when its time is up does that matter.
        while self._ends and self._ends[0][0] <= now_s:
            if self._next() is not None and self._ends[0][0] <= now_s:
                changed.add(self._end_next())
        self.next_s = self._ends[0][0] if self._ends else inf
        return changed

    def postpone(self, by_s: float) -> None:
        """Extend every reservation by ``by_s``, a time in which no report could have confirmed it.
        ``O(n)``."""
        for key, made in self._entries.items():
            later = made._replace(awaited_s=max(made.made_s, made.awaited_s) + by_s)
            self._entries[key] = self._of_replica[made.replica_id][key] = later
        self._rebuild_ends()

    def _rebuild_ends(self) -> None:
        self._ends = [(self._ends_s(each), own) for own, each in self._entries.items()]
        heapq.heapify(self._ends)
        self.next_s = self._ends[0][0] if self._ends else inf

    def _ends_s(self, made: Reservation) -> float:
        return max(made.made_s, made.awaited_s) + self._ttl_s

    def _next(self) -> Reservation | None:
        """The one that expires first; it is on top of the heap then."""
        while self._ends:
            ends_s, key = self._ends[0]
            made = self._entries.get(key)
            if made is not None and self._ends_s(made) == ends_s:
                return made
            heapq.heappop(self._ends)
        return None

    def _end_next(self) -> str:
        """End the one that expires first, of which there must be one; name its replica."""
        made = self._next()
        assert made is not None
        self._end(self._ends[0][1])
        self.expired += 1
        return made.replica_id

    def _end(self, key: int) -> str:
        made = self._entries.pop(key)
        of_replica = self._of_replica[made.replica_id]
        del of_replica[key]
        if not of_replica:
            del self._of_replica[made.replica_id]
        return made.replica_id


BATCH_USABLE = 0.9
"""The share of the decodes' least slack or TPOT that a batch of ``deadline_triage`` takes, as its
default head-room leaves it."""

MAX_STEP_S = 1.0
"""A replica counts as having worked for at most so long without the end of a step."""


class Report(NamedTuple):
    """The state of a replica as of ``made_s``. Its times are on the replica's own clock.

    Attributes:
        rows: its table, ``state.ROW``; rows of phase 0 are free slots.
        offset_s: what to add to the replica's times to have them on the fleet's clock.
        stepped_s: when its last step ended and the next one began: what the rows' tokens are as of.
        latency: the replica's model, corrected.
        places: most running sequences.
        preempts: a prefill need not wait for the end of the step under way
            (``scheduling.preemption``).
        transfers: what KV it has taken over since its start.
        local_order: in which its local policy takes prefills, see ``fleet.local_orders``.
        next_begins_s: when the batch after those in flight can begin, in a pipeline or with
            asynchronous scheduling. The rows' tokens do not count what these compute.
        planned_stop_s: time, where it ``preempts``, until a running prefill has stopped for a step
            of decodes.
        kv_answer_s: mean time until a KV connector has said what it holds of a prompt."""

    rows: np.ndarray
    made_s: float
    offset_s: float
    stepped_s: float
    latency: LatencyModel
    free_blocks: int
    total_blocks: int
    block_tokens: int
    places: int
    draining: bool = False
    preempts: bool = False
    role: Role = "mixed"
    transfers: Transfers = NO_TRANSFERS
    local_order: int = SLIDE
    next_begins_s: float = 0.0
    planned_stop_s: float = 0.0
    kv_answer_s: float = 0.0


class Pace(NamedTuple):
    """When the next tokens of a reported request are due, on the fleet's clock; ``due_s`` and
    ``tpot_s`` are infinite if no time is stated."""

    now_s: float
    due_s: float
    tpot_s: float
    output_tokens: float


@compiled
def clear(figures: Floats, pieces: Floats) -> None:
    """Forget all requests of a replica."""
    for figure in (
        WAITING, RUNNING, RESERVED, TOKENS, CONTEXT, DECODES, DECODE_S, NEEDED_BLOCKS, LENT_BLOCKS,
        LENT_PLACES, BEST_EFFORT_S, EXPECTED_BLOCKS, BLOCKS_PER_S, QUEUED, LOADS, PROMISED,
        DECODE_SHARES, SPENT_S, CLAIMED_BLOCKS, LATER_S, LENT_QUEUED,
    ):  # fmt: skip
        figures[figure] = 0.0
    figures[FIXED_S] = pieces[0, FIXED]
    for piece in range(1, pieces.shape[0]):
        figures[FIXED_S] = max(figures[FIXED_S], pieces[piece, FIXED])
    figures[PACE_S] = figures[QUEUE_PACE_S] = figures[DUE_S] = figures[DECODE_PACE_S] = inf


@compiled
def expected_tokens(row: Any) -> float:
    """Expected length of a reported request's output, however much has left."""
    return float(row.expected_tokens) if row.expected_tokens > 0 else UNKNOWN_OUTPUT_TOKENS


@compiled
def set_step(figures: Floats, least_ttft_s: float, work_s: float, busy: bool) -> None:
    """Predict the step under way, which began with ``work_s`` of promised prefill to be done."""
    fixed_s, pace_s = figures[FIXED_S], figures[PACE_S]
    longest_s = max(TTFT_SHARE * least_ttft_s, MIN_STEPS * fixed_s)
    figures[BATCH_S] = longest_s
    if pace_s < inf:
        slack_s = figures[DUE_S] - figures[BEGUN_S]
        figures[BATCH_S] = min(BATCH_USABLE * max(slack_s, pace_s), max(longest_s, pace_s))
    figures[STEP_WORK_S] = min(work_s, room_s(figures))
    figures[STEP_ENDS_S] = figures[BEGUN_S]
    if busy:
        figures[STEP_ENDS_S] += fixed_s + figures[DECODE_S] + figures[STEP_WORK_S]


@compiled
def count_best_effort(
    figures: Floats, pieces: Floats, lent: Floats, row: Any, due_s: float, prefill: bool
) -> None:
    """Count a reported request to which nothing was promised."""
    if row.phase == 2:
        figures[LENT_BLOCKS] += row.kv_blocks
        figures[LENT_PLACES] += 1.0
    if prefill:
        work_s = most_work_s(pieces, row.pending_tokens, row.computed_tokens)
        lend(figures, lent, due_s, work_s, float(row.priority), False)


@compiled
def count_prefill(
    figures: Floats, pieces: Floats, prefills: Floats, loads: Floats, row: Any, pace: Pace
) -> float:
    """Count a reported prefill that was promised; return its work, seconds."""
    pending, computed = float(row.pending_tokens), float(row.computed_tokens)
    # One that ends with its first token, or resumes on another replica, has no decode here.
    ends = pace.output_tokens <= row.emitted_tokens + 1.0
    blocks = max(0.0, ceil((computed + pending) / figures[BLOCK_TOKENS]) - row.kv_blocks)
    prompt = Prompt(
        pace.due_s, inf if ends else pace.tpot_s, float(row.priority), pending, computed, blocks
    )
    return take(figures, pieces, prefills, loads, prompt, pace.now_s, False)


@compiled
def count_decode(figures: Floats, pieces: Floats, loads: Floats, row: Any, pace: Pace) -> None:
    """Count a reported decode that was promised."""
    now_s, due_s, tpot_s, output_tokens = pace
    computed = row.computed_tokens
    own_s = most_work_s(pieces, 1.0, computed)
    figures[PROMISED] += 1.0
    figures[DECODES] += 1.0
    figures[CONTEXT] += computed
    figures[DECODE_S] += own_s
    if tpot_s == inf:
        return
    pace_s = pace_of(tpot_s, figures[FIXED_S], own_s)
    add_load(figures, loads, max(due_s, now_s), own_s / pace_s, pace_s, False)
    if tpot_s >= pace_s:
        figures[PACE_S] = min(figures[PACE_S], pace_s)
        figures[DUE_S] = min(figures[DUE_S], due_s)
    figures[DECODE_SHARES] += own_s / pace_s
    figures[DECODE_PACE_S] = min(figures[DECODE_PACE_S], pace_s)
    # One that ends soon frees what it holds, and no more.
    left_s = max(output_tokens - row.emitted_tokens, 1.0) * pace_s
    freed = row.kv_blocks / max(left_s, FREED_WITHIN_S)
    grown = min(left_s, FREED_WITHIN_S) / (FREED_WITHIN_S * figures[BLOCK_TOKENS] * pace_s)
    figures[BLOCKS_PER_S] += freed - grown


@compiled
def fold(
    fleet: FleetArrays,
    at: int,
    rows: np.ndarray,
    stated: tuple[float, float, float, float, float, float, float],
    moment: tuple[float, float, float, float, bool],
) -> None:
    """Take in a whole report of the replica in row ``at``; what was known of its requests goes.
    ``O(requests log requests)``."""
    all_figures, all_pieces, starts, all_prefills, all_loads, all_lent = fleet
    figures, pieces, start = all_figures[at], all_pieces[at], starts[at]
    prefills, loads, lent = all_prefills[start:], all_loads[start:], all_lent[start:]
    (
        figures[FREE_BLOCKS], figures[TOTAL_BLOCKS], figures[BLOCK_TOKENS], figures[PLACES],
        figures[ORDER], figures[STOP_S], figures[KV_ANSWER_S],
    ) = stated  # fmt: skip
    made_s, stepped_s, next_begins_s, offset_s, preempts = moment
    clear(figures, pieces)
    now_s = made_s + offset_s
    earliest_s = least_ttft_s = inf
    first_work_s = step_work_s = 0.0
    claims, guaranteed = np.empty(rows.shape[0], CLAIM), 0
    for slot in range(rows.shape[0]):
        row = rows[slot]
        if row.phase == 0:
            continue
        figures[RUNNING if row.phase == 2 else WAITING] += 1.0
        first = row.arrival_s < earliest_s
        earliest_s = min(earliest_s, row.arrival_s)
        whole_tokens = expected_tokens(row)
        expected = max(whole_tokens, row.emitted_tokens + 1.0)
        blocks = ceil((row.prompt_tokens + expected) / figures[BLOCK_TOKENS])
        figures[EXPECTED_BLOCKS] += max(0.0, blocks - row.kv_blocks)
        prefill = needs_prefill(row.emitted_tokens, row.pending_tokens)
        ttft_s, tpot_s = paced(float(row.ttft_s), float(row.tpot_s), float(row.e2e_s), expected)
        due_s = offset_s + next_due_s(
            row.emitted_tokens,
            row.arrival_s,
            ttft_s,
            tpot_s,
            row.e2e_s,
            row.first_token_s,
            nan,
            FIRST,
        )
        if row.best_effort > 0:
            count_best_effort(figures, pieces, lent, row, due_s, prefill)
            continue
        own = claims[guaranteed]
        own.blocks = claim(
            row.prompt_tokens, whole_tokens, row.emitted_tokens, row.kv_blocks,
            figures[BLOCK_TOKENS], figures[TOTAL_BLOCKS],
        )  # fmt: skip
        own.held, own.tpot_s = row.kv_blocks, tpot_s
        own.left = whole(whole_tokens, row.emitted_tokens) - row.emitted_tokens
        guaranteed += 1
        add_later(
            figures, pieces, float(row.later_stages), float(row.later_tokens),
            float(row.prompt_tokens), expected - row.emitted_tokens, float(row.tpot_s),
        )  # fmt: skip
        pace = Pace(now_s, due_s, tpot_s, expected)
        least_ttft_s = min(least_ttft_s, row.ttft_s)
        if prefill:
            work_s = count_prefill(figures, pieces, prefills, loads, row, pace)
            if row.arrival_s <= stepped_s:
                step_work_s += work_s
            if first:
                first_work_s = work_s
        else:
            count_decode(figures, pieces, loads, row, pace)
    figures[CLAIMED_BLOCKS] = peak(claims[:guaranteed], figures[BLOCK_TOKENS])
    # An engine that was idle began with the first request that came. One that hangs must not look
    # as if it had done its work.
    begun_s = made_s
    if earliest_s < inf:
        begun_s = max(min(made_s, max(stepped_s, earliest_s)), made_s - MAX_STEP_S)
        begun_s = max(begun_s, min(next_begins_s, made_s + MAX_STEP_S))
    figures[BEGUN_S] = figures[SPENT_UNTIL_S] = begun_s + offset_s
    work_s = step_work_s if earliest_s <= stepped_s else first_work_s
    if preempts:
        set_step(figures, least_ttft_s, 0.0, False)
    else:
        set_step(figures, least_ttft_s, work_s, earliest_s < inf)
    put_in_order(prefills, int(figures[QUEUED]))
    put_in_order(loads, int(figures[LOADS]))
    put_in_order(lent, int(figures[LENT_QUEUED]))
    settle(figures, prefills, loads)


@compiled
def add_reservation(fleet: FleetArrays, at: int, room: int, made: Taken) -> bool:
    """Add a decision that the replica in row ``at`` has not reported yet to what it has; whether it
    has ``room`` for one more entry. ``O(prefills + loads)``."""
    all_figures, all_pieces, starts, all_prefills, all_loads, all_lent = fleet
    figures, pieces, start = all_figures[at], all_pieces[at], starts[at]
    if max(figures[QUEUED], figures[LENT_QUEUED], figures[LOADS]) >= room:
        return False
    prefills, loads, lent = all_prefills[start:], all_loads[start:], all_lent[start:]
    (
        made_s, promised, new_tokens, cached_tokens, kv_tokens, due_s, tpot_s, priority,
        output_tokens, _, later_stages, later_tokens,
    ) = made  # fmt: skip
    block = figures[BLOCK_TOKENS]
    prompt_tokens = new_tokens + cached_tokens
    figures[RESERVED] += 1.0
    figures[EXPECTED_BLOCKS] += ceil((prompt_tokens + output_tokens) / block)
    if not promised:
        work_s = most_work_s(pieces, new_tokens, cached_tokens)
        lend(figures, lent, due_s, work_s, priority, True)
        return True
    figures[CLAIMED_BLOCKS] += claim(
        prompt_tokens, output_tokens, 0.0, 0.0, block, figures[TOTAL_BLOCKS]
    )
    add_later(figures, pieces, later_stages, later_tokens, prompt_tokens, output_tokens, tpot_s)
    advance(figures, prefills, loads, made_s)
    blocks = float(ceil(kv_tokens / block))
    prompt = Prompt(due_s, tpot_s, priority, new_tokens, cached_tokens, blocks)
    take(figures, pieces, prefills, loads, prompt, max(made_s, figures[BEGUN_S]), True)
    settle(figures, prefills, loads)
    return True
