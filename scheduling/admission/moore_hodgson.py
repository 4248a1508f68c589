"""Moore-Hodgson's test, with every earlier promise forced in."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.admission.base import AdmissionPolicy, Constraint, Promises
from sluice.scheduling.admission.room import (
    MIN_WAIT_S,
    alone_constraint,
    first_token_s,
    fits_alone,
    pace_wait_s,
    place_of,
    reserve_at,
    room_constraint,
    room_wait_s,
)
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import (
    DECODE_PACE_S,
    FIXED_S,
    LATER_S,
    LEFT_AHEAD_S,
    LOAD_DUE_S,
    LOAD_PACE_S,
    LOADS,
    MARGIN_S,
    MIN_RATE,
    PREFILL_DUE_S,
    PROMISED,
    QUEUED,
    SHARES,
    STEP_ENDS_S,
    FleetArrays,
    Prefill,
    capacity_s,
    pace_of,
    spare_s,
)
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import NO_LATER, Job, Numbers
from sluice.scheduling.request.kernels import Floats, compiled, most_work_s

# Capacity for the prompts of later stages of guaranteed requests, such as tool results.
#
# A later stage is guaranteed when its request arrives, and cannot be rejected when it begins. Its
# start time is unknown, so capacity is reserved for the expected prefill within each time. The
# request states the prompts of its stages.
#
# Ours; SLOs-Serve §3.2.1 plans a multi-stage request as if its tightest stage never ended.


@compiled
def later_work_s(figures: Floats, within_s: float) -> float:
    """Expected prefill of later stages within a time, seconds."""
    return figures[LATER_S] * max(0.0, within_s) if within_s < inf else 0.0


@compiled
def later_late_by(
    figures: Floats,
    pieces: Floats,
    loads: Floats,
    later: Floats,
    prompt_tokens: float,
    headroom: float,
) -> float:
    """By how much work, seconds, a later stage of a new request misses its deadline if later stages
    of other requests begin too; 0 or less if none does. ``later`` is ``float64[n, 2]``, of each its
    new prompt tokens and its TTFT, seconds. ``O(stages)``."""
    late_s, count = 0.0, int(figures[LOADS])
    shares = loads[count - 1, SHARES] if count > 0 else 0.0
    for stage in range(later.shape[0]):
        within_s = later[stage, 1] * (1.0 - headroom)
        if within_s < inf:
            work_s = most_work_s(pieces, later[stage, 0], prompt_tokens)
            # Each decode's next token is still to come: its work spreads over the whole time.
            decode_s = shares * max(0.0, within_s - figures[DECODE_PACE_S])
            room_s = within_s - decode_s - figures[FIXED_S]
            late_s = max(late_s, work_s + later_work_s(figures, within_s) - room_s)
        prompt_tokens += later[stage, 0]
    return late_s


class MooreHodgsonOptions(PolicyOptions):
    """Options of :class:`MooreHodgson`."""

    headroom: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the time until each deadline, and of each second of decoding, that "
        "guarantees leave unused.",
    )


class MooreHodgson(AdmissionPolicy):
    """Promises an objective that a replica can meet together with all its earlier promises.

    Moore-Hodgson's walk (``batching.deadline_triage``) sums prefills by deadline and drops some
    where the sum exceeds the capacity; a promised prefill may not be dropped, so for a new request
    the walk is a test at its own deadline and every later one. All decodes together must keep their
    time per token, and KV blocks and a sequence slot must be free, those of best-effort requests
    included.

    The work of expected requests that come later, are due earlier and have more priority per second
    of work must fit too, so a long prompt does not take the capacity of many short ones: trunk
    reservation (Key, *Optimal control and trunk reservation in loss networks*, 1990) with deadlines
    in place of circuits. Assumes engines that serve promised prefills by deadline. ``O(log n)`` for
    ``n`` promised requests where capacity is ample, else ``O(n log n)``."""

    name = "moore_hodgson"
    source = "ours; Moore (Management Science 1968) against the capacity of FairBatching appendix A"
    Options = MooreHodgsonOptions

    def __init__(self, options: MooreHodgsonOptions | None = None) -> None:
        options = options or MooreHodgsonOptions()
        super().__init__(options)
        self._headroom = options.headroom

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Test each replica."""
        later = job.later if job.query.slo.stages else NO_LATER
        return Promises(*promises(fleet.arrays, job[1:], later, self._headroom))


@compiled
def promises(
    fleet: FleetArrays, job: Numbers, later: Floats, headroom: float
) -> tuple[NDArray[np.bool_], Floats, Floats, NDArray[np.int8]]:
    """Test each replica of ``job``; return the fields of
    :class:`~sluice.scheduling.admission.base.Promises`."""
    (
        rows, all_cached, all_work_s, lead_s, all_splits, now_s, job_due_s, waited_s, job_tpot_s,
        priority, prompt_tokens, output_tokens, moved, reserve_tokens, job_overtaking_s,
    ) = job  # fmt: skip
    count = rows.shape[0]
    holds = np.empty(count, np.bool_)
    ttft_s, wait_s = np.empty(count), np.empty(count)
    binds = np.zeros(count, np.int8)
    all_figures, all_pieces, starts, prefills, loads, _ = fleet
    for place in range(count):
        row, splits, work_s = rows[place], all_splits[place], all_work_s[place]
        of, pieces = all_figures[row], all_pieces[row]
        queue, decodes = prefills[starts[row] :], loads[starts[row] :]
        own_s = most_work_s(pieces, 1.0, prompt_tokens)
        due_s = job_due_s - lead_s[place]
        tpot_s = inf if splits else job_tpot_s
        all_s, step_s = work_s, own_s
        kept = reserve_at(of, reserve_tokens)
        if kept > 0.0:
            all_s += most_work_s(pieces, kept, 0.0)
            step_s += most_work_s(pieces, 1.0, kept)
        # An idle replica keeps nothing for others.
        overtaking_s = job_overtaking_s if of[PROMISED] > 0.0 else 0.0
        all_s += later_work_s(of, due_s - now_s) + overtaking_s
        own_late_s = late_by(of, queue, decodes, all_s, now_s, due_s, headroom)
        if not splits:
            later_s = later_late_by(of, pieces, decodes, later, prompt_tokens, headroom)
            own_late_s = max(own_late_s, later_s)
        new = Prefill(all_s, due_s, tpot_s, priority, step_s)
        others_late_s = others_late_by(of, queue, decodes, new, now_s, headroom)
        late_s = max(own_late_s, others_late_s)
        slow_s = 0.0
        if tpot_s < inf:
            slow_s = pace_wait_s(of, decodes, step_s, tpot_s, output_tokens, headroom)
        new_tokens = prompt_tokens if moved else max(1.0, prompt_tokens - all_cached[place])
        room_s = room_wait_s(of, prompt_tokens, new_tokens, now_s, due_s - work_s, kept)
        fresh_s = due_s - now_s + waited_s
        alone = fits_alone(of, work_s, own_s, fresh_s, tpot_s, headroom)
        holds[place] = alone and max(late_s, slow_s, room_s) <= 0.0
        wait_s[place] = 0.0
        if not alone:
            wait_s[place] = inf
            binds[place] = alone_constraint(of, work_s, fresh_s, headroom)
        elif not holds[place]:
            loaded = int(of[LOADS])
            rate = 1.0 - decodes[loaded - 1, SHARES] if loaded > 0 else 1.0
            others_only = overtaking_s > 0.0 and max(late_s - overtaking_s, slow_s, room_s) <= 0.0
            late_s /= max(rate, MIN_RATE)
            wait_s[place] = max(MIN_WAIT_S, late_s, slow_s, room_s)
            # Of several constraints, the one with the longest wait binds.
            if others_only:
                binds[place] = Constraint.OVERTAKING
            elif room_s >= max(late_s, slow_s):
                binds[place] = room_constraint(of)
            elif slow_s >= late_s:
                binds[place] = Constraint.TPOT
            elif own_late_s >= others_late_s:
                binds[place] = Constraint.TTFT
            else:
                binds[place] = Constraint.GUARANTEES
        ttft_s[place] = first_token_s(of, queue, work_s, now_s, due_s)
        if not moved:
            ttft_s[place] += lead_s[place]
    return holds, ttft_s, wait_s, binds


@compiled
def late_by(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    work_s: float,
    now_s: float,
    due_s: float,
    headroom: float,
) -> float:
    """By how much work, seconds, a new prefill misses its own deadline; 0 or less if it does
    not."""
    if due_s == inf:
        return 0.0
    place = place_of(figures, prefills, due_s)
    ahead_s = prefills[place - 1, LEFT_AHEAD_S] if place > 0 else 0.0
    usable_s = now_s + (due_s - now_s) * (1.0 - headroom)
    late_s = work_s - spare_s(figures, loads, ahead_s, now_s, usable_s)
    begins_s = max(now_s, figures[STEP_ENDS_S]) + figures[FIXED_S]
    return max(late_s, begins_s + work_s - usable_s)


@compiled
def others_late_by(
    figures: Floats, prefills: Floats, loads: Floats, new: Prefill, now_s: float, headroom: float
) -> float:
    """By how much work, seconds, a new prefill makes later promised prefills miss their deadlines.

    A prefill that is late already blocks nothing. Head-room is capacity in the last part of the
    time, as for the new prefill: if existing promises kept more than they were admitted with, the
    last ones due would block all new requests."""
    work_s, due_s, tpot_s, _, own_s = new
    queued, count = int(figures[QUEUED]), int(figures[LOADS])
    place = place_of(figures, prefills, due_s)
    last = queued - 1
    while last >= place and prefills[last, PREFILL_DUE_S] == inf:
        last -= 1
    if last < place:
        return 0.0
    fixed_s = figures[FIXED_S]
    new_pace_s = pace_of(tpot_s, fixed_s, own_s)
    last_s = prefills[last, PREFILL_DUE_S]
    begins_s = due_s + tpot_s
    most_s = work_s + (own_s + fixed_s) / new_pace_s * max(0.0, last_s - begins_s)
    if prefills[place, MARGIN_S] >= most_s + headroom * (last_s - now_s):
        return 0.0
    late_s = more_s = 0.0
    load, pace_s = 0, inf
    while load < count and loads[load, LOAD_DUE_S] <= begins_s:
        pace_s = min(pace_s, loads[load, LOAD_PACE_S])
        load += 1
    at_s = begins_s
    for item in range(place, last + 1):
        until_s = prefills[item, PREFILL_DUE_S]
        while at_s < until_s:
            next_s = min(until_s, loads[load, LOAD_DUE_S]) if load < count else until_s
            share = own_s / new_pace_s + max(0.0, fixed_s / new_pace_s - fixed_s / pace_s)
            more_s += share * (next_s - at_s)
            at_s = next_s
            while load < count and loads[load, LOAD_DUE_S] <= at_s:
                pace_s = min(pace_s, loads[load, LOAD_PACE_S])
                load += 1
        ahead_s = prefills[item, LEFT_AHEAD_S]
        if ahead_s <= capacity_s(figures, loads, until_s):
            usable_s = until_s - headroom * max(0.0, until_s - now_s)
            room_s = capacity_s(figures, loads, usable_s)
            late_s = max(late_s, ahead_s + work_s + more_s - room_s)
    return late_s
