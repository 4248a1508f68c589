"""Prefill admission budget: how many more prompt tokens a replica can take and meet its SLOs.

Source: FairBatching §3.4 and appendix A, whose formulas the numbered steps follow.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.admission.base import AdmissionPolicy, Promises
from sluice.scheduling.admission.constraint import Constraint
from sluice.scheduling.admission.first_token import first_tokens_s
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import PAB, PROMISED
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.job import Job
from sluice.scheduling.request.kernels import (
    DECODE_CONTEXT,
    DECODE_SEQUENCE,
    FIXED,
    PREFILL_TOKENS,
    Floats,
    compiled,
    needs_prefill,
    next_due_s,
)
from sluice.scheduling.request.objective import Anchor


class PABAdmission(AdmissionPolicy):
    """Guarantees a request whose prompt fits the prefill admission budget. ``O(replicas)``.

    The paper predicts no time. The predicted TTFT is that of all policies here
    (:mod:`sluice.scheduling.admission.first_token`). The wait until the prompt fits is the time to
    prefill the tokens above the budget.
    """

    name = "pab"
    source = "FairBatching §3.4 (PAB admission)"

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Compare the prompt with each budget."""
        figures = fleet.figures[job.rows]
        new_tokens = np.maximum(1.0, job.query.prompt_tokens - job.cached_tokens)
        budget = figures[:, PAB]
        if job.reserve_tokens > 0.0:
            budget = budget - job.reserve_tokens * (figures[:, PROMISED] > 0)
        lack = np.maximum(0.0, new_tokens - budget)
        ttft_s = first_tokens_s(fleet.arrays, job.candidates, job.asked)
        holds = lack <= 0
        binds = np.where(holds, Constraint.NONE, Constraint.PREFILL_BUDGET).astype(np.int8)
        return Promises(holds, ttft_s, lack * job.work_s / new_tokens, binds)


def pab_tokens(
    slack_s: Floats,
    tpot_s: Floats,
    context_tokens: Floats,
    prefill_tokens: float,
    latency: LatencyModel,
    ttft_s: float,
) -> float:
    """Prompt tokens that can still be prefilled within ``ttft_s``; negative if already too many.

    Every decode is assumed to be delayed until its slack is spent. The paper has one TPOT for all
    and uses the decode with the least slack; with several TPOTs, we use the decode that forces the
    most steps. With a model of several pieces, the result is the minimum over the pieces.
    ``O(decodes)`` per piece.

    Args:
        slack_s: per decode, time until its next token is due, seconds; may be infinite.
        tpot_s: per decode, its TPOT, seconds, positive and finite.
        context_tokens: per decode, its context.
        prefill_tokens: tokens still to prefill, of every request at the replica.
        latency: the replica's model; its terms for the square and the context of prefill tokens are
            ignored, as in the paper.
        ttft_s: the horizon, seconds: the TTFT that the replica should meet.
    """
    # Steps 2 and 3: how often each decode must run within the horizon.
    steps = np.maximum(0.0, (ttft_s - slack_s) / tpot_s)
    most_steps = float(steps.max(initial=0.0)) + 1.0
    budget = inf
    for piece in latency.pieces:
        decode_s = float(steps @ _decode_s(piece, context_tokens))
        # Steps 1 and 4: what is left of the horizon.
        left_s = ttft_s - float(piece[FIXED]) * most_steps - decode_s
        # Step 5: a fresh prompt's context is itself. Step 6: less what is queued.
        per_token_s = float(piece[PREFILL_TOKENS])
        if per_token_s > 0:
            budget = min(budget, left_s / per_token_s - prefill_tokens)
        elif left_s <= 0:
            budget = -inf
    return budget


def _decode_s(piece: Floats, context_tokens: Floats) -> Floats:
    """Work of decodes with ``context_tokens`` of context, the new token included."""
    work: Floats = piece[DECODE_SEQUENCE] + piece[DECODE_CONTEXT] * (context_tokens - 1.0)
    return work


@compiled
def rows_due_s(rows: Any, anchor: int) -> tuple[NDArray[np.bool_], Floats]:
    """Of each of ``rows``, of dtype :data:`sluice.scheduling.fleet.state.ROW`, whether it is a
    prefill and when its next token is due. Rows do not hold when the last token left."""
    prefill, due_s = np.empty(rows.shape[0], np.bool_), np.empty(rows.shape[0])
    for place in range(rows.shape[0]):
        row = rows[place]
        prefill[place] = needs_prefill(row.emitted_tokens, row.pending_tokens)
        due_s[place] = next_due_s(
            row.emitted_tokens,
            row.arrival_s,
            row.ttft_s,
            row.tpot_s,
            row.e2e_s,
            row.first_token_s,
            nan,
            anchor,
        )
    return prefill, due_s


def replica_pab_tokens(
    rows: np.ndarray,
    now_s: float,
    latency: LatencyModel,
    reference_ttft_s: float,
    reference_tpot_s: float,
    anchor: Anchor = Anchor.FIRST_TOKEN,
) -> float:
    """:func:`pab_tokens` of a replica's live requests.

    Our readings, so that no single request can make the budget meaningless:

    - A late decode counts as due now: it already runs in each batch.
    - A TPOT below the time of a step with that decode alone counts as that time: it cannot run
      more often.
    - A decode without TPOT counts as running every ``reference_tpot_s``, first in one such
      interval.

    Args:
        rows: live requests, of dtype :data:`sluice.scheduling.fleet.state.ROW`.
        now_s: the time on the rows' clock.
        latency: the replica's model, corrected.
        reference_ttft_s: the horizon, seconds.
        reference_tpot_s: pace of decodes that state no TPOT, seconds.
        anchor: where the deadlines of later tokens start.
    """
    prefill, due_s = rows_due_s(rows, anchor.code)
    prefill_tokens = float(rows["pending_tokens"][prefill].sum())
    decodes = rows[~prefill]
    context: Floats = decodes["computed_tokens"].astype(np.float64) + 1.0
    tpot: Floats = decodes["tpot_s"].astype(np.float64)
    slack: Floats = np.maximum(0.0, due_s[~prefill] - now_s)
    unpaced = np.isinf(tpot)
    slack[unpaced] = reference_tpot_s
    tpot[unpaced] = reference_tpot_s
    for piece in latency.pieces:
        np.maximum(tpot, piece[FIXED] + _decode_s(piece, context), out=tpot)
    return pab_tokens(slack, tpot, context, prefill_tokens, latency, reference_ttft_s)
