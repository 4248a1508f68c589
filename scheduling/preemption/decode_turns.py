"""When decodes have a step of their own while prefills run, each in a task of its own."""

from __future__ import annotations

from math import inf

from sluice.scheduling.request.kernels import Floats


def decode_step_due_s(
    last_token_s: Floats, tpot_s: Floats, step_s: float, gap_s: float, stop_s: float = 0.0
) -> float | None:
    """When a step of all decodes has to begin, so that each has its next token one TPOT after its
    last one; None without decodes. ``O(decodes)``.

    FlowPrefill §6.5 runs both phases at once on one device; here they take turns.

    Args:
        last_token_s: when each emitted its last token, ``[decodes]``.
        tpot_s: the TPOT of each, seconds.
        step_s: predicted time of the step.
        gap_s: time from the last token to the step for a decode without a TPOT, or with one that is
            not longer than the step and the stop: no step could hold it, and prefills would starve.
        stop_s: how long it takes until the running prefill has stopped for the step.
    """
    if not len(last_token_s):
        return None
    gaps_s = tpot_s - step_s - stop_s
    gaps_s[~((gaps_s > 0) & (gaps_s < inf))] = gap_s
    return float((last_token_s + gaps_s).min())
