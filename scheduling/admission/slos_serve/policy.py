"""SLOs-Serve's admission on the virtual replica: its dynamic program."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, floor, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.admission.base import AdmissionPolicy, Constraint, Promises
from sluice.scheduling.admission.room import (
    MIN_WAIT_S,
    alone_constraint,
    alone_step_s,
    claims_wait_s,
    first_token_s,
    fits_alone,
    pace_wait_s,
    reserve_at,
    room_constraint,
)
from sluice.scheduling.admission.slos_serve.dynamic_program import SLIP_S
from sluice.scheduling.admission.slos_serve.selection import (
    HORIZON_S,
    MIN_STEP_S,
    PlanDemand,
    Supply,
    admissible,
)
from sluice.scheduling.assumptions import PREFILL_SHARE
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import (
    BLOCK_TOKENS,
    CLAIMED_BLOCKS,
    DECODE_PACE_S,
    DECODE_SHARES,
    FIXED_S,
    FREE_BLOCKS,
    LEFT_S,
    LENT_BLOCKS,
    LOAD_PACE_S,
    LOADS,
    OWN_PACE_S,
    OWN_SHARE,
    PLACES,
    PREFILL_DUE_S,
    PROMISED,
    QUEUED,
    SPENT_UNTIL_S,
    STEP_SHARE,
    TOTAL_BLOCKS,
    FleetArrays,
    Prefill,
)
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.expected import claim
from sluice.scheduling.request.job import Job, Numbers
from sluice.scheduling.request.kernels import Floats, compiled, most_work_s
from sluice.scheduling.request.objective import Anchor


class SLOsServeAdmissionOptions(PolicyOptions):
    """Options of :class:`SLOsServeAdmission`."""

    headroom: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of each second that guarantees leave unused.",
    )
    batch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Token limit of a batch. It sets the time of a batch that no decode limits.",
    )
    anchor: Literal[Anchor.FIRST_TOKEN, Anchor.LAST_TOKEN] = Field(
        default=Anchor.LAST_TOKEN,
        description="The `anchor` of the replicas' policy. If that is `envelope`, use "
        "`first_token`; the replicas would guarantee slightly more.",
    )
    window_ms: float = Field(
        default=2.0,
        ge=0,
        le=100,
        description="How long a request waits at the controller for others that are decided "
        "together with it, ms. 0: no request waits, and the requests that a router sends in one "
        "message are decided together.",
    )


class SLOsServeAdmission(AdmissionPolicy):
    """Promises what SLOs-Serve's scheduler on a replica's mirrored state would admit (§4.2).

    For one new request the program (``selection``) is one walk over the promised prefills by
    deadline: with the request inserted, all must end in time, beside decodes that begin as their
    prefills end. ``O(n)`` for ``n`` promised requests; under ``last_token``, times the number of
    TPOTs that shorten the batches. ``select`` runs the program itself. Further readings:

    - All promises of a replica, and those on their way to it, are forced in; the virtual replica is
      the reported one advanced to now, by deadline.
    - Each request counts by the piece of the latency model that is costliest for it: with one piece
      this admits what the replica's own policy would, with several at most that.
    - A TPOT that the replica cannot keep even with that decode alone counts as the shortest that it
      can: one infeasible promise must not block all other requests. One that leaves prefill no
      useful share of a batch is not promised.
    - A new request claims the KV blocks of its whole expected output beside the peak of the
      reported promises (``request.expected.peak``); best-effort blocks count as free (§4.1)."""

    name = "slos_serve"
    source = "SLOs-Serve §3.2.1 and §4.2"
    Options = SLOsServeAdmissionOptions
    selects = True

    def __init__(self, options: SLOsServeAdmissionOptions | None = None) -> None:
        options = options or SLOsServeAdmissionOptions()
        super().__init__(options)
        self._headroom = options.headroom
        self._batch_tokens = float(options.batch_tokens)
        self._every_window = options.anchor is Anchor.LAST_TOKEN
        self._window_s = options.window_ms / 1e3

    @property
    def window_s(self) -> float:
        """The option ``window_ms``, in seconds."""
        return self._window_s

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Walk through the virtual replica of each row."""
        return Promises(
            *promises(
                fleet.arrays,
                job[1:],
                self._headroom,
                self._batch_tokens,
                self._every_window,
            )
        )

    def select(self, jobs: Sequence[Job], fleet: Fleet) -> NDArray[np.bool_]:
        """Run the program on the virtual replica; the cost is that of
        :func:`~sluice.scheduling.admission.slos_serve.selection.admissible`."""
        row, now_s, usable = int(jobs[0].rows[0]), jobs[0].now_s, 1.0 - self._headroom
        of, model, start = fleet.figures[row], fleet.pieces[row], int(fleet.starts[row])
        longest_s = of[FIXED_S] + most_work_s(model, self._batch_tokens, 0.0)
        least_s = least_tpot_s(of, model)
        total, block = float(of[TOTAL_BLOCKS]), float(of[BLOCK_TOKENS])
        asked, new = [], []
        for place, job in enumerate(jobs):
            tokens, tpot_s = float(job.query.prompt_tokens), job.tpot_s
            if tpot_s < least_s or ceil(tokens / block) >= total:
                continue
            own_s = most_work_s(model, 1.0, tokens)
            blocks = claim(tokens, job.output_tokens, 0.0, 0.0, block, total)
            value = float(job.query.slo.priority)
            asked.append(place)
            new.append((job.due_s - now_s, job.work_s[0], tpot_s, own_s, blocks, value))
        supply = Supply(
            np.array([of[FIXED_S] / usable]),
            np.ones(1),
            longest_s / usable,
            float(of[FREE_BLOCKS] + of[LENT_BLOCKS] - of[CLAIMED_BLOCKS]),
            int(of[PLACES] - of[PROMISED]),
            Anchor.LAST_TOKEN if self._every_window else Anchor.FIRST_TOKEN,
        )
        queue, decodes = fleet.prefills[start:], fleet.loads[start:]
        shares = (usable, self._every_window)
        spent = spent_on(of, queue, decodes, now_s, longest_s, shares)[:2]
        held = guaranteed(of, queue, decodes, now_s, spent, usable)
        chosen = np.zeros(len(jobs), np.bool_)
        chosen[asked] = admissible(demand_of(new, usable), demand_of(held, usable), supply)
        return chosen


Wanted = tuple[float, float, float, float, float, float]
"""Time until it is due, prefill, TPOT and decode step, seconds; KV blocks; value."""


def demand_of(wanted: Sequence[Wanted], usable: float) -> PlanDemand:
    """The demand of requests where a share ``usable`` of each second is."""
    columns = np.array(wanted, np.float64).reshape(len(wanted), 6).T
    due_s, prefill_s, tpot_s, decode_s, blocks, value = columns
    step_s = np.ascontiguousarray(decode_s[:, np.newaxis]) / usable
    return PlanDemand(due_s, prefill_s / usable, tpot_s, step_s, blocks, value)


def guaranteed(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    now_s: float,
    spent: tuple[int, float],
    usable: float,
) -> list[Wanted]:
    """What a virtual replica has promised, less the prefills ``spent`` since the report.
    ``O(prefills + loads)``."""
    ended, part_s = spent
    found: list[Wanted] = []
    # Loads include the later decodes of the prefills.
    later: Counter[tuple[float, float]] = Counter()
    for item, each in enumerate(prefills[: int(figures[QUEUED])]):
        share, pace_s = float(each[OWN_SHARE]), float(each[OWN_PACE_S])
        decode_s = share * pace_s if pace_s < inf else 0.0
        if pace_s < inf:
            later[share, pace_s] += 1
        left_s = 0.0 if item < ended else float(each[LEFT_S])
        if item == ended:
            left_s = max(0.0, left_s - part_s * usable)
        found.append((float(each[PREFILL_DUE_S]) - now_s, left_s, pace_s, decode_s, 0.0, 0.0))
    for each in loads[: int(figures[LOADS])]:
        share, pace_s = float(each[STEP_SHARE]), float(each[LOAD_PACE_S])
        if later[share, pace_s] > 0:
            later[share, pace_s] -= 1
        else:
            found.append((0.0, 0.0, pace_s, share * pace_s, 0.0, 0.0))
    return found


@compiled
def least_tpot_s(figures: Floats, pieces: Floats) -> float:
    """The least TPOT that a step with one decode holds beside prefills' share of its time."""
    return alone_step_s(figures, most_work_s(pieces, 1.0, 0.0)) / (1.0 - PREFILL_SHARE)


@compiled
def promises(
    fleet: FleetArrays,
    job: Numbers,
    headroom: float,
    batch_tokens: float,
    every_window: bool,
) -> tuple[NDArray[np.bool_], Floats, Floats, NDArray[np.int8]]:
    """Walk each replica of ``job``; return the fields of
    :class:`~sluice.scheduling.admission.base.Promises`."""
    (
        rows, _, all_work_s, lead_s, all_splits, now_s, job_due_s, waited_s, job_tpot_s, priority,
        prompt_tokens, output_tokens, moved, reserve_tokens, _,
    ) = job  # fmt: skip
    count = rows.shape[0]
    holds = np.empty(count, np.bool_)
    ttft_s, wait_s = np.empty(count), np.empty(count)
    binds = np.zeros(count, np.int8)
    figures, pieces, starts, prefills, loads, _ = fleet
    for place in range(count):
        row, splits, work_s = rows[place], all_splits[place], all_work_s[place]
        of, model = figures[row], pieces[row]
        queue, decodes = prefills[starts[row] :], loads[starts[row] :]
        own_s = most_work_s(model, 1.0, prompt_tokens)
        due_s = job_due_s - lead_s[place]
        tpot_s = inf if splits else job_tpot_s
        tokens = 1.0 if splits else output_tokens
        longest_s = of[FIXED_S] + most_work_s(model, batch_tokens, 0.0)
        all_s, step_s = work_s, own_s
        kept = reserve_at(of, reserve_tokens)
        if kept > 0.0:
            all_s += most_work_s(model, kept, 0.0)
            step_s += most_work_s(model, 1.0, kept)
        new = Prefill(all_s, due_s, tpot_s, priority, step_s)
        late_s, late_binds = late_by(
            of, queue, decodes, new, now_s, longest_s, (1.0 - headroom, every_window)
        )
        room_s = claims_wait_s(of, prompt_tokens, tokens, kept)
        useful = tpot_s >= least_tpot_s(of, model)
        holds[place] = useful and late_s <= 0.0 and room_s == 0.0
        wait_s[place] = 0.0
        if not holds[place]:
            if late_s == inf:
                late_s = pace_wait_s(of, decodes, step_s, tpot_s, output_tokens, headroom)
            wait_s[place] = max(MIN_WAIT_S, late_s, room_s)
            # Of several constraints, the one with the longest wait binds.
            binds[place] = room_constraint(of) if room_s > late_s else late_binds
            fresh_s = due_s - now_s + waited_s
            if not (useful and fits_alone(of, work_s, own_s, fresh_s, tpot_s, headroom)):
                wait_s[place] = inf
                binds[place] = alone_constraint(of, work_s, fresh_s, headroom)
        ttft_s[place] = first_token_s(of, queue, work_s, now_s, due_s)
        if not moved:
            ttft_s[place] += lead_s[place]
    return holds, ttft_s, wait_s, binds


@compiled
def rate_of(fixed_s: float, pace_s: float, share: float) -> float:
    """Seconds of prefill per second beside decodes that take ``share`` of it, in batches of
    ``pace_s``: ``PB*`` in its fluid limit."""
    return 1.0 - fixed_s / max(pace_s, MIN_STEP_S) - share


@compiled
def limit_s(due_s: float, now_s: float) -> float:
    """Time until a deadline, as the program counts it."""
    return min(max(due_s - now_s, 0.0), HORIZON_S)


@compiled
def share_of(own_s: float, pace_s: float, step_s: float, every_window: bool) -> float:
    """Share of each second of a decode that needs ``own_s`` every ``pace_s``. With ``every_window``
    it runs in every ``floor(pace_s / step_s)``-th batch, to be in time in each window."""
    if every_window:
        pace_s = max(1.0, floor(pace_s / step_s + 1e-9)) * step_s
    return own_s / pace_s


@compiled
def decode_share(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    begun: int,
    step_s: float,
    every_window: bool,
) -> float:
    """Share of each second of the current decodes and of the decodes of the first ``begun``
    prefills. ``loads`` includes all prefills. ``O(loads)``."""
    share = 0.0
    for load in range(int(figures[LOADS])):
        pace_s = loads[load, LOAD_PACE_S]
        share += share_of(loads[load, STEP_SHARE] * pace_s, pace_s, step_s, every_window)
    for item in range(begun, int(figures[QUEUED])):
        pace_s = prefills[item, OWN_PACE_S]
        if pace_s < inf:
            share -= share_of(prefills[item, OWN_SHARE] * pace_s, pace_s, step_s, every_window)
    return share


@compiled
def begin(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    item: int,
    share: float,
    step_s: float,
    every_window: bool,
) -> tuple[float, float]:
    """The share of all decodes, and the time of a batch, once the decode of prefill ``item``
    begins. If it shortens the batches, ``every_window`` recomputes the shares of all decodes."""
    pace_s = prefills[item, OWN_PACE_S]
    if pace_s == inf:
        return share, step_s
    if pace_s < step_s and every_window:
        return decode_share(figures, prefills, loads, item + 1, pace_s, True), pace_s
    own_s = prefills[item, OWN_SHARE] * pace_s
    return share + share_of(own_s, pace_s, step_s, every_window), min(step_s, pace_s)


@compiled
def spent_on(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    now_s: float,
    longest_s: float,
    shares: tuple[float, bool],
) -> tuple[int, float, float, float]:
    """How many promised prefills have ended since the report, how long the next one has run,
    seconds, the share of all decodes, and the time of a batch."""
    usable, every_window = shares
    fixed_s = figures[FIXED_S] / usable
    pace_s = max(MIN_STEP_S, min(figures[DECODE_PACE_S], longest_s / usable))
    share = figures[DECODE_SHARES]
    if every_window:
        share = decode_share(figures, prefills, loads, 0, pace_s, True)
    item, part_s = 0, 0.0
    gone_s = max(0.0, now_s - figures[SPENT_UNTIL_S])
    while item < int(figures[QUEUED]):
        rate = rate_of(fixed_s, pace_s, share / usable)
        need_s = prefills[item, LEFT_S] / usable
        if rate <= 0.0 or need_s > gone_s * rate:
            part_s = max(0.0, gone_s * rate)
            break
        gone_s -= need_s / rate
        share, pace_s = begin(figures, prefills, loads, item, share, pace_s, every_window)
        item += 1
    return item, part_s, share, pace_s


@compiled
def late_by(
    figures: Floats,
    prefills: Floats,
    loads: Floats,
    new: Prefill,
    now_s: float,
    longest_s: float,
    shares: tuple[float, bool],
) -> tuple[float, int]:
    """By how many seconds the new request or a promised one is late in the walk (0 or less: none;
    infinite: the decodes are too slow), and the constraint that binds. ``longest_s``: time of a
    batch that no decode limits."""
    work_s, due_s, tpot_s, _, own_s = new
    usable, every_window = shares
    fixed_s, queued = figures[FIXED_S] / usable, int(figures[QUEUED])
    item, part_s, share, pace_s = spent_on(figures, prefills, loads, now_s, longest_s, shares)
    time_s = fixed_s
    while item < queued and prefills[item, PREFILL_DUE_S] <= due_s:
        rate = rate_of(fixed_s, pace_s, share / usable)
        time_s += (prefills[item, LEFT_S] / usable - part_s) / rate if rate > 0.0 else inf
        part_s = 0.0
        share, pace_s = begin(figures, prefills, loads, item, share, pace_s, every_window)
        item += 1
    rate = rate_of(fixed_s, pace_s, share / usable)
    if rate <= 0.0:
        return inf, Constraint.TPOT
    time_s += work_s / usable / rate
    late_s = time_s - limit_s(due_s, now_s)
    if late_s > SLIP_S:
        return late_s, Constraint.TTFT
    # From here on, ``alone`` excludes the new request's decode; ``own`` is that decode's share.
    alone, alone_pace_s, own = share, pace_s, 0.0
    if tpot_s < inf:
        tpot_s = max(tpot_s, MIN_STEP_S)
        if tpot_s < pace_s:
            pace_s = tpot_s
            if every_window:
                share = decode_share(figures, prefills, loads, item, pace_s, True)
        own = share_of(own_s, tpot_s, pace_s, every_window)
    rate = rate_of(fixed_s, pace_s, (share + own) / usable)
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
        shorter = prefills[item, OWN_PACE_S] < pace_s
        share, pace_s = begin(figures, prefills, loads, item, share, pace_s, every_window)
        if shorter and tpot_s < inf:
            own = share_of(own_s, tpot_s, pace_s, every_window)
        alone, alone_pace_s = begin(
            figures, prefills, loads, item, alone, alone_pace_s, every_window
        )
        rate = rate_of(fixed_s, pace_s, (share + own) / usable)
        # Decodes that could not keep their pace without the new request block nothing.
        if rate < min(0.0, rate_of(fixed_s, alone_pace_s, alone / usable)) - SLIP_S:
            return inf, Constraint.TPOT
        item += 1
    return 0.0, Constraint.NONE
