"""The minimum time budget of a batch in which prefill still makes progress.

A policy with a time budget derives it from the objectives of decodes. A TPOT hardly longer than the
decodes themselves would stop all prefill on the replica: one client's short TPOT would delay the
first tokens of all others, and would mostly be violated anyway, as the decodes' context grows. So
prefill keeps a share of each batch: a TPOT that cannot be met with that share does not set the
budget.

FairBatching §3.2 and ProServe §4.2 bound the budget from below by the minimum TPOT and by ``eta``;
neither covers a TPOT that is hardly longer than a step. This rule is ours; a share of 0 disables
it.
"""

from __future__ import annotations

from pydantic import Field

from sluice.scheduling.assumptions import PREFILL_SHARE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions


class PrefillShareOptions(PolicyOptions):
    """The option of policies that reserve a share of each batch for prefill."""

    prefill_share: float = Field(
        default=PREFILL_SHARE,
        ge=0,
        le=0.9,
        description="Minimum share of a batch's time that decodes leave to prefills; a TPOT that "
        "leaves less does not set the time budget. 0 is the literal paper: decodes can stop all "
        "prefill.",
    )


def least_useful_s(
    taken_s: float,
    latency: LatencyModel,
    computed_tokens: int = 0,
    share: float = PREFILL_SHARE,
) -> float:
    """Minimum time, seconds, of a batch in which prefill gets its share.

    ``taken_s`` is the predicted time of the batch without prefill, its fixed time included.
    ``computed_tokens`` is the number of tokens that the deepest prefill has computed: its next
    token reads all of them, so a share that counted only new tokens could be too short for any.
    ``O(1)``.
    """
    return (taken_s + latency.work_s(1, computed_tokens)) / (1 - share)
