"""Prefill admission budget: whether a prompt still fits beside what is promised."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.admission.base import AdmissionPolicy, Constraint, Promises
from sluice.scheduling.admission.room import first_token_s, fits_alone, reserve_at
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import FleetArrays, budget_s
from sluice.scheduling.request.job import Job, Numbers
from sluice.scheduling.request.kernels import Floats, compiled, most_work_s


class PABAdmission(AdmissionPolicy):
    """Promises a request whose prompt fits the prefill admission budget (``rows.budget_s``).
    ``O(replicas log n)``, with ``n`` requests at a replica.

    Our readings: the horizon is what is left of the request's own TTFT (§3.4), without a TTFT it
    always fits; all promised prefills count, also those due later (A.6); a late decode counts as
    due now; a TPOT below the time of a step with that decode alone counts as that time; a decode
    without a TPOT takes nothing."""

    name = "pab"
    source = "FairBatching §3.4 (PAB admission)"

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Compare the prompt with each budget."""
        return Promises(*promises(fleet.arrays, job[1:]))


@compiled
def promises(
    fleet: FleetArrays, job: Numbers
) -> tuple[NDArray[np.bool_], Floats, Floats, NDArray[np.int8]]:
    """Test each replica of ``job``; return the fields of
    :class:`~sluice.scheduling.admission.base.Promises`."""
    (
        rows, _, all_work_s, lead_s, _, now_s, job_due_s, waited_s, _, _, _, _, moved,
        reserve_tokens, _,
    ) = job  # fmt: skip
    figures, pieces, starts, all_prefills, all_loads, _ = fleet
    count = rows.shape[0]
    holds, binds = np.empty(count, np.bool_), np.zeros(count, np.int8)
    ttft_s, wait_s = np.empty(count), np.zeros(count)
    for place in range(count):
        row, work_s, due_s = rows[place], all_work_s[place], job_due_s - lead_s[place]
        of, start = figures[row], starts[row]
        prefills, loads = all_prefills[start:], all_loads[start:]
        left_s = budget_s(of, prefills, loads, now_s, due_s) - work_s
        kept = reserve_at(of, reserve_tokens)
        if kept > 0.0:
            left_s -= most_work_s(pieces[row], kept, 0.0)
        holds[place] = left_s >= 0.0
        if not holds[place]:
            binds[place] = Constraint.PREFILL_BUDGET
            fresh_s = due_s - now_s + waited_s
            wait_s[place] = -left_s if fits_alone(of, work_s, 0.0, fresh_s, inf, 0.0) else inf
        ttft_s[place] = first_token_s(of, prefills, work_s, now_s, due_s)
        if not moved:
            ttft_s[place] += lead_s[place]
    return holds, ttft_s, wait_s, binds
