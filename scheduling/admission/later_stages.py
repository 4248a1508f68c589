"""Capacity for the prompts of later stages of guaranteed requests, such as tool results.

A later stage is guaranteed when its request arrives, and cannot be rejected when it begins. Its
start time is unknown, so capacity is reserved for the expected prefill within each time. The
request states the prompts of its stages.

Ours; SLOs-Serve §3.2.1 plans a multi-stage request as if its tightest stage never ended.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

from sluice.scheduling.fleet.rows import DECODE_PACE_S, FIXED_S, LATER_S, LOADS, SHARES
from sluice.scheduling.request.kernels import Floats, compiled, most_work_s


@compiled
def later_work_s(figures: Floats, within_s: float) -> float:
    """Expected prefill of later stages within a time, seconds."""
    return figures[LATER_S] * max(0.0, within_s) if within_s < inf else 0.0


@compiled
def later_late_by(
    figures: Floats,
    pieces: Floats,
    loads: Floats,
    later: Floats,
    prompt_tokens: float,
    headroom: float,
) -> float:
    """By how much work, seconds, a later stage of a new request misses its deadline if later stages
    of other requests begin too; 0 or less if none does. ``O(stages)``.

    Args:
        later: ``float64[n, 2]``, for each later stage its new prompt tokens and its TTFT, seconds.
        prompt_tokens: tokens of the request before the first later stage.
    """
    late_s, count = 0.0, int(figures[LOADS])
    shares = loads[count - 1, SHARES] if count > 0 else 0.0
    for stage in range(later.shape[0]):
        within_s = later[stage, 1] * (1.0 - headroom)
        if within_s < inf:
            work_s = most_work_s(pieces, later[stage, 0], prompt_tokens)
            # Each decode's next token is still to come: its work spreads over the whole time.
            decode_s = shares * max(0.0, within_s - figures[DECODE_PACE_S])
            room_s = within_s - decode_s - figures[FIXED_S]
            late_s = max(late_s, work_s + later_work_s(figures, within_s) - room_s)
        prompt_tokens += later[stage, 0]
    return late_s
