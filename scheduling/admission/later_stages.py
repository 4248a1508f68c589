"""Room for the prompts that enter promised requests with later stages, such as tools' answers.

Such a stage is promised when its request comes, and cannot be turned away when it begins. When that
is, nobody knows, so room is kept for what is expected within each time. The prompts are those that
the request stated.

Ours; SLOs-Serve §3.2.1 plans a multi-stage request as if its tightest stage went on for ever.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

from scheduling.fleet_rows import DECODE_PACE_S, FIXED_S, LATER_S, LOADS, SHARES
from scheduling.kernels import Floats, compiled, most_work_s


@compiled
def later_work_s(figures: Floats, within_s: float) -> float:
    """Prefill of later stages that is expected within a time, seconds."""
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
    """By how much of work a later stage of a new request misses its deadline where those of others
    begin, too; not above 0: none does. ``O(stages)``.

    Args:
        later: ``float64[n, 2]``, of each of them the tokens that enter and the TTFT, seconds.
        prompt_tokens: what is there before.
    """
    late_s, count = 0.0, int(figures[LOADS])
    shares = loads[count - 1, SHARES] if count > 0 else 0.0
    for stage in range(later.shape[0]):
        within_s = later[stage, 1] * (1.0 - headroom)
        if within_s < inf:
            work_s = most_work_s(pieces, later[stage, 0], prompt_tokens)
            # What decodes has its next token ahead of it: its work is spread over the whole time.
            decode_s = shares * max(0.0, within_s - figures[DECODE_PACE_S])
            room_s = within_s - decode_s - figures[FIXED_S]
            late_s = max(late_s, work_s + later_work_s(figures, within_s) - room_s)
        prompt_tokens += later[stage, 0]
    return late_s
