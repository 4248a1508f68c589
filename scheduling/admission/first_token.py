"""When a prompt that is placed on a replica would get its first token."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, floor, inf

from sluice.scheduling.fleet.rows import (
    AHEAD_S,
    DECODE_S,
    DECODES,
    FIXED_S,
    PREFILL_DUE_S,
    PREFILL_S,
    QUEUED,
    STEP_ENDS_S,
    STEP_WORK_S,
    room_s,
)
from sluice.scheduling.request.kernels import Floats, compiled


@compiled
def place_of(figures: Floats, prefills: Floats, due_s: float) -> int:
    """How many guaranteed prefills are due no later. ``O(log n)``."""
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
    """Predicted time from now to its first token.

    Batches take prefills by deadline, each beside all guaranteed decodes, as ``deadline_triage``
    does while nothing is late. A token leaves with the end of its batch, which prefills that are
    due later fill up.
    """
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
