"""The least time budget of a batch that still moves prefill on.

A policy with a time budget takes it from the objectives of decodes. An objective that leaves room
for little more than the decodes themselves would stop all prefill on the replica, and one client's
short TPOT would take the others' first tokens, mostly without being held: the decodes' context
grows. So prefill keeps a share of a batch: an objective that cannot be held with that share does
not set the budget.

FairBatching §3.2 and ProServe §4.2 bound the budget from below by the least TPOT and by ``eta``;
neither says what holds where a TPOT is hardly longer than a step. This rule is ours; a share of 0
leaves it out.
"""

from __future__ import annotations

from pydantic import Field

from scheduling.assumptions import PREFILL_SHARE
from scheduling.latency import LatencyModel
from scheduling.policy import PolicyOptions


class PrefillShareOptions(PolicyOptions):
    """The option of policies that leave prefill its share."""

    prefill_share: float = Field(
        default=PREFILL_SHARE,
        ge=0,
        le=0.9,
        description="Least share of a batch's time that decodes leave to prefills; a TPOT that "
        "leaves less does not set the time budget. 0 is the literal paper: decodes can stop all "
        "prefill.",
    )


def least_useful_s(
    taken_s: float,
    latency: LatencyModel,
    computed_tokens: int = 0,
    share: float = PREFILL_SHARE,
) -> float:
    """Least time, seconds, of a batch of which prefill gets its share.

    ``taken_s`` is the predicted time of the batch without prefill, its fixed time included, and
    ``computed_tokens`` what the deepest prefill has computed: its first token has to read all of
    that, so a share that counted only new tokens could be too short for any. ``O(1)``.
    """
    return (taken_s + latency.work_s(1, computed_tokens)) / (1 - share)
