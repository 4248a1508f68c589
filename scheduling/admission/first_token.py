"""When a prompt that is placed on a replica would get its first token."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf

from scheduling.admission.room import LEAST_RATE
from scheduling.fleet_rows import (
    AHEAD_S,
    BEGUN_S,
    DECODE_S,
    FIXED_S,
    PACE_S,
    PREFILL_DUE_S,
    QUEUED,
    STEP_ENDS_S,
)
from scheduling.kernels import Floats, compiled


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
def ahead_of(figures: Floats, prefills: Floats, place: int) -> float:
    """Work of the first ``place`` prefills, seconds."""
    return prefills[place - 1, AHEAD_S] if place > 0 else 0.0


@compiled
def first_token_s(
    figures: Floats, prefills: Floats, work_s: float, now_s: float, due_s: float
) -> float:
    """Predicted time from now to its first token.

    The step under way ends; then batches take the prefills that are due no later, and it, each
    beside all decodes, as the engines do while nothing is late. A batch is as long as the least
    pace of the decodes lets it.
    """
    rest_s = max(0.0, figures[STEP_ENDS_S] - now_s)
    step_s = figures[FIXED_S] + figures[DECODE_S]
    ahead_s = ahead_of(figures, prefills, place_of(figures, prefills, due_s))
    room_s = inf
    if figures[PACE_S] < inf:
        room_s = max(figures[PACE_S] - step_s, LEAST_RATE * figures[PACE_S])
    share = 1.0 if room_s == inf else room_s / (room_s + step_s)
    done_s = max(0.0, min(now_s, figures[STEP_ENDS_S]) - figures[BEGUN_S]) * share
    left_s = max(0.0, ahead_s - done_s) + work_s
    batches = 1.0 if room_s == inf else ceil(left_s / room_s)
    return rest_s + left_s + batches * step_s
