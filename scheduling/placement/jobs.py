"""When a request is due, and what it takes of the replica where it is placed."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.scheduling.fleet.ledger import Reservation
from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.job import Job, RouteQuery
from sluice.scheduling.request.stages import later_of


def reservation_of(job: Job, chosen: int, ids: Sequence[str], promised: bool) -> Reservation:
    """The reservation of a job at its replica number ``chosen``.

    Args:
        ids: replica of each row of the fleet.
        promised: whether it counts like a guaranteed request.
    """
    query = job.query
    cached = float(job.cached_tokens[chosen])
    new = max(1.0, query.prompt_tokens - cached)
    later = later_of(query.slo.stages, 0)
    return Reservation(
        ids[job.rows[chosen]],
        job.now_s,
        promised,
        new,
        cached,
        query.prompt_tokens if job.moved else new,
        job.due_s,
        job.tpot_s,
        float(query.slo.priority),
        job.output_tokens,
        later_stages=later.stages,
        later_tokens=later.tokens,
    )


def first_due_s(query: RouteQuery, now_s: float, output_tokens: float) -> float:
    """When its first token is due: by its TTFT, and early enough that the expected output ends by
    its end-to-end objective."""
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    return now_s - query.waited_s + paced(ttft_s, tpot_s, e2e_s, output_tokens)[0]
