"""Prefill admission budget: whether a prompt still fits beside what is guaranteed."""

from __future__ import annotations

from math import inf

import numpy as np

from sluice.scheduling.admission.base import AdmissionPolicy, Promises
from sluice.scheduling.admission.constraint import Constraint
from sluice.scheduling.admission.first_token import first_tokens_s
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import FIXED_S, PROMISED, budgets_s, work_on
from sluice.scheduling.request.job import Job


class PABAdmission(AdmissionPolicy):
    """Guarantees a request whose prompt fits the prefill admission budget
    (:func:`~sluice.scheduling.fleet.rows.budgets_s`). ``O(replicas log n)``, with ``n`` requests at
    a replica.

    The paper predicts no time. The predicted TTFT is that of all policies here
    (:mod:`sluice.scheduling.admission.first_token`). The wait until the prompt fits is the time by
    which it exceeds the budget.

    Our readings:

    - The horizon is the request's own TTFT (§3.4), what is left of it.
    - All guaranteed prefills count, also those that are due later (A.6).
    - A late decode counts as due now: it already runs in each batch. A TPOT below the time of a
      step with that decode alone counts as that time: it cannot run more often.
    - A decode without a TPOT is never forced to run, so it takes nothing of the budget. A request
      without a TTFT has no horizon and always fits.
    """

    name = "pab"
    source = "FairBatching §3.4 (PAB admission)"

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Compare the prompt with each budget."""
        figures = fleet.figures[job.rows]
        left_s = job.due_s - job.now_s - job.lead_s
        budget_s = budgets_s(fleet.arrays, job.rows, job.now_s, job.now_s + left_s)
        if job.reserve_tokens > 0.0:
            nothing = np.zeros(len(job.rows))
            reserve_s = work_on(fleet.pieces, job.rows, job.reserve_tokens, nothing)
            budget_s = budget_s - reserve_s * (figures[:, PROMISED] > 0)
        lack_s = np.maximum(0.0, job.work_s - budget_s)
        holds = lack_s <= 0
        binds = np.where(holds, Constraint.NONE, Constraint.PREFILL_BUDGET).astype(np.int8)
        never = figures[:, FIXED_S] + job.work_s > left_s + job.query.waited_s
        wait_s = np.where(~holds & never, inf, lack_s)
        return Promises(
            holds, first_tokens_s(fleet.arrays, job.candidates, job.asked), wait_s, binds
        )
