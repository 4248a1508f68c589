"""Checks common to the admission policies: KV memory, sequence slots, and predicted waits."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, floor, inf

from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.assumptions import GROWTH_TOKENS
from sluice.scheduling.fleet.rows import (
    AHEAD_S,
    BLOCK_TOKENS,
    BLOCKS_PER_S,
    CLAIMED_BLOCKS,
    DECODE_S,
    DECODES,
    FIXED_S,
    FREE_BLOCKS,
    FREED_WITHIN_S,
    LENT_BLOCKS,
    LOADS,
    LOADS_PACE_S,
    NEEDED_BLOCKS,
    PLACES,
    PREFILL_DUE_S,
    PREFILL_S,
    PROMISED,
    QUEUED,
    SHARES,
    STEP_ENDS_S,
    STEP_WORK_S,
    STOP_S,
    STOPPING_PACE_S,
    TOTAL_BLOCKS,
    room_s,
)
from sluice.scheduling.request.expected import claim
from sluice.scheduling.request.kernels import Floats, compiled

# When a prompt that is placed on a replica would get its first token.


@compiled
def place_of(figures: Floats, prefills: Floats, due_s: float) -> int:
    """How many promised prefills are due no later. ``O(log n)``."""
    low, high = 0, int(figures[QUEUED])
    while low < high:
        middle = (low + high) // 2
        if prefills[middle, PREFILL_DUE_S] <= due_s:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def first_token_s(
    figures: Floats, prefills: Floats, work_s: float, now_s: float, due_s: float
) -> float:
    """Predicted time from now to its first token, with prefills by deadline, each beside all
    promised decodes. A token leaves with the end of its batch, which prefills that are due later
    fill up."""
    step_s, most_s = figures[FIXED_S] + figures[DECODE_S], room_s(figures)
    done_s, ends_s, total_s = figures[STEP_WORK_S], figures[STEP_ENDS_S], figures[PREFILL_S]
    # Batches since the step of the report.
    if ends_s < now_s and done_s < total_s and most_s < inf:
        full = min(ceil((now_s - ends_s) / (step_s + most_s)), floor((total_s - done_s) / most_s))
        done_s += full * most_s
        ends_s += full * (step_s + most_s)
    if ends_s < now_s and done_s < total_s:
        ends_s += step_s + total_s - done_s
        done_s = total_s
    if ends_s < now_s and figures[DECODES] > 0.0 and step_s > 0.0:
        ends_s += ceil((now_s - ends_s) / step_s) * step_s
    place = place_of(figures, prefills, due_s)
    ahead_s = prefills[place - 1, AHEAD_S] if place > 0 else 0.0
    left_s = max(0.0, ahead_s - done_s) + work_s
    batches = max(1.0, ceil(left_s / most_s))
    filled_s = min(max(0.0, total_s - done_s) + work_s, batches * most_s)
    return max(0.0, ends_s - now_s) + batches * step_s + max(left_s, filled_s)


MIN_WAIT_S = 0.05
"""Minimum predicted wait of a request that cannot be promised now, seconds."""


@compiled
def room_wait_s(
    figures: Floats,
    prompt_tokens: float,
    new_tokens: float,
    now_s: float,
    start_s: float,
    reserve_tokens: float,
) -> float:
    """Predicted seconds until there are KV blocks and a sequence slot for a prompt; infinite:
    never.

    Blocks and slots of best-effort requests count as free, and so do blocks that come free until
    ``start_s``, at most ``FREED_WITHIN_S`` from now. Each promised request may grow by
    ``GROWTH_TOKENS``. ``reserve_tokens``: length of one more prompt that must fit beside it."""
    block, promised = figures[BLOCK_TOKENS], figures[PROMISED]
    if ceil(prompt_tokens / block) >= figures[TOTAL_BLOCKS] or figures[PLACES] < 1.0:
        return inf
    wanted = figures[NEEDED_BLOCKS] + ceil(new_tokens / block)
    wanted += ceil(promised * GROWTH_TOKENS / block) + 1.0
    if reserve_tokens > 0.0:
        promised += 1.0
        wanted += ceil((reserve_tokens + GROWTH_TOKENS) / block)
    wanted -= figures[BLOCKS_PER_S] * min(FREED_WITHIN_S, max(0.0, start_s - now_s))
    return freed_within_s(figures, wanted, promised)


@compiled
def claims_wait_s(
    figures: Floats, prompt_tokens: float, output_tokens: float, reserve_tokens: float
) -> float:
    """As ``room_wait_s``, but with the blocks of whole expected outputs, as in ``slos_serve``. A
    cached prefix saves none, as its blocks count as free."""
    block, total = figures[BLOCK_TOKENS], figures[TOTAL_BLOCKS]
    promised, wanted = figures[PROMISED], figures[CLAIMED_BLOCKS]
    if ceil(prompt_tokens / block) >= total or figures[PLACES] < 1.0:
        return inf
    wanted += claim(prompt_tokens, output_tokens, 0.0, 0.0, block, total)
    if reserve_tokens > 0.0:
        promised += 1.0
        wanted += claim(reserve_tokens, output_tokens, 0.0, 0.0, block, total)
    return freed_within_s(figures, wanted, promised)


@compiled
def freed_within_s(figures: Floats, wanted: float, promised: float) -> float:
    """Predicted time until ``wanted`` blocks and a slot beside ``promised`` requests are free."""
    lack = wanted - figures[FREE_BLOCKS] - figures[LENT_BLOCKS]
    rate = figures[BLOCKS_PER_S]
    wait_s = 0.0
    if lack > 0.0:
        wait_s = max(MIN_WAIT_S, lack / rate) if rate > 0.0 else FREED_WITHIN_S
    if promised >= figures[PLACES]:
        wait_s = max(wait_s, FREED_WITHIN_S)
    return wait_s


@compiled
def reserve_at(figures: Floats, reserve_tokens: float) -> float:
    """Length of the prompt for which a replica keeps capacity, tokens; 0 while the replica has no
    promises, as an idle replica needs no reserve."""
    return max(2.0, reserve_tokens) if reserve_tokens > 0.0 and figures[PROMISED] > 0.0 else 0.0


@compiled
def room_constraint(figures: Floats) -> int:
    """Which constraint binds where :func:`room_wait_s` is above 0."""
    if figures[PROMISED] >= figures[PLACES]:
        return Constraint.SEQUENCES
    return Constraint.KV_MEMORY


@compiled
def alone_step_s(figures: Floats, own_s: float) -> float:
    """Time of a decode step of ``own_s`` without other decodes, with the stop before it."""
    return float(figures[FIXED_S] + figures[STOP_S] + own_s)


@compiled
def fits_alone(
    figures: Floats, work_s: float, own_s: float, ttft_s: float, tpot_s: float, headroom: float
) -> bool:
    """Whether an idle replica could meet the objective with ``headroom`` of each time left
    unused."""
    usable, fixed_s = 1.0 - headroom, figures[FIXED_S]
    in_time = fixed_s + work_s <= ttft_s * usable
    return in_time and alone_step_s(figures, own_s) <= tpot_s * usable


@compiled
def alone_constraint(figures: Floats, work_s: float, ttft_s: float, headroom: float) -> int:
    """Which constraint binds where :func:`fits_alone` does not hold."""
    if figures[FIXED_S] + work_s > ttft_s * (1.0 - headroom):
        return Constraint.TTFT
    return Constraint.TPOT


@compiled
def pace_wait_s(
    figures: Floats,
    loads: Floats,
    own_s: float,
    tpot_s: float,
    output_tokens: float,
    headroom: float,
) -> float:
    """Predicted time until all decodes can keep their TPOT together with a new one of ``own_s`` per
    step.

    Promised prefills already count as decodes. Outputs of ``output_tokens`` are assumed to end one
    after another, which frees their share of each second."""
    count, fixed_s = int(figures[LOADS]), figures[FIXED_S]
    shares = loads[count - 1, SHARES] if count > 0 else 0.0
    pace_s = figures[LOADS_PACE_S]
    taken = shares + own_s / tpot_s + max(0.0, fixed_s / tpot_s - fixed_s / pace_s)
    taken += figures[STOP_S] / min(tpot_s, figures[STOPPING_PACE_S])
    over = taken - (1.0 - headroom)
    if over <= 0.0:
        return 0.0
    return over / taken * output_tokens * min(tpot_s, pace_s)
