"""SLOs-Serve's admission on the virtual replica: its dynamic program for one new request."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from scheduling.admission.base import AdmissionPolicy, Promises
from scheduling.admission.constraint import Constraint
from scheduling.admission.first_token import first_token_s
from scheduling.admission.room import (
    LEAST_WAIT_S,
    alone_constraint,
    fits_alone,
    pace_wait_s,
    reserve_at,
    room_constraint,
    room_wait_s,
)
from scheduling.admission.slos_serve import HORIZON_S, LEAST_STEP_S
from scheduling.admission.slos_serve_dp import SLIP_S
from scheduling.fleet import Fleet
from scheduling.fleet_rows import (
    DECODE_PACE_S,
    DECODE_SHARES,
    FIXED_S,
    LEFT_S,
    OWN_PACE_S,
    OWN_SHARE,
    PREFILL_DUE_S,
    QUEUED,
    SPENT_UNTIL_S,
)
from scheduling.job import Job
from scheduling.kernels import Floats, Ints, compiled, most_work_s
from scheduling.policy import PolicyOptions


class VirtualReplicaOptions(PolicyOptions):
    """Options of :class:`VirtualReplica`."""

    headroom: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of each second that promises leave unused.",
    )
    batch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Token limit of a batch: its time is that of a batch whose length no decode "
        "sets.",
    )


class VirtualReplica(AdmissionPolicy):
    """Promises what SLOs-Serve's scheduler on a replica's mirrored state would admit (§4.2).

    For one new request the program (:mod:`scheduling.admission.slos_serve`) has two states, without
    it and with it, and so is one walk over the promised prefills by deadline: the request joins in
    its place, and then everybody must end in time, beside decodes that begin as their prefills end.
    It admits what :func:`~scheduling.admission.slos_serve.admissible` admits, whose readings hold
    here, and these:

    - All promises that a replica has, and those on their way to it, are forced in.
    - The virtual replica is the reported one moved on to now: what has gone by since the report was
      spent on its prefills by deadline.
    - Each request counts by the piece of the latency model that is costliest for it.
    - A pace that the replica cannot hold even with that decode alone counts as the pace that it
      can: one impossible promise must not forbid all others.
    - TPOT objectives are all told apart: a sum over the decodes needs no tiers. Deadlines of later
      tokens start with the first token.
    - KV blocks and places are counted as all admission policies here do
      (:mod:`scheduling.admission.room`): best-effort requests' count as free (§4.1).

    ``O(n)`` a replica with ``n`` promised prefills there.
    """

    name = "slos_serve"
    source = "SLOs-Serve §3.2.1 and §4.2"
    Options = VirtualReplicaOptions

    def __init__(self, options: VirtualReplicaOptions | None = None) -> None:
        options = options or VirtualReplicaOptions()
        super().__init__(options)
        self._headroom = options.headroom
        self._batch_tokens = float(options.batch_tokens)

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Walk through the virtual replica of each row."""
        return Promises(
            *promises(
                fleet.figures,
                fleet.pieces,
                fleet.starts,
                fleet.prefills,
                fleet.loads,
                job.rows,
                job.work_s,
                job.cached_tokens,
                job.now_s,
                job.due_s,
                job.query.waited_s,
                job.query.slo.columns[1],
                float(job.query.prompt_tokens),
                job.output_tokens,
                self._headroom,
                self._batch_tokens,
                job.lead_s,
                job.splits,
                job.moved,
                job.reserve_tokens,
            )
        )


@compiled
def promises(
    figures: Floats,
    pieces: Floats,
    starts: Ints,
    prefills: Floats,
    loads: Floats,
    rows: Ints,
    work_s: Floats,
    cached_tokens: Floats,
    now_s: float,
    first_due_s: float,
    waited_s: float,
    asked_tpot_s: float,
    prompt_tokens: float,
    output_tokens: float,
    headroom: float,
    batch_tokens: float,
    lead_s: Floats,
    splits: NDArray[np.bool_],
    moved: bool,
    reserve_tokens: float,
) -> tuple[NDArray[np.bool_], Floats, Floats, NDArray[np.int8]]:
    """The walk on each of ``rows``; what :class:`~scheduling.admission.base.Promises` holds."""
    holds = np.empty(rows.shape[0], np.bool_)
    ttft_s = np.empty(rows.shape[0])
    wait_s = np.empty(rows.shape[0])
    binds = np.zeros(rows.shape[0], np.int8)
    for place, row in enumerate(rows):
        of, model, queue = figures[row], pieces[row], prefills[starts[row] :]
        own_s = most_work_s(model, 1.0, prompt_tokens)
        due_s = first_due_s - lead_s[place]
        tpot_s = inf if splits[place] else asked_tpot_s
        longest_s = of[FIXED_S] + most_work_s(model, batch_tokens, 0.0)
        all_s, step_s = work_s[place], own_s
        kept = reserve_at(of, reserve_tokens)
        if kept > 0.0:
            all_s += most_work_s(model, kept, 0.0)
            step_s += most_work_s(model, 1.0, kept)
        late_s, late_binds = late_by(
            of, queue, all_s, now_s, due_s, tpot_s, step_s, longest_s, 1.0 - headroom
        )
        new_tokens = prompt_tokens if moved else max(1.0, prompt_tokens - cached_tokens[place])
        room_s = room_wait_s(of, prompt_tokens, new_tokens, now_s, due_s - work_s[place], kept)
        holds[place] = late_s <= 0.0 and room_s == 0.0
        wait_s[place] = 0.0
        if not holds[place]:
            if late_s == inf:
                decodes = loads[starts[row] :]
                late_s = pace_wait_s(of, decodes, step_s, tpot_s, output_tokens, headroom)
            wait_s[place] = max(LEAST_WAIT_S, late_s, room_s)
            # Of several, the one that lasts longest.
            binds[place] = room_constraint(of) if room_s > late_s else late_binds
            fresh_s = due_s - now_s + waited_s
            if not fits_alone(of, work_s[place], own_s, fresh_s, tpot_s, headroom):
                wait_s[place] = inf
                binds[place] = alone_constraint(of, work_s[place], fresh_s, headroom)
        ttft_s[place] = first_token_s(of, queue, work_s[place], now_s, due_s)
    return holds, ttft_s, wait_s, binds


@compiled
def rate_of(fixed_s: float, pace_s: float, share: float) -> float:
    """Seconds of prefill per second beside decodes that take ``share`` of it, in batches of
    ``pace_s``: ``PB*`` in its fluid limit."""
    return 1.0 - fixed_s / max(pace_s, LEAST_STEP_S) - share


@compiled
def limit_s(due_s: float, now_s: float) -> float:
    """Time until a deadline, as the program counts it."""
    return min(max(due_s - now_s, 0.0), HORIZON_S)


@compiled
def late_by(
    figures: Floats,
    prefills: Floats,
    work_s: float,
    now_s: float,
    due_s: float,
    tpot_s: float,
    own_s: float,
    longest_s: float,
    usable: float,
) -> tuple[float, int]:
    """By how much time a new request, or a promised one with it, is late in the walk; not above 0:
    nobody is; infinite: with it the decodes could not be held. Beside it, which constraint that is.

    Args:
        figures, prefills: of the replica.
        work_s: of its prefill; ``own_s`` of a step of its decode.
        now_s: the time.
        due_s, tpot_s: its objectives.
        longest_s: time of a batch where no decode sets it.
        usable: share of each second that promises may use.
    """
    fixed_s = figures[FIXED_S] / usable
    share, pace_s = figures[DECODE_SHARES] / usable, min(figures[DECODE_PACE_S], longest_s / usable)
    queued, item, part_s = int(figures[QUEUED]), 0, 0.0
    gone_s = max(0.0, now_s - figures[SPENT_UNTIL_S])
    while item < queued:
        rate = rate_of(fixed_s, pace_s, share)
        need_s = prefills[item, LEFT_S] / usable
        if rate <= 0.0 or need_s > gone_s * rate:
            part_s = max(0.0, gone_s * rate)
            break
        gone_s -= need_s / rate
        share += prefills[item, OWN_SHARE] / usable
        pace_s = min(pace_s, prefills[item, OWN_PACE_S])
        item += 1
    time_s = fixed_s
    while item < queued and prefills[item, PREFILL_DUE_S] <= due_s:
        rate = rate_of(fixed_s, pace_s, share)
        time_s += (prefills[item, LEFT_S] / usable - part_s) / rate if rate > 0.0 else inf
        part_s = 0.0
        share += prefills[item, OWN_SHARE] / usable
        pace_s = min(pace_s, prefills[item, OWN_PACE_S])
        item += 1
    rate = rate_of(fixed_s, pace_s, share)
    if rate <= 0.0:
        return inf, Constraint.TPOT
    time_s += work_s / usable / rate
    late_s = time_s - limit_s(due_s, now_s)
    if late_s > SLIP_S:
        return late_s, Constraint.TTFT
    alone_share, alone_pace_s = share, pace_s
    if tpot_s < inf:
        share += own_s / usable / max(tpot_s, LEAST_STEP_S)
        pace_s = min(pace_s, tpot_s)
    rate = rate_of(fixed_s, pace_s, share)
    if rate < -SLIP_S:
        return inf, Constraint.TPOT
    while item < queued:
        if rate <= 0.0:
            return inf, Constraint.TPOT
        time_s += (prefills[item, LEFT_S] / usable - part_s) / rate
        part_s = 0.0
        late_s = time_s - limit_s(prefills[item, PREFILL_DUE_S], now_s)
        if late_s > SLIP_S:
            return late_s, Constraint.GUARANTEES
        own_share, own_pace_s = prefills[item, OWN_SHARE] / usable, prefills[item, OWN_PACE_S]
        share, pace_s = share + own_share, min(pace_s, own_pace_s)
        alone_share, alone_pace_s = alone_share + own_share, min(alone_pace_s, own_pace_s)
        rate = rate_of(fixed_s, pace_s, share)
        # What could not be held without it forbids nothing.
        if rate < min(0.0, rate_of(fixed_s, alone_pace_s, alone_share)) - SLIP_S:
            return inf, Constraint.TPOT
        item += 1
    return 0.0, Constraint.NONE
