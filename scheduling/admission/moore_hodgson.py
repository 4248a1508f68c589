"""Moore-Hodgson's test, with every promise made before forced in."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from scheduling.admission.base import AdmissionPolicy, Promises
from scheduling.fleet import Fleet
from scheduling.fleet_rows import (
    AHEAD_S,
    BEGUN_S,
    BLOCK_TOKENS,
    BLOCKS_PER_S,
    DECODE_S,
    FIXED_S,
    FREE_BLOCKS,
    GROWTH_TOKENS,
    LENT_BLOCKS,
    LENT_PLACES,
    LOAD_PACE_S,
    LOADS,
    MARGIN_S,
    NEEDED_BLOCKS,
    PACE_S,
    PLACES,
    PREFILL_DUE_S,
    QUEUED,
    RUNNING,
    SHARES,
    STEP_ENDS_S,
    capacity_s,
    pace_of,
)
from scheduling.job import Job
from scheduling.kernels import Floats, Ints, compiled, most_work_s
from scheduling.policy import PolicyOptions

MEMORY_HORIZON_S = 5.0
"""KV blocks that come free later than this do not count for a promise: nobody knows how long the
answers will really be."""

LEAST_RATE = 0.05
"""Least share of a replica's time that is left for prefill, for predictions."""


class MooreHodgsonOptions(PolicyOptions):
    """Options of :class:`MooreHodgson`."""

    headroom: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the time until each deadline that promises leave unused, and of each "
        "second that decodes do.",
    )


class MooreHodgson(AdmissionPolicy):
    """Promises what a replica can hold beside all that it was promised before.

    Moore-Hodgson's walk (:mod:`scheduling.batching.moore_hodgson`) adds the prefills up by deadline
    and drops some where the sum exceeds the capacity until a deadline, which is the prefill
    admission budget's (:mod:`scheduling.fleet_rows`). A promise may not be dropped, so for one new
    request the walk is a test: at its own deadline, and at every later one, the sum with it still
    fits. Beyond that, once it decodes, all decodes together must be held, and there must be KV
    blocks and a place for it, of which best-effort requests hold none that count.

    It takes the engines to serve promised prefills by deadline, as ``deadline_triage`` does.

    ``O(log n)`` a replica with ``n`` promised requests there, where the room at later deadlines is
    ample; else ``O(n)``.
    """

    name = "moore_hodgson"
    source = "ours; Moore (Management Science 1968) against the capacity of FairBatching appendix A"
    Options = MooreHodgsonOptions

    def __init__(self, options: MooreHodgsonOptions | None = None) -> None:
        options = options or MooreHodgsonOptions()
        super().__init__(options)
        self._headroom = options.headroom

    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """Test each replica."""
        query = job.query
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
                query.slo.columns[1],
                float(query.prompt_tokens),
                job.output_tokens,
                self._headroom,
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
    due_s: float,
    tpot_s: float,
    prompt_tokens: float,
    output_tokens: float,
    headroom: float,
) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """The test on each of ``rows``; what :class:`~scheduling.admission.base.Promises` holds."""
    holds = np.empty(rows.shape[0], np.bool_)
    ttft_s = np.empty(rows.shape[0])
    wait_s = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        of, model = figures[row], pieces[row]
        queue, decodes = prefills[starts[row] :], loads[starts[row] :]
        new_tokens = max(1.0, prompt_tokens - cached_tokens[place])
        late_s = max(
            late_by(of, queue, decodes, work_s[place], now_s, due_s, headroom),
            pace_lack_s(of, model, decodes, prompt_tokens, output_tokens, tpot_s, headroom),
            memory_lack_s(of, new_tokens, now_s, due_s),
            others_late_by(
                of, model, queue, decodes, work_s[place], now_s, due_s, tpot_s, prompt_tokens,
                headroom,
            ),
        )  # fmt: skip
        holds[place] = late_s <= 0.0
        wait_s[place] = max(0.0, late_s)
        ttft_s[place] = first_token_s(of, queue, work_s[place], now_s, due_s)
    return holds, ttft_s, wait_s


@compiled
def place_of(figures: Floats, prefills: Floats, due_s: float) -> int:
    """How many promised prefills are due no later. ``O(log n)``."""
    low, high = 0, int(figures[QUEUED])
    while low < high:
        middle = (low + high) // 2
        if prefills[middle, PREFILL_DUE_S] <= due_s:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def ahead_of(figures: Floats, prefills: Floats, place: int) -> float:
    """Work of the first ``place`` prefills, seconds."""
    return prefills[place - 1, AHEAD_S] if place > 0 else 0.0


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
    """By how much of work a new prefill misses its own deadline; not above 0: it does not."""
    if due_s == inf:
        return 0.0
    ahead_s = ahead_of(figures, prefills, place_of(figures, prefills, due_s))
    # What could be done by now is done, or was not there to do.
    start_s = max(ahead_s, capacity_s(figures, loads, now_s), 0.0)
    usable_s = now_s + (due_s - now_s) * (1.0 - headroom)
    late_s = start_s + work_s - capacity_s(figures, loads, usable_s)
    return max(late_s, max(now_s, figures[STEP_ENDS_S]) + work_s - usable_s)


@compiled
def others_late_by(
    figures: Floats,
    pieces: Floats,
    prefills: Floats,
    loads: Floats,
    work_s: float,
    now_s: float,
    due_s: float,
    tpot_s: float,
    prompt_tokens: float,
    headroom: float,
) -> float:
    """By how much of work it makes promised prefills miss that are due later.

    The least margin behind it tells most cases at once; only where that is short, each is looked
    at. One that is late already forbids nothing.
    """
    queued = int(figures[QUEUED])
    place = place_of(figures, prefills, due_s)
    if place >= queued:
        return 0.0
    share = 0.0
    if tpot_s < inf:
        own_s = most_work_s(pieces, 1.0, prompt_tokens)
        share = own_s / pace_of(tpot_s, figures[FIXED_S], own_s)
    last = queued - 1
    while last >= place and prefills[last, PREFILL_DUE_S] == inf:
        last -= 1
    if last < place:
        return 0.0
    last_s = prefills[last, PREFILL_DUE_S]
    most_s = work_s + share * (last_s - due_s) + headroom * (last_s - now_s)
    if prefills[place, MARGIN_S] >= most_s:
        return 0.0
    late_s = 0.0
    for item in range(place, last + 1):
        until_s = prefills[item, PREFILL_DUE_S]
        left_s = capacity_s(figures, loads, until_s) - prefills[item, AHEAD_S]
        if left_s >= 0.0:
            wanted_s = work_s + share * (until_s - due_s) + headroom * max(0.0, until_s - now_s)
            late_s = max(late_s, wanted_s - left_s)
    return late_s


@compiled
def pace_lack_s(
    figures: Floats,
    pieces: Floats,
    loads: Floats,
    prompt_tokens: float,
    output_tokens: float,
    tpot_s: float,
    headroom: float,
) -> float:
    """By how much of time all decodes together could not be held with it; infinite if it could not
    be held alone. Decodes leave at about the rate at which the promised ones end."""
    if tpot_s == inf:
        return 0.0
    own_s = most_work_s(pieces, 1.0, prompt_tokens)
    fixed_s = figures[FIXED_S]
    if fixed_s + own_s > tpot_s * (1.0 - headroom):
        return inf
    count = int(figures[LOADS])
    shares = loads[count - 1, SHARES] if count > 0 else 0.0
    pace_s = inf
    for load in range(count):
        pace_s = min(pace_s, loads[load, LOAD_PACE_S])
    shares += own_s / tpot_s + max(0.0, fixed_s / tpot_s - fixed_s / pace_s)
    over = shares - (1.0 - headroom)
    if over <= 0.0:
        return 0.0
    # The share of one decode comes free about every (its output * its pace / decodes).
    return over * output_tokens * tpot_s


@compiled
def memory_lack_s(figures: Floats, new_tokens: float, now_s: float, due_s: float) -> float:
    """After how long there may be KV blocks and a place for it; not above 0: there are."""
    block = figures[BLOCK_TOKENS]
    growth = ceil((figures[RUNNING] + figures[QUEUED]) * GROWTH_TOKENS / block) + 1.0
    wanted = figures[NEEDED_BLOCKS] + ceil(new_tokens / block) + growth
    rate = max(0.0, figures[BLOCKS_PER_S])
    later_s = min(MEMORY_HORIZON_S, max(0.0, due_s - now_s))
    lack = wanted - figures[FREE_BLOCKS] - figures[LENT_BLOCKS] - rate * later_s
    taken = figures[RUNNING] - figures[LENT_PLACES] + figures[QUEUED]
    if lack <= 0.0 and taken < figures[PLACES]:
        return 0.0
    return max(LEAST_RATE, lack / rate if rate > 0.0 and lack > 0.0 else MEMORY_HORIZON_S)


@compiled
def first_token_s(
    figures: Floats, prefills: Floats, work_s: float, now_s: float, due_s: float
) -> float:
    """Predicted time from now to its first token.

    The step under way ends; then batches take the prefills that are due no later, and it, each
    beside all decodes, as the engines do while nothing is late. A batch is as long as the least
    pace of the decodes lets it.
    """
    rest_s = max(0.0, figures[STEP_ENDS_S] - now_s)
    step_s = figures[FIXED_S] + figures[DECODE_S]
    ahead_s = ahead_of(figures, prefills, place_of(figures, prefills, due_s))
    room_s = inf
    if figures[PACE_S] < inf:
        room_s = max(figures[PACE_S] - step_s, LEAST_RATE * figures[PACE_S])
    share = 1.0 if room_s == inf else room_s / (room_s + step_s)
    done_s = max(0.0, min(now_s, figures[STEP_ENDS_S]) - figures[BEGUN_S]) * share
    left_s = max(0.0, ahead_s - done_s) + work_s
    batches = 1.0 if room_s == inf else ceil(left_s / room_s)
    return rest_s + left_s + batches * step_s
