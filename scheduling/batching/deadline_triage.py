"""Deadline triage: meet the deadlines that can be met, and serve the rest with the time left."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf, isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.assumptions import (
    GROWTH_TOKENS,
    MIN_STEPS,
    PREFILL_SHARE,
    TTFT_SHARE,
    UNKNOWN_OUTPUT_TOKENS,
)
from sluice.scheduling.batching.base import (
    LONGEST_STEPS,
    AgedLane,
    BatchPolicy,
    blocks_needed,
    expected_tokens,
    least_useful_s,
    own_in_places,
    victims,
)
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.deadline import FIRST
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    COMPUTED,
    E2E,
    EMITTED,
    FIRST_TOKEN,
    KV_BLOCKS,
    LAST_TOKEN,
    LEAST,
    PENDING,
    PRIORITY,
    PROGRAM,
    PROMISED,
    PROMPT,
    RUNNING,
    TENANT,
    TPOT,
    TTFT,
    Floats,
    Ints,
    compiled,
    deadline_s,
    is_prefill,
    most_work_s,
    pending_work_s,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.tenancy.attained import BEGAN, NONE_ATTAINED, OWN, SHARED, older_of

Mask = NDArray[np.bool_]


@compiled
def push(heap: Ints, size: int, worth: Floats, job: int) -> None:
    """Add ``job`` to the first ``size`` entries of ``heap``, least worth on top."""
    place = size
    while place > 0:
        parent = (place - 1) // 2
        if worth[heap[parent]] <= worth[job]:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = job


@compiled
def pop(heap: Ints, size: int, worth: Floats) -> int:
    """Remove the job of least worth from the first ``size`` entries of ``heap``."""
    top = heap[0]
    last = heap[size - 1]
    place = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and worth[heap[child + 1]] < worth[heap[child]]:
            child += 1
        if worth[last] <= worth[heap[child]]:
            break
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = last
    return top


@compiled
def keep(size: Floats, weight: Floats, capacity: Floats) -> Mask:
    """Per job, whether it is kept, so that the kept jobs up to each fit its capacity. Moore
    (Management Science 1968): keeps the most jobs; with weights a heuristic (NP-hard). ``O(n log
    n)``."""
    count = size.shape[0]
    kept = np.zeros(count, np.bool_)
    worth = weight / np.maximum(size, 1e-12)
    heap = np.empty(count, np.int64)
    held = 0
    total = 0.0
    for job in range(count):
        if size[job] > capacity[job]:
            continue
        push(heap, held, worth, job)
        held += 1
        total += size[job]
        while held > 0 and total > capacity[job]:
            total -= size[pop(heap, held, worth)]
            held -= 1
    for place in range(held):
        kept[heap[place]] = True
    return kept


@compiled
def before(size: Floats, room: Floats, late: Floats) -> Ints:
    """The earliest position of each ``late`` job, by size, at which it makes no other job late,
    else ``n``. ``room``: the maximum total size of the jobs up to each. ``O(late * jobs)``."""
    count = size.shape[0]
    places = np.full(late.shape[0], count, np.int64)
    spare = room - np.cumsum(size)
    for job in range(late.shape[0]):
        place = count
        while place > 0 and spare[place - 1] >= late[job]:
            place -= 1
        places[job] = place
        for later in range(place, count):
            spare[later] -= late[job]
    return places


@compiled
def sort_out(
    table: Floats, prefills: Ints, work_s: Floats, until_s: Floats, usable: float
) -> tuple[Ints, Ints, Ints]:
    """The prefills to keep, by deadline; the same with the late promised ones, each as far to the
    front as makes no kept one late; and the shed ones. ``usable``: share of ``until_s`` to count on
    for those that move to the front. ``O(n log n + late * n)``."""
    dated = until_s.shape[0]
    due, undated = prefills[:dated], prefills[dated:]
    weight, owed = np.empty(dated), np.empty(dated, np.bool_)
    for place, row in enumerate(due):
        weight[place], owed[place] = table[row, PRIORITY], table[row, PROMISED] > 0.0
    kept = keep(work_s[due], weight, until_s)
    on_time, late, promised = due[kept], due[~kept], owed[~kept]
    shed = np.concatenate((late[~promised], undated))
    late = late[promised]
    if not late.shape[0]:
        return on_time, on_time, shed
    places = before(work_s[on_time], usable * until_s[kept], work_s[late])
    ordered = np.empty(on_time.shape[0] + late.shape[0], np.int64)
    count = 0
    for place in range(on_time.shape[0] + 1):
        for job in range(late.shape[0]):
            if places[job] == place:
                ordered[count] = late[job]
                count += 1
        if place < on_time.shape[0]:
            ordered[count] = on_time[place]
            count += 1
    return on_time, ordered, shed


UNPACED_S = 1.0
"""A decode without TPOT is due a token this long after the last one, so that it never stalls."""

MIN_TIMELY = 0.01
"""Share of an output that counts as on time where none can be: late requests have some worth."""


@compiled
def look(
    table: Floats, pieces: Floats, anchor: int, now_s: float, fixed_s: float
) -> tuple[Mask, Floats, Floats]:
    """Per row, whether it is a prefill, the work of its pending tokens, and the time until its next
    token is due, which an end-to-end deadline makes earlier by the expected output at a step of all
    decodes or the minimum TPOT, whichever is longer."""
    prefill, work_s = is_prefill(table), pending_work_s(table, pieces)
    count = table.shape[0]
    left_s = np.empty(count)
    step_s, least_s, ends = fixed_s, inf, False
    for row in range(count):
        left_s[row] = deadline_s(table[row], anchor)
        ends |= table[row, E2E] < inf
        least_s = min(least_s, table[row, TPOT])
        if not prefill[row]:
            step_s += work_s[row]
    if ends:
        tpot_s = max(step_s, least_s if least_s < inf else 2.0 * step_s)
        for row in range(count):
            after = max(0.0, expected_tokens(table[row]) - table[row, EMITTED] - 1.0)
            end_s = table[row, ARRIVAL] + table[row, E2E]
            left_s[row] = min(left_s[row], end_s - after * tpot_s)
    for row in range(count):
        if left_s[row] == inf and not prefill[row]:
            last_s = table[row, LAST_TOKEN]
            if isnan(last_s):
                last_s = table[row, FIRST_TOKEN]
            left_s[row] = (now_s if isnan(last_s) else last_s) + UNPACED_S
        left_s[row] -= now_s
    return prefill, work_s, left_s


@compiled
def by_time_left(chosen: Mask, left_s: Floats) -> Ints:
    """The chosen rows by the time that is left, ties as they are. ``O(n log n)``."""
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(left_s[rows], kind="mergesort")]


GRACE_TOKENS = 2.5
"""A decode whose mean TPOT is promised may be this many tokens late for the sake of a prompt: the
first tokens of an output have had no time to get ahead, and paced each batch at one TPOT."""

GRACE_SHARE = 1 / 8
"""But no more than this share of what its output surely has to come, which makes up for them, or
half of what steps without a prompt would make up."""


class Decodes(NamedTuple):
    """The decodes by deadline.

    Attributes:
        work_s: of one step.
        keep_s: TPOT to keep, at least that of the decode alone.
        live: which can be on time.
        first_s, least_s, least_step_s: of these, the minimum time left with its grace, TPOT, and
            TPOT of a step that verifies drafts; or infinite."""

    rows: Ints
    left_s: Floats
    work_s: Floats
    keep_s: Floats
    live: Mask
    first_s: float
    least_s: float
    least_step_s: float


@compiled
def decodes_of(
    table: Floats,
    prefill: Mask,
    left_s: Floats,
    work_s: Floats,
    output: Floats,
    pieces: Floats,
    fixed_s: float,
    anchor: int,
) -> Decodes:
    """The decodes; ``output``: expected tokens of each row's step, empty where none drafts."""
    rows = by_time_left(~prefill, left_s)
    left_s, work_s = left_s[rows], work_s[rows]
    all_s = fixed_s + work_s.sum()
    keep_s = np.empty(rows.shape[0])
    live = np.zeros(rows.shape[0], np.bool_)
    first_s = least_s = least_step_s = inf
    # One TPOT that leaves nothing for prefill must not set the budget of all requests (see
    # least_useful_s), but admission has checked that a guaranteed TPOT can be met.
    holdable_s = (fixed_s + most_work_s(pieces, 1.0, 0.0)) / (1 - PREFILL_SHARE)
    for place, row in enumerate(rows):
        tpot_s, promised = table[row, TPOT], table[row, PROMISED] > 0.0
        alone_s = fixed_s + work_s[place]
        step_s = tpot_s * output[row] if output.shape[0] else tpot_s
        keep_s[place] = max(step_s, alone_s)
        on_time = left_s[place] >= alone_s
        if promised and not on_time:
            # It may be on time at its end. An output longer than predicted may double its length.
            emitted = table[row, EMITTED]
            tokens = max(expected_tokens(table[row]) - emitted, emitted)
            on_time = left_s[place] + (tokens - 1.0) * (tpot_s - alone_s) >= alone_s
        if on_time and tpot_s < inf and (tpot_s >= holdable_s or promised):
            slack_s = left_s[place]
            if promised and anchor == FIRST and table[row, E2E] == inf:
                to_come = max(0.0, table[row, LEAST] - table[row, EMITTED])
                made_up_s = min(GRACE_SHARE * tpot_s, max(0.0, tpot_s - all_s) / 2.0)
                slack_s += min(GRACE_TOKENS * tpot_s, made_up_s * to_come)
            first_s = min(first_s, max(0.0, slack_s))
            live[place] = True
            least_s, least_step_s = min(least_s, tpot_s), min(least_step_s, step_s)
    return Decodes(rows, left_s, work_s, keep_s, live, first_s, least_s, least_step_s)


@compiled
def capacity_s(ends_s: Floats, decodes: Decodes, fixed_s: float) -> Floats:
    """Time for prefill until each of ``ends_s`` (ascending), if decodes are delayed until their
    slack is spent: FairBatching appendix A, steps 1 to 4, for all. ``O(ends + decodes)``."""
    capacity = np.empty(ends_s.shape[0])
    decode = 0
    rate = 0.0
    offset_s = 0.0
    for item in range(ends_s.shape[0]):
        end_s = ends_s[item]
        while decode < decodes.left_s.shape[0] and decodes.left_s[decode] < end_s:
            share = decodes.work_s[decode] / decodes.keep_s[decode]
            rate += share
            offset_s += share * max(0.0, decodes.left_s[decode])
            decode += 1
        steps = 1.0
        if decodes.least_step_s < inf:
            steps += max(0.0, end_s - decodes.first_s) / decodes.least_step_s
        capacity[item] = end_s - fixed_s * steps - (rate * end_s - offset_s)
    return capacity


@compiled
def triage(
    table: Floats,
    prefill: Mask,
    left_s: Floats,
    work_s: Floats,
    decodes: Decodes,
    fixed_s: float,
    usable: float,
) -> tuple[Ints, Ints, Ints, Ints]:
    """The prefills by deadline, and ``sort_out`` of them."""
    prefills = by_time_left(prefill, left_s)
    ends_s = left_s[prefills]
    until_s = capacity_s(ends_s[: np.searchsorted(ends_s, inf)], decodes, fixed_s)
    kept, ordered, shed = sort_out(table, prefills, work_s, until_s, usable)
    return prefills, kept, ordered, shed


@compiled
def fit_beside(
    rows: Ints, left_s: Floats, work_s: Floats, step_s: float, tpot_s: float, usable: float
) -> bool:
    """Whether the prefills ``rows``, by deadline, are on time beside every decode in every batch;
    ``usable`` is the share of time to count on."""
    queued_s = 0.0
    for row in rows:
        queued_s += work_s[row]
        if queued_s > usable * (left_s[row] - step_s * (1.0 + left_s[row] / tpot_s)):
            return False
    return True


@compiled
def timely_share(table: Floats, rows: Ints, left_s: Floats, work_s: Floats) -> Floats:
    """Share of each output that can be on time at twice its TPOT's rate, >= ``MIN_TIMELY``."""
    share = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        tpot_s = table[row, TPOT] if table[row, TPOT] < inf else UNPACED_S
        late_s = max(0.0, work_s[row] - left_s[row])
        on_time = 1.0 - 2.0 * late_s / (tpot_s * expected_tokens(table[row]))
        share[place] = max(MIN_TIMELY, on_time)
    return share


@compiled
def standby_prompts(
    table: Floats, without: Ints, pieces: Floats, decodes: Decodes, fixed_s: float
) -> float:
    """How many prompts like the queue's, ``without`` some, could meet a mean TTFT beside the
    decodes, or infinite."""
    prompts_s, ttfts_s, stated = 0.0, 0.0, 0
    counts = np.ones(table.shape[0], np.bool_)
    counts[without] = False
    for row in np.flatnonzero(counts):
        prompts_s += most_work_s(pieces, table[row, PROMPT], 0.0)
        if table[row, TTFT] < inf:
            ttfts_s += table[row, TTFT]
            stated += 1
    if not stated or not decodes.rows.shape[0]:
        return inf
    room_s = capacity_s(np.array([ttfts_s / stated]), decodes, fixed_s)[0]
    return room_s / max(prompts_s / (table.shape[0] - without.shape[0]), 1e-9)


def outranked(
    table: Floats, kept: Ints, shed: Ints, spare_s: Floats, room: int, block_tokens: int
) -> tuple[Ints, int]:
    """The prefills of ``shed`` to preempt so that the first of ``kept`` that waits for blocks can
    begin, and its place in ``kept``: as few as needed of those begun, without output and late even
    alone. None if it fits as it is, or would not fit then either."""
    begun = shed[table[shed, RUNNING] > 0]
    begun = begun[(table[begun, EMITTED] == 0) & (spare_s[begun] < 0)]
    if not len(begun):
        return begun, 0
    place, needed = first_waiting(table, kept, block_tokens)
    missing, held = needed - room, table[begun, KV_BLOCKS]
    if place < 0 or missing <= 0 or held.sum() < missing:
        return begun[:0], 0
    return begun[victims(held, table[begun, COMPUTED], missing, 0)], place


@compiled
def first_waiting(table: Floats, kept: Ints, block_tokens: int) -> tuple[int, int]:
    """Place in ``kept`` of the first not begun, else -1, and the KV blocks that it lacks."""
    first, blocks = -1, 0
    for place, row in enumerate(kept):
        waits = table[row, RUNNING] == 0.0
        if waits and first >= 0:
            continue
        upto = ceil((table[row, COMPUTED] + table[row, PENDING]) / block_tokens)
        blocks += max(0, upto - int(table[row, KV_BLOCKS]))
        if waits:
            first = place
    return first, blocks


STANDBY_PROMPTS = 2.0
"""The tail starts no output unless this many mean prompts could be prefilled in a mean TTFT; from
twice as many on it also starts any number of outputs that would all be late."""

LATE_SHARE = 0.1
"""Otherwise late requests have this share of the running sequences, but at least one sequence."""

PACE_GAIN = 0.7
"""A batch with a tail is shorter than the least TPOT by this many times the fixed time of a step,
so that decodes gain time for later prompts."""

QUIET = 3.0
"""None of these holds, and the tail has its largest share, once no request has come for this many
times as long as those in the queue took to come: the overload is over."""

SURPLUS_SHARE = 0.15
"""Share of the time for long prompts of programs whose conversations do not fit the memory beside
those that began before, while nothing else of the tail waits. Each takes KV that others need again:
with more of them the engine computes the same again and again, with fewer it is idle while tools
run (docs/results/agents.md)."""

FITTING_SHARE = 1 / 32
"""A prompt of which no more than this share of the memory is missing takes little from others."""


class Limits(NamedTuple):
    """What bounds the tail.

    Attributes:
        cost_s, empty: predicted time of the batch so far, and whether it has no request yet.
        kept: whether any prefill is kept; ``least_ttft_s``: minimum TTFT stated lately.
        surplus: whether a prompt that the memory is too small for may begin.
        running: of each row, whether it runs; ``active``: how many did before the batch.
        free_before: KV blocks that were free before the batch; ``free_blocks``: that still are.
        sequences, block_tokens: free sequences, tokens per block."""

    now_s: float
    cost_s: float
    empty: bool
    kept: bool
    fixed_s: float
    least_ttft_s: float
    surplus: bool
    running: Mask
    active: int
    free_before: int
    free_blocks: int
    sequences: int
    block_tokens: int


ATTAINED_SHARE = 0.01
"""This share of what a program has attained counts as work of its next turn. With all of it short
loops were slower, as the turns of long ones whose prompts were cached waited until they were not
(docs/results/agents.md)."""


@compiled
def least_attained(
    table: Floats, shed: Ints, worth: Floats, work_s: Floats, attained_s: Floats
) -> Ints:
    """The places of the ``shed`` prefills by ``worth``, as if a share of what was attained before
    were work of theirs; what a tenant's programs have attained does not change its places. ``O(n
    log n)``."""
    count = shed.shape[0]
    tenants, own, shared = np.empty(count), np.empty(count), np.empty(count)
    for place, row in enumerate(shed):
        tenants[place] = table[row, TENANT]
        own_s = max(work_s[row], 1e-9)
        own_total_s = own_s + ATTAINED_SHARE * attained_s[row, OWN]
        own[place] = worth[place] * own_s / own_total_s
        shared_total_s = own_s + ATTAINED_SHARE * attained_s[row, SHARED]
        shared[place] = worth[place] * own_s / shared_total_s
    by_own = np.argsort(own, kind="mergesort")
    if (tenants == tenants[0]).all():
        return by_own
    return own_in_places(tenants, np.argsort(shared, kind="mergesort"), by_own)


@compiled
def surplus_of(
    known: Floats, table: Floats, shed: Ints, began_s: Floats, limits: Limits
) -> tuple[Ints, Ints]:
    """The waiting prefills of ``shed`` that miss more than ``FITTING_SHARE`` of the memory and
    whose conversations do not fit it beside those of programs that began before, the first to begin
    at the front; and the others. ``began_s``: by row; ``known``: see ``Attained``."""
    blocks = float(limits.free_before)
    for row in range(table.shape[0]):
        if table[row, RUNNING] > 0.0:
            blocks += table[row, KV_BLOCKS]
    memory = blocks * limits.block_tokens
    long = np.zeros(shed.shape[0], np.bool_)
    for place, row in enumerate(shed):
        waits = table[row, RUNNING] == 0.0 and table[row, PROGRAM] > 0.0
        long[place] = waits and table[row, PENDING] > FITTING_SHARE * memory
    places = np.flatnonzero(long)
    if not places.shape[0]:
        return places, shed
    began_s = began_s[shed[places]]
    order = np.argsort(began_s, kind="mergesort")
    places = places[order]
    older = older_of(known, began_s[order], limits.now_s)
    for turn, place in enumerate(places):
        long[place] = older[turn] + table[shed[place], PROMPT] > memory
    return shed[places[long[places]]], shed[~long]


@compiled
def overload_is_over(table: Floats, least_ttft_s: float, now_s: float) -> bool:
    """Whether no request has come for ``QUIET`` times as long as these took to come, or as
    ``least_ttft_s``."""
    newest_s = table[:, ARRIVAL].max()
    took_s = max(least_ttft_s, newest_s - table[:, ARRIVAL].min())
    return now_s - newest_s > QUIET * took_s


@compiled
def tail_time_s(
    shed: Ints, left_s: Floats, work_s: Floats, decodes: Decodes, limits: Limits, over: bool
) -> float:
    """Time of the tail in a batch; ``over``: whether the overload is."""
    fixed_s = limits.fixed_s
    if not limits.kept and not decodes.live.any():
        # No request limits the batch: it is full if the queue has no deadline at all.
        return LONGEST_STEPS * fixed_s if np.isfinite(left_s).any() else inf
    # Less than 0.8 from 0.3 s of shed work on, for the sake of requests to come.
    least = 0.8 if over else 0.1
    share = min(0.8, max(least, 0.3 / max(work_s[shed].sum(), 1e-9)))
    pace_s = min(decodes.least_step_s, LONGEST_STEPS * fixed_s)
    if over:
        return share * pace_s
    return min(share * pace_s, pace_s - PACE_GAIN * fixed_s - limits.cost_s)


@compiled
def tail(
    table: Floats,
    shed: Ints,
    left_s: Floats,
    work_s: Floats,
    decodes: Decodes,
    pieces: Floats,
    limits: Limits,
    attained: tuple[Floats, Floats],
) -> tuple[Ints, float, int]:
    """The shed prefills that may run: begun ones, as they hold memory, then waiting ones; both by
    priority times ``timely_share`` over work, descending. One that begins takes time from all that
    arrive while it decodes, so one whose output would all be late waits. Also their time, and the
    row of the one that the memory is too small for, or -1. ``attained``: by row, and all that is
    known (see ``Attained``). ``O(n log n)``."""
    attained_s, known = attained
    running, surplus, apart = limits.running, shed[:0], -1
    if attained_s.shape[0] and not limits.empty:
        surplus, shed = surplus_of(known, table, shed, attained_s[:, BEGAN], limits)
        if surplus.shape[0] and not shed.shape[0] and limits.surplus:
            apart = surplus[0]
            shed, surplus = surplus[:1], surplus[1:]
    if not shed.shape[0]:
        return shed, 0.0, apart
    over = not limits.kept and overload_is_over(table, limits.least_ttft_s, limits.now_s)
    tail_s = tail_time_s(shed, left_s, work_s, decodes, limits, over)
    standby = inf if over else standby_prompts(table, surplus, pieces, decodes, limits.fixed_s)
    # With nothing else to run, a prompt of nearly all blocks must not wait for the reserve.
    reserve = 0.0 if limits.empty else TAIL_RESERVE
    timely = timely_share(table, shed, left_s, work_s)
    count = shed.shape[0]
    worth = np.empty(count)
    late = np.searchsorted(decodes.left_s, 0.0)
    held = 0.0
    for row in range(table.shape[0]):
        if running[row]:
            held += table[row, KV_BLOCKS]
    for place, row in enumerate(shed):
        worth[place] = -table[row, PRIORITY] * timely[place] / max(work_s[row], 1e-9)
        if running[row] and timely[place] <= MIN_TIMELY:
            late += 1
    room = limits.free_blocks - reserve * (limits.free_blocks + held)
    places = limits.sequences - int(reserve * (limits.sequences + limits.active))
    late_places = max(1, int(LATE_SHARE * limits.active)) - late
    needed = blocks_needed(table, shed, limits.block_tokens)
    if attained_s.shape[0]:
        order = least_attained(table, shed, worth, work_s, attained_s)
    else:
        order = np.argsort(worth, kind="mergesort")
    chosen = np.empty(count, np.int64)
    taken = 0
    for begun in (True, False):
        for place in order:
            row = shed[place]
            if running[row] != begun:
                continue
            if not begun and standby < 2.0 * STANDBY_PROMPTS:
                if standby < STANDBY_PROMPTS:
                    continue
                if timely[place] <= MIN_TIMELY:
                    late_places -= 1
                    if late_places < 0:
                        continue
            if needed[place] > room:
                continue
            room -= needed[place]
            if not begun:
                places -= 1
                if places < 0:
                    continue
            chosen[taken] = row
            taken += 1
    return chosen[:taken], tail_s, apart


TAIL_RESERVE = 0.05
"""Share of the KV blocks and of the sequences that the tail leaves free."""


class DeadlineTriageOptions(PolicyOptions):
    """Options of :class:`DeadlineTriage`."""

    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start. `first_token` meets a TPOT since "
        "the first token, as mean or maximum; `envelope` is enough for TDG; `last_token` bounds "
        "the time between tokens and in short windows of tokens.",
    )
    headroom: float = Field(
        default=0.1,
        ge=0,
        le=0.5,
        description="Minimum share of every time budget that is left unused, in addition to the "
        "latency model's own head-room: step times vary around their prediction, the model has "
        "errors, and a TPOT measured as a maximum tolerates neither. It is larger while recent "
        "steps were further from their prediction.",
    )
    patience_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="A shed request that has waited longer is aged, and served from `aged_share`.",
    )
    aged_share: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="Share of each batch's time, and of the running sequences, for aged requests "
        "in order of arrival.",
    )


class DeadlineTriage(BatchPolicy):
    """Keeps the prefills whose deadlines can be held together and sheds the others to a tail.

    1. *Time budget*: the minimum slack of the decodes that can be on time, at least their minimum
       TPOT, minus the head-room (FairBatching §3.2). Late decodes do not shrink it; a promised mean
       TPOT allows a little lateness on the way (``GRACE_TOKENS``).
    2. *Triage*: weighted Moore-Hodgson (``keep``) against the time left for prefill until each
       deadline (FairBatching §3.4), then against sequences and KV blocks. A late promised prefill
       is not shed: it goes as far to the front as makes no kept one late.
    3. *Order*: decodes that would be late if left out; the aged lane; kept prefills by deadline;
       the other decodes; the tail. All decodes come first while the kept prefills can afford it.
    4. *Tail*: 0.1 to 0.8 of the minimum TPOT in a batch, less with a larger backlog, and less than
       the decodes leave of it (``PACE_GAIN``), until the overload is over (``QUIET``). What
       programs have attained counts as work of their requests. Beside other work, long prompts of
       programs that the memory is too small for wait (``SURPLUS_SHARE``).
    5. *Ageing*: requests older than ``patience_s`` get ``aged_share`` (``AgedLane``); a decode late
       for longer is in every batch.

    A step that verifies drafts is due with the last of its expected tokens (SLOs-Serve §3.2.3).
    Requests without any deadline belong to the tail. ``O(n log n)``."""

    name = "deadline_triage"
    source = (
        "ours; time budget and prefill capacity of FairBatching §3.2 and §3.4, "
        "selection by Moore (Management Science 1968)"
    )
    local_order = SLIDE
    Options = DeadlineTriageOptions

    def __init__(self, options: DeadlineTriageOptions | None = None) -> None:
        options = options or DeadlineTriageOptions()
        super().__init__(options)
        self._anchor = options.anchor.code
        self._headroom = options.headroom
        self._lane = AgedLane(options.patience_s, options.aged_share)
        self._least_ttft_s = inf
        self._least_seen_s = self._surplus_s = -inf

    def paced(self, queue: QueueView) -> Mask:
        """All rows: every decode sets the batch time."""
        return np.ones(len(queue), np.bool_)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Take urgent decodes, the aged lane, kept prefills, other decodes, then the tail."""
        table = queue.table
        if not len(table):
            return
        fixed_s, pieces, block_tokens = latency.fixed_s, latency.pieces, batch.block_tokens
        # The next request may state the minimum TTFT of the last minute, too.
        least_ttft_s = float(table[:, TTFT].min())
        if least_ttft_s <= self._least_ttft_s or now_s - self._least_seen_s > 60.0:
            self._least_ttft_s, self._least_seen_s = least_ttft_s, now_s

        # 1. Time budget.
        # Two spreads: a step in 20 or so is longer than that, if the errors are noise. Steps that
        # cannot be predicted must not leave the engine idle.
        usable = 1 - max(self._headroom, min(2.0 * latency.spread, 0.35))
        prefill, work_s, left_s = look(table, pieces, self._anchor, now_s, fixed_s)
        output: Floats = np.empty(0)
        if batch.lengths is not None:
            # A step that emits several tokens is due later, and has more work.
            lengths = batch.lengths.of(np.arange(len(table)))
            output = lengths.output
            left_s += lengths.credit_s
            work_s = np.maximum(work_s, lengths.work_s)
        decodes = decodes_of(table, prefill, left_s, work_s, output, pieces, fixed_s, self._anchor)
        budget_s = max(decodes.first_s, decodes.least_s) * usable

        # 2. Triage, and which shed prefills give way to a kept one that waits for blocks.
        running = table[:, RUNNING] > 0
        active = int(np.count_nonzero(running))
        growth = active * GROWTH_TOKENS // block_tokens + 1
        batch.spare(growth)
        prefills, kept, ordered, shed = triage(
            table, prefill, left_s, work_s, decodes, fixed_s, usable
        )
        punctual = len(ordered) == len(kept)
        left_out = shed if punctual else np.concatenate((np.setdiff1d(ordered, kept), shed))
        free_blocks, places = batch.free_blocks, batch.sequences_left
        room = free_blocks - growth
        aged, yielding, most_tokens = self._lane.aged(table, left_out, now_s), shed, inf
        if len(aged):
            # The lane begins a longer prompt only when it can finish it: on its small share of the
            # time it would hold its blocks for minutes.
            blocks = free_blocks + float(table[running, KV_BLOCKS].sum())
            most_tokens = 0.125 * blocks * block_tokens
            aged = self._lane.in_turn(table, aged, most_tokens)
            yielding = shed[shed != self._lane.under_way(table, aged, latency, most_tokens)]
        gone = yielding[:0]
        if len(yielding) and len(ordered):
            spare_s = left_s - work_s - fixed_s
            gone, place = outranked(table, ordered, yielding, spare_s, room, block_tokens)
        if len(gone):
            batch.evict(gone)
            room, places = batch.free_blocks - growth, batch.sequences_left
            running[gone] = False
            active -= len(gone)
            aged, shed = aged[~np.isin(aged, gone)], shed[~np.isin(shed, gone)]
            begins = np.arange(len(ordered)) <= place
            ordered = ordered[begins | running[ordered]]
        step_s = fixed_s + float(decodes.work_s.sum())
        answer_s = UNKNOWN_OUTPUT_TOKENS * step_s / (len(decodes.rows) + 1)
        admissible = ordered
        if len(ordered):
            admissible = _admissible(table, ordered, places, room, block_tokens, work_s, answer_s)

        # 3. Urgent decodes: first those that can be on time or have been late for longer than the
        # patience, then the other late ones, which leave prefills their share of the batch.
        scarce = room < growth or places < TAIL_RESERVE * len(table)
        urgent = len(decodes.rows)
        if not scarce and len(ordered):
            tpot_s = decodes.least_step_s
            if not fit_beside(ordered, left_s, work_s, step_s, tpot_s, usable):
                urgent = int(np.searchsorted(decodes.left_s, budget_s + tpot_s))
        rows = decodes.rows[:urgent]
        first = decodes.live[:urgent] | (decodes.left_s[:urgent] < -self._lane.patience_s)
        if len(rows):
            batch.take(rows[first])
            late = rows[~first]
            if len(late):
                share_s = (1 - PREFILL_SHARE) * budget_s
                batch.take(late, share_s if len(admissible) else inf)

        # The aged lane, kept prefills and the other decodes.
        on_time = None if punctual else np.isin(admissible, kept)
        until_s = self._until_s(
            *(batch.cost_s, table, admissible, on_time, left_s, work_s),
            *(decodes, budget_s, latency, usable),
        )
        if len(aged):
            answering = table[:, FIRST_TOKEN] - table[:, ARRIVAL] > self._lane.patience_s
            if np.count_nonzero(running & answering) >= self._lane.places(active):
                aged = aged[running[aged]]
        if len(aged):
            self._lane.take(batch, table, aged, now_s, latency, until_s, most_tokens)
        if len(admissible):
            batch.take(admissible, until_s)
        if urgent < len(decodes.rows):
            batch.take(decodes.rows[urgent:], until_s)

        # 4. The tail.
        if len(shed):
            cost_s = batch.cost_s
            limits = Limits(
                *(now_s, cost_s, batch.empty, len(kept) > 0, fixed_s, self._least_ttft_s),
                *(now_s >= self._surplus_s, running, active, free_blocks),
                *(batch.free_blocks, batch.sequences_left, block_tokens),
            )
            attained_s = NONE_ATTAINED if queue.attained_s is None else queue.attained_s
            rows, tail_s, apart = tail(
                *(table, shed, left_s, work_s, decodes, pieces, limits),
                (attained_s, self.attained.known),
            )
            batch.take(rows, min(until_s, cost_s + tail_s))
            if apart >= 0 and batch.granted[apart] > 0:
                self._surplus_s = now_s + float(work_s[apart]) / SURPLUS_SHARE
        if batch.empty:
            batch.spare(0)
            batch.ensure_progress(np.concatenate((decodes.rows, prefills)))

    def _until_s(
        self,
        taken_s: float,
        table: Floats,
        kept: Ints,
        punctual: Mask | None,
        left_s: Floats,
        work_s: Floats,
        decodes: Decodes,
        budget_s: float,
        latency: LatencyModel,
        usable: float,
    ) -> float:
        """When the batch must end; ``punctual``: the ``kept`` prefills on time, None: all."""
        longest_s = max(TTFT_SHARE * self._least_ttft_s, MIN_STEPS * latency.fixed_s)
        if decodes.least_step_s < inf:
            longest_s = max(longest_s, decodes.least_step_s)
        until_s = min(budget_s, longest_s)
        if not len(kept):
            return until_s
        whole_s = taken_s + float(work_s[kept[0]])
        # A batch that completes a prefill which would else be late may be twice as long, and take
        # the head-room.
        if until_s < whole_s <= min(budget_s / usable, 2.0 * longest_s):
            # Another step would cost the first one its deadline.
            left_first_s = float(left_s[kept[0]])
            if whole_s <= left_first_s and usable * left_first_s < whole_s + taken_s:
                until_s = whole_s
        if until_s < inf:
            deepest = int(table[kept, COMPUTED].max())
            until_s = max(until_s, least_useful_s(taken_s, latency, deepest))
        first = 0 if punctual is None else int(np.argmax(punctual))
        if punctual is not None and not punctual[first]:
            return until_s
        first_s = taken_s + float(work_s[kept[: first + 1]].sum())
        if first_s <= until_s:
            # The batch completes the first one: more work must not make it late.
            until_s = min(until_s, max(usable * float(left_s[kept[first]]), first_s))
        return until_s


def _admissible(
    table: Floats,
    kept: Ints,
    places: int,
    room: int,
    block_tokens: int,
    work_s: Floats,
    answer_s: float,
) -> Ints:
    """The ``kept`` requests with sequences and KV blocks now: by priority per time of one
    sequence's output (``answer_s``) where sequences are short, per block where blocks are."""
    waiting = kept[table[kept, RUNNING] == 0]
    if len(waiting) > places:
        value = table[waiting, PRIORITY] / np.maximum(work_s[waiting] + answer_s, 1e-9)
        left_out = waiting[np.argsort(-value, kind="stable")[max(0, places) :]]
        kept = kept[~np.isin(kept, left_out)]
    blocks = blocks_needed(table, kept, block_tokens)
    if float(blocks.sum()) > room:
        kept = kept[keep(blocks, table[kept, PRIORITY], np.full(len(kept), float(room)))]
    return kept
