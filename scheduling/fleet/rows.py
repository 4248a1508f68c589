"""Compiled loops over what a fleet knows of one replica: taking requests in, and summing them up.

A replica is a row of four arrays, see ``FleetArrays``. All times are seconds on the fleet's clock.
The prefill capacity until ``t`` is what is left of the time since the report if each decode is
delayed to its slack and then runs at its TPOT (FairBatching appendix A, steps 1 to 4)::

    capacity(t) = t - begun - fixed - sum of share * max(0, t - due) over the loads

with ``share`` the time of one step of a load over its TPOT and, where it is the tightest so far,
the cost of the more frequent steps. It does not depend on when it is asked, so it is kept from
report to report; a decision first spends it on the prefills that were there (``advance``)."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.request.kernels import (
    Floats,
    Ints,
    compiled,
    copy_row,
    most_work_s,
)

# The figures of a replica.
WAITING = 0  # requests, as reported
RUNNING = 1
RESERVED = 2  # requests on their way
TOKENS = 3  # prompt tokens to prefill of guaranteed requests, those on their way included
CONTEXT = 4  # context tokens of the guaranteed decodes
DECODES = 5  # guaranteed decodes
FREE_BLOCKS = 6  # KV blocks, as reported
TOTAL_BLOCKS = 7
BLOCK_TOKENS = 8
BEGUN_S = 9  # since when the reported work is being worked on
FIXED_S = 10  # time of an empty step
PREFILL_S = 11  # predicted time of the guaranteed prefills
DECODE_S = 12  # work of one step of the guaranteed decodes
PACE_S = 13  # their least pace that can be held; infinite for none
DUE_S = 14  # when the first of them is due; infinite for none
NEEDED_BLOCKS = 15  # blocks that guaranteed prefills need beyond those they hold
LENT_BLOCKS = 16  # blocks of best-effort requests, which guaranteed ones may take
LENT_PLACES = 17  # running best-effort requests
BEST_EFFORT_S = 18  # predicted time of the best-effort prefills
EXPECTED_BLOCKS = 19  # blocks that all live requests are expected to need beyond those they hold
BLOCKS_PER_S = 20  # that the guaranteed decodes free soon, less what they take, in the mean
PLACES = 21  # most running sequences
QUEUED = 22  # guaranteed prefills, entries of `prefills`
LOADS = 23  # entries of `loads`
STEP_ENDS_S = 24  # when the step under way is expected to end
PROMISED = 25  # guaranteed requests, those on their way included
DECODE_SHARES = 26  # of each second, for the steps of the guaranteed decodes that state a pace
DECODE_PACE_S = 27  # their least pace; infinite for none
BATCH_S = 28  # time of a batch that is full; infinite where nothing limits it
STEP_WORK_S = 29  # guaranteed prefill in the step under way
SPENT_UNTIL_S = 30  # when the latest decision was made, or the work began
SPENT_S = 31  # capacity until then, which is spent
CLAIMED_BLOCKS = 32  # most blocks that guaranteed requests will need at a time beyond those held
LATER_S = 33  # prefill of later stages that is expected each second
QUEUE_PACE_S = 34  # least pace that can be held of the guaranteed prefills' decodes later
LENT_QUEUED = 35  # best-effort prefills, entries of `lent`
ORDER = 36  # in which its local policy takes prefills, a code of `local_orders`
LOADS_PACE_S = 37  # least pace of the loads; infinite for none
STOP_S = 38  # until a running prefill has stopped for a step of decodes; 0 where they share batches
STOPPING_PACE_S = 39  # least pace of the loads without that of the longest prefill's decode later
KV_ANSWER_S = 40  # that a prompt waits until a KV connector has said what it holds of it
FIGURES = 41

# A guaranteed prefill.
PREFILL_DUE_S = 0
WORK_S = 1
PRIORITY = 2
AHEAD_S = 3  # work up to and with this one
MARGIN_S = 4  # least of capacity less work left ahead, of this one and all behind it
OWN_SHARE = 5  # of each second, for its decode later; 0 where it states no pace
OWN_PACE_S = 6  # of its decode; infinite where it states none
LEFT_S = 7  # work left when the latest decision was made
LEFT_AHEAD_S = 8  # of that, up to and with this one
PREFILL_FIELDS = 9

# A load.
LOAD_DUE_S = 0
STEP_SHARE = 1  # of each second, for its own work
LOAD_PACE_S = 2
SHARES = 3  # sum of the shares up to and with this one, more frequent steps included
OFFSETS_S = 4  # the same of share * due
LOAD_FIELDS = 5

# A best-effort prefill.
LENT_DUE_S = 0
LENT_WORK_S = 1
LENT_PRIORITY = 2
LENT_FIELDS = 3

MIN_RATE = 0.05
"""Least share of a replica's time that counts as left for prefill, in predictions."""

FREED_WITHIN_S = 5.0
"""Averaging time of ``BLOCKS_PER_S``, seconds: the real output lengths are unknown."""


FleetArrays = tuple[Floats, Floats, Ints, Floats, Floats, Floats]
"""The arrays of all replicas, for compiled loops: ``figures``, ``float64[rows, FIGURES]``;
corrected latency models ``pieces``, ``float64[rows, most pieces, COEFFICIENTS]``; ``starts``,
``int64[rows]``, where a replica's entries begin in the others. ``prefills`` and ``loads`` (promised
decodes) are by deadline with prefix sums; ``lent`` are the best-effort prefills."""


class Prompt(NamedTuple):
    """A promised prompt that a replica gets; ``due_s`` and ``tpot_s`` are infinite if no time is
    stated. ``cached_tokens`` beyond the ``new_tokens`` have KV there; ``blocks`` are those needed
    beyond the held ones."""

    due_s: float
    tpot_s: float
    priority: float
    new_tokens: float
    cached_tokens: float
    blocks: float


class Prefill(NamedTuple):
    """A prefill that a replica might get: ``work_s`` is its predicted time, ``own_s`` that of a
    step of its decode, seconds."""

    work_s: float
    due_s: float
    tpot_s: float
    priority: float
    own_s: float


def requests_at(figures: Floats) -> Floats:
    """Requests at replicas or on their way to them; ``figures`` is ``float64[n, FIGURES]``."""
    total: Floats = figures[:, WAITING] + figures[:, RUNNING] + figures[:, RESERVED]
    return total


@compiled
def capacity_s(figures: Floats, loads: Floats, until_s: float) -> float:
    """Time for prefill until ``until_s`` that is not spent. ``O(log loads)``."""
    low, high = 0, int(figures[LOADS])
    while low < high:
        middle = (low + high) // 2
        if loads[middle, LOAD_DUE_S] < until_s:
            low = middle + 1
        else:
            high = middle
    capacity = until_s - figures[BEGUN_S] - figures[FIXED_S] - figures[SPENT_S]
    if low > 0:
        capacity -= loads[low - 1, SHARES] * until_s - loads[low - 1, OFFSETS_S]
    return capacity


@compiled
def spare_s(figures: Floats, loads: Floats, ahead_s: float, now_s: float, until_s: float) -> float:
    """Time until ``until_s`` for one more prefill behind ``ahead_s`` of work that is left; negative
    where that work does not fit; infinite without an end. ``O(log loads)``."""
    if until_s == inf:
        return inf
    begins_s = ahead_s
    # Loads only lower the capacity until now: mostly more work is left than there was time.
    if now_s - figures[BEGUN_S] - figures[SPENT_S] > ahead_s:
        begins_s = max(ahead_s, capacity_s(figures, loads, now_s) + figures[FIXED_S])
    return capacity_s(figures, loads, until_s) - begins_s


@compiled
def budget_s(figures: Floats, prefills: Floats, loads: Floats, now_s: float, due_s: float) -> float:
    """The prefill admission budget (PAB) for a prompt due at ``due_s``, seconds, behind all
    promised prefills (FairBatching appendix A; horizon: its own TTFT, §3.4). ``O(log loads)``.

    In seconds in place of steps 5 and 6's tokens: the same where a token costs the same everywhere,
    and valid in every latency model."""
    queued = int(figures[QUEUED])
    ahead_s = prefills[queued - 1, LEFT_AHEAD_S] if queued > 0 else 0.0
    return spare_s(figures, loads, ahead_s, now_s, due_s)


@compiled
def spare_after_s(
    fleet: FleetArrays, rows: Ints, now_s: float, due_s: float, lead_s: Floats, work_s: Floats
) -> Floats:
    """What a prefill of ``work_s[i]`` that is due at ``due_s - lead_s[i]`` leaves of the budget of
    each of ``rows``, seconds; negative where it does not fit. ``O(log loads)`` per row."""
    spare = np.empty(rows.shape[0])
    figures, _, starts, prefills, loads, _ = fleet
    for place in range(rows.shape[0]):
        row = rows[place]
        queue, decodes = prefills[starts[row] :], loads[starts[row] :]
        own_s = budget_s(figures[row], queue, decodes, now_s, due_s - lead_s[place])
        spare[place] = own_s - work_s[place]
    return spare


@compiled
def settle(figures: Floats, prefills: Floats, loads: Floats) -> None:
    """Sum up the prefills and the loads, which are in order. ``O(prefills + loads)``."""
    shares = offsets_s = 0.0
    pace_s = inf
    fixed_s = figures[FIXED_S]
    for load in range(int(figures[LOADS])):
        share = loads[load, STEP_SHARE]
        if loads[load, LOAD_PACE_S] < pace_s:
            share += fixed_s / loads[load, LOAD_PACE_S] - fixed_s / pace_s
            pace_s = loads[load, LOAD_PACE_S]
        shares += share
        offsets_s += share * loads[load, LOAD_DUE_S]
        loads[load, SHARES] = shares
        loads[load, OFFSETS_S] = offsets_s
    figures[LOADS_PACE_S] = pace_s
    ahead_s = left_ahead_s = 0.0
    queued = int(figures[QUEUED])
    # Stops are mostly as long as those of the longest prefill, before whose end it has no decode.
    stopping_s, longest = figures[DECODE_PACE_S], 0
    for item in range(1, queued):
        shorter = item
        if prefills[item, WORK_S] > prefills[longest, WORK_S]:
            shorter, longest = longest, item
        stopping_s = min(stopping_s, prefills[shorter, OWN_PACE_S])
    figures[STOPPING_PACE_S] = stopping_s
    for item in range(queued):
        ahead_s += prefills[item, WORK_S]
        left_ahead_s += prefills[item, LEFT_S]
        prefills[item, AHEAD_S], prefills[item, LEFT_AHEAD_S] = ahead_s, left_ahead_s
    margin_s = inf
    for item in range(queued - 1, -1, -1):
        due_s = prefills[item, PREFILL_DUE_S]
        if due_s < inf:
            left_s = capacity_s(figures, loads, due_s) - prefills[item, LEFT_AHEAD_S]
            # One that is late already forbids nothing by itself.
            if left_s >= 0.0:
                margin_s = min(margin_s, left_s)
        prefills[item, MARGIN_S] = margin_s
    figures[PREFILL_S] = ahead_s


@compiled
def advance(figures: Floats, prefills: Floats, loads: Floats, now_s: float) -> None:
    """Spend the capacity until ``now_s`` on the prefills there, by deadline; what is left was idle,
    and the next prefill pays the fixed time of a step again. ``settle`` must follow.
    ``O(prefills)``."""
    if now_s <= figures[SPENT_UNTIL_S]:
        return
    figures[SPENT_UNTIL_S] = now_s
    room_s = capacity_s(figures, loads, now_s)
    for item in range(int(figures[QUEUED])):
        done_s = min(max(0.0, room_s), prefills[item, LEFT_S])
        prefills[item, LEFT_S] -= done_s
        figures[SPENT_S] += done_s
        room_s -= done_s
        if prefills[item, LEFT_S] > 0.0:
            return
    figures[SPENT_S] += max(0.0, room_s + figures[FIXED_S])


@compiled
def put(entries: Floats, count: int, due_s: float) -> int:
    """Make room for an entry behind those that are due no later; return its place."""
    place = count
    while place > 0 and entries[place - 1, 0] > due_s:
        copy_row(entries[place], entries[place - 1])
        place -= 1
    return place


@compiled
def put_in_order(entries: Floats, count: int) -> None:
    """Sort the first ``count`` entries by when they are due. ``O(count log count)``."""
    ordered = entries[np.argsort(entries[:count, 0].copy(), kind="mergesort")]
    for place in range(count):
        copy_row(entries[place], ordered[place])


@compiled
def pace_of(tpot_s: float, fixed_s: float, step_s: float) -> float:
    """The time between two tokens of a decode: its TPOT, or a step of it alone where that is
    longer; infinite where no TPOT is stated."""
    return max(tpot_s, fixed_s + step_s)


@compiled
def take(
    figures: Floats,
    pieces: Floats,
    prefills: Floats,
    loads: Floats,
    prompt: Prompt,
    now_s: float,
    in_order: bool,
) -> float:
    """Add a promised prefill and its decode, and return its work, seconds. Where not ``in_order``
    both go to the end, to be sorted. ``settle`` must follow."""
    new_tokens, cached_tokens, tpot_s = prompt.new_tokens, prompt.cached_tokens, prompt.tpot_s
    queued = int(figures[QUEUED])
    place = put(prefills, queued, prompt.due_s) if in_order else queued
    work_s = most_work_s(pieces, new_tokens, cached_tokens)
    prefills[place, PREFILL_DUE_S] = prompt.due_s
    prefills[place, WORK_S] = prefills[place, LEFT_S] = work_s
    prefills[place, PRIORITY] = prompt.priority
    prefills[place, OWN_SHARE], prefills[place, OWN_PACE_S] = 0.0, inf
    figures[QUEUED] += 1.0
    figures[PROMISED] += 1.0
    figures[TOKENS] += new_tokens
    figures[NEEDED_BLOCKS] += prompt.blocks
    if tpot_s < inf:
        step_s = most_work_s(pieces, 1.0, new_tokens + cached_tokens)
        pace_s = pace_of(tpot_s, figures[FIXED_S], step_s)
        prefills[place, OWN_SHARE], prefills[place, OWN_PACE_S] = step_s / pace_s, pace_s
        begins_s = max(prompt.due_s + tpot_s, now_s)
        add_load(figures, loads, begins_s, step_s / pace_s, pace_s, in_order)
        if tpot_s >= pace_s:
            figures[QUEUE_PACE_S] = min(figures[QUEUE_PACE_S], pace_s)
    return work_s


@compiled
def add_load(
    figures: Floats, loads: Floats, due_s: float, share: float, pace_s: float, in_order: bool
) -> None:
    """Add a load. Where not ``in_order`` it goes to the end, to be sorted."""
    count = int(figures[LOADS])
    place = put(loads, count, due_s) if in_order else count
    loads[place, LOAD_DUE_S] = due_s
    loads[place, STEP_SHARE] = share
    loads[place, LOAD_PACE_S] = pace_s
    figures[LOADS] += 1.0


@compiled
def lend(
    figures: Floats, lent: Floats, due_s: float, work_s: float, priority: float, in_order: bool
) -> None:
    """Add a best-effort prefill. Where not ``in_order`` it goes to the end, to be sorted."""
    count = int(figures[LENT_QUEUED])
    place = put(lent, count, due_s) if in_order else count
    lent[place, LENT_DUE_S] = due_s
    lent[place, LENT_WORK_S] = work_s
    lent[place, LENT_PRIORITY] = priority
    figures[LENT_QUEUED] += 1.0
    figures[BEST_EFFORT_S] += work_s


@compiled
def add_later(
    figures: Floats,
    pieces: Floats,
    later_stages: float,
    later_tokens: float,
    context_tokens: float,
    output_tokens: float,
    tpot_s: float,
) -> None:
    """Expect the prompt that enters a promised request with a later stage: equally likely in each
    moment of a part of the output that is left, cut into as many parts as stages."""
    if later_tokens < 1.0:
        return
    step_s = most_work_s(pieces, 1.0, context_tokens)
    pace_s = pace_of(tpot_s if tpot_s < inf else 0.0, figures[FIXED_S], step_s)
    part_s = max(1.0, output_tokens / (later_stages + 1.0)) * pace_s
    work_s = most_work_s(pieces, later_tokens, context_tokens)
    figures[LATER_S] += work_s / part_s
    figures[NEEDED_BLOCKS] += later_tokens / figures[BLOCK_TOKENS]


@compiled
def room_s(figures: Floats) -> float:
    """Time for prefill in a batch beside all promised decodes."""
    batch_s = figures[BATCH_S]
    if batch_s == inf:
        return inf
    return max(batch_s - figures[FIXED_S] - figures[DECODE_S], MIN_RATE * batch_s)


@compiled
def prefill_on(
    figures: Floats, pieces: Floats, rows: Ints, prompt_tokens: float, cached_tokens: Floats
) -> tuple[Floats, Floats]:
    """:func:`work_on`, and the time before it until a KV connector has said what it holds."""
    wait_s = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        wait_s[place] = figures[row, KV_ANSWER_S]
    return work_on(pieces, rows, prompt_tokens, cached_tokens), wait_s


@compiled
def work_on(pieces: Floats, rows: Ints, prompt_tokens: float, cached_tokens: Floats) -> Floats:
    """Predicted time of a prompt's prefill on each of the replicas ``rows``, of which each has
    ``cached_tokens[i]`` in its cache."""
    work = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        new = max(1.0, prompt_tokens - cached_tokens[place])
        work[place] = most_work_s(pieces[row], new, cached_tokens[place])
    return work
