"""A request on replicas that could serve it: when it is due, and what it takes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.ledger import Reservation
from sluice.scheduling.fleet.rows import KV_ANSWER_S, work_on
from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.job import Job, RouteQuery
from sluice.scheduling.request.kernels import Floats, Ints
from sluice.scheduling.request.stages import later_of


def job_of(
    fleet: Fleet,
    query: RouteQuery,
    rows: Ints,
    now_s: float,
    output_tokens: float,
    kv_transfer_s: float | None = None,
    moved: bool = False,
) -> Job:
    """The query on ``rows``, with ``output_tokens`` expected.

    Args:
        kv_transfer_s: time from the end of its prompt on a prefill replica to its first token on
            another one; ``None``: prefill replicas among them would serve it whole.
        moved: see :class:`~sluice.scheduling.request.job.Job`.
    """
    moved = moved or query.brings_kv
    if moved:
        cached = np.full(len(rows), max(0.0, query.prompt_tokens - 1.0))
        work_s = work_on(fleet.pieces, rows, float(query.prompt_tokens), cached)
        lead_s = np.zeros(len(rows))
    else:
        cached, work_s, lead_s = prefill_of(fleet, query, rows)
    due_s = first_due_s(query, now_s, output_tokens)
    splits = np.zeros(len(rows), np.bool_)
    if query.brings_kv:
        lead_s[:] = fleet.transfer.seconds(query.prompt_tokens)
    if kv_transfer_s is not None:
        splits = fleet.are(rows, "prefill")
        lead_s[splits] = kv_transfer_s
    return Job(query, now_s, rows, cached, work_s, due_s, output_tokens, lead_s, splits, moved)


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


def prefill_of(fleet: Fleet, query: RouteQuery, rows: Ints) -> tuple[Floats, Floats, Floats]:
    """What a prompt costs on each of ``rows``: the tokens that need not be computed, the time of
    its prefill, and the time before it in which KV is looked for elsewhere, and loaded from the
    memory of the host, seconds.

    Loading takes no compute, so it delays only this prompt. It is counted where the prompt is done
    earlier with it than if the tokens were computed.
    """
    # The edge's count of the prompt is an estimate, too.
    prompt = float(query.prompt_tokens)
    cached = np.minimum(fleet.cached_tokens(query.prefix, rows), prompt)
    work_s, load_s = work_on(fleet.pieces, rows, prompt, cached), fleet.figures[rows, KV_ANSWER_S]
    if len(fleet.prefixes.hosted):
        hosted, token_s = fleet.prefixes.hosted_tokens(query.prefix, rows)
        loaded = np.maximum(np.minimum(hosted, prompt) - cached, 0.0)
        less_s = work_on(fleet.pieces, rows, prompt, cached + loaded)
        pays = (loaded > 0) & (loaded * token_s + less_s < work_s)
        cached[pays] += loaded[pays]
        work_s[pays] = less_s[pays]
        load_s[pays] += (loaded * token_s)[pays]
    return cached, work_s, load_s


def first_due_s(query: RouteQuery, now_s: float, output_tokens: float) -> float:
    """When its first token is due: by its TTFT, and early enough that the expected output ends by
    its end-to-end objective."""
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    return now_s - query.waited_s + paced(ttft_s, tpot_s, e2e_s, output_tokens)[0]
