"""An end-to-end time as a first token and a pace.

Admission and engines plan first tokens and paces. An end-to-end time says neither, so it is shared
out: ``TTFT + (tokens - 1) * TPOT`` is the end-to-end time, where ``tokens`` bounds the length of
the output. A replica that meets both meets the end-to-end time, if the output is no longer than
that.

How it is shared out is ours: both get as many times what a replica would take for them now, but
the first token no more than :data:`MOST_FIRST` times; the pace gets the rest. A pace is what costs
others' time, as each step of a decode has a fixed part, so slack is worth more there.

This is for guaranteed requests, where the length is a bound and the replicas' work is known. Code
that only expects a length, for requests without a guarantee, converts an end-to-end time by
:func:`sluice.scheduling.request.deadline.paced`.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_S, FIXED_S, PREFILL_S
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.kernels import Floats, Ints, compiled, most_work_s
from sluice.scheduling.request.objective import SLO

LEAST_SPARE = 1.25
"""The shares follow a replica's current load if it would end this many times sooner than required.
Otherwise they are those of an idle replica, so that admission can tell "never" from "not now"."""

MOST_FIRST = 2.0
"""The first token gets at most this many times its predicted time, so that slack goes to the
pace."""

LEAST_FIRST = 0.1
"""But at least this share of the whole time, where that is ample: a short prompt of a long answer
need not run at once, and may go to a busier replica."""

_LEAST_S = 1e-9


def shared_out(query: RouteQuery, tokens: float, fleet: Fleet, rows: Ints) -> SLO:
    """The objective of ``query`` with its end-to-end time shared out; itself where it states none.

    The shares are those of the replica that would end first. A TTFT or TPOT that is stated and
    tighter stays, and leaves the rest to the other. The end-to-end time itself is gone from the
    result: a replica that expects a longer output than ``tokens`` would make earlier deadlines of
    it than those that were guaranteed. ``O(rows)``, vectorised.

    Args:
        tokens: bound of the output's length, >= 1.
        fleet: what the replicas have to do.
        rows: of the fleet, those that may serve it; at least one.
    """
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    if e2e_s == inf:
        return query.slo
    later = max(0.0, tokens - 1.0)
    busy_s, busy_first_s, idle_s, idle_first_s = quickest(
        fleet.figures, fleet.pieces, rows, float(query.prompt_tokens), later
    )
    left_s = e2e_s - query.waited_s
    if left_s >= LEAST_SPARE * busy_s:
        first_s = min(left_s / busy_s, MOST_FIRST) * busy_first_s
        first = query.waited_s + max(first_s, LEAST_FIRST * left_s)
    else:
        first = min(e2e_s / idle_s, MOST_FIRST) * idle_first_s
    if not 0.0 < first < inf:
        # Of a model of extreme figures: what it cannot predict cannot be shared out.
        return query.slo
    if later == 0.0:
        return query.slo.with_times((min(ttft_s, e2e_s), query.slo.tpot_s, None))
    pace = (e2e_s - first) / later
    if ttft_s < first:
        first, pace = ttft_s, (e2e_s - ttft_s) / later
    if tpot_s < pace:
        pace, first = tpot_s, min(ttft_s, e2e_s - later * tpot_s)
    return query.slo.with_times((max(first, _LEAST_S), max(pace, _LEAST_S), None))


@compiled
def quickest(
    figures: Floats, pieces: Floats, rows: Ints, prompt_tokens: float, later: float
) -> tuple[float, float, float, float]:
    """The predicted time of the whole answer, ``later`` tokens behind the first one, at the replica
    that would end first, and of the first token there; then both as if all of them were idle.

    Nothing of the prompt counts as cached, and the context of the decode is that half-way through.
    """
    busy_s = idle_s = inf
    busy_first_s = idle_first_s = 0.0
    for row in rows:
        of = figures[row]
        first_s = of[FIXED_S] + most_work_s(pieces[row], max(1.0, prompt_tokens), 0.0)
        step_s = of[FIXED_S] + most_work_s(pieces[row], 1.0, prompt_tokens + 0.5 * later)
        whole_s = max(first_s + later * step_s, _LEAST_S)
        if whole_s < idle_s:
            idle_s, idle_first_s = whole_s, first_s
        first_s += of[PREFILL_S]
        whole_s = max(first_s + later * (step_s + of[DECODE_S]), _LEAST_S)
        if whole_s < busy_s:
            busy_s, busy_first_s = whole_s, first_s
    return busy_s, busy_first_s, idle_s, idle_first_s
