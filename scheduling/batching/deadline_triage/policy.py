"""Deadline triage: meet the deadlines that can be met, and serve the rest with the time left."""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.assumptions import (
    GROWTH_TOKENS,
    LEAST_STEPS,
    PREFILL_SHARE,
    TTFT_SHARE,
    UNKNOWN_OUTPUT_TOKENS,
)
from sluice.scheduling.batching.aged_lane import LONGEST_STEPS, AgedLane
from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.batching.best_effort import victims
from sluice.scheduling.batching.deadline_triage.rows import (
    LEAST_TIMELY,
    blocks_needed,
    by_time_left,
    capacity_s,
    fit_beside,
    mean_prompt_s,
    mean_ttft_s,
    paces_of,
    time_left_s,
    timely_share,
)
from sluice.scheduling.batching.deadline_triage.selection import keep, sort_out
from sluice.scheduling.batching.prefill_share import least_useful_s
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    COMPUTED,
    EMITTED,
    FIRST_TOKEN,
    KV_BLOCKS,
    PENDING,
    PRIORITY,
    RUNNING,
    TTFT,
    Floats,
    Ints,
    compiled,
    is_prefill,
    pending_work_s,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"


def outranked(
    table: Floats, kept: Ints, shed: Ints, spare_s: Floats, room: int, block_tokens: int
) -> tuple[Ints, int]:
    """The prefills of ``shed`` to preempt so that the first of ``kept`` that waits for blocks can
    begin, and its place in ``kept``. They have begun, have no output, and would be late even
    alone. There are none if it fits as it is, or would not fit then either. ``O(kept + shed)``.

    As few as needed, and among single sufficient ones the one that loses least
    (:func:`~sluice.scheduling.batching.best_effort.victims`).

    Args:
        spare_s: per row, time left if it ran alone; negative if it would be late.
        room: KV blocks for prefills.
    """
    begun = shed[table[shed, RUNNING] > 0]
    begun = begun[(table[begun, EMITTED] == 0) & (spare_s[begun] < 0)]
    if not len(begun):
        return begun, 0
    place, needed = first_waiting(table, kept, block_tokens)
    missing, held = needed - room, table[begun, KV_BLOCKS]
    if place < 0 or missing <= 0 or held.sum() < missing:
        return begun[:0], 0
    return begun[victims(held, table[begun, COMPUTED], missing, 0)], place


@compiled
def first_waiting(table: Floats, kept: Ints, block_tokens: int) -> tuple[int, int]:
    """The place in ``kept`` of the first prefill that has not begun, -1 if all have, and the KV
    blocks that it needs beside all those that have."""
    first, blocks = -1, 0
    for place, row in enumerate(kept):
        waits = table[row, RUNNING] == 0.0
        if waits and first >= 0:
            continue
        upto = ceil((table[row, COMPUTED] + table[row, PENDING]) / block_tokens)
        blocks += max(0, upto - int(table[row, KV_BLOCKS]))
        if waits:
            first = place
    return first, blocks


# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"


Mask = NDArray[np.bool_]

STANDBY_PROMPTS = 2.0
"""The tail starts no output unless this many mean prompts could be prefilled in a mean TTFT."""

SPARE_PROMPTS = 2 * STANDBY_PROMPTS
"""From this many on it also starts any number of outputs that would all be late."""

LATE_SHARE = 0.1
"""Otherwise late requests have this share of the running sequences, but at least one sequence."""


class Limits(NamedTuple):
    """What bounds the start of shed prefills.

    Attributes:
        standby: mean prompts that could be prefilled in a mean TTFT beside the decodes.
        late: running decodes that are late.
        active: running sequences.
        reserve: share of the KV blocks and of the sequences that stays free.
    """

    standby: float
    late: int
    active: int
    reserve: float


def tail(
    batch: BatchBuilder,
    table: Floats,
    shed: Ints,
    running: Mask,
    left_s: Floats,
    work_s: Floats,
    limits: Limits,
) -> Ints:
    """The shed prefills that may run: those that have begun, as they hold memory, before those that
    wait; both by worth, descending: priority times
    :func:`~sluice.scheduling.batching.deadline_triage.rows.timely_share` over work.
    ``O(n log n)``."""
    space = (batch.free_blocks, batch.sequences_left, batch.block_tokens)
    timely = timely_share(table, shed, left_s, work_s)
    return startable(table, shed, running, timely, work_s, limits, space)


@compiled
def startable(
    table: Floats,
    shed: Ints,
    running: Mask,
    timely: Floats,
    work_s: Floats,
    limits: Limits,
    space: tuple[int, int, int],
) -> Ints:
    """The same, for :func:`tail`. Each prefill that begins takes time from every one that arrives
    while it decodes, so one whose output would all be late waits for its place.

    Args:
        running: per row, whether it has begun.
        timely: of each of ``shed``, the share of its output that can be on time.
        space: free KV blocks and sequences, and tokens per block.
    """
    free_blocks, sequences, block_tokens = space
    count = shed.shape[0]
    worth = np.empty(count)
    late = limits.late
    held = 0.0
    for row in range(table.shape[0]):
        if running[row]:
            held += table[row, KV_BLOCKS]
    for place, row in enumerate(shed):
        worth[place] = -table[row, PRIORITY] * timely[place] / max(work_s[row], 1e-9)
        if running[row] and timely[place] <= LEAST_TIMELY:
            late += 1
    room = free_blocks - limits.reserve * (free_blocks + held)
    places = sequences - int(limits.reserve * (sequences + limits.active))
    late_places = max(1, int(LATE_SHARE * limits.active)) - late
    needed = blocks_needed(table, shed, block_tokens)
    order = np.argsort(worth, kind="mergesort")
    chosen = np.empty(count, np.int64)
    taken = 0
    for begun in (True, False):
        for place in order:
            row = shed[place]
            if running[row] != begun:
                continue
            if not begun and limits.standby < SPARE_PROMPTS:
                if limits.standby < STANDBY_PROMPTS:
                    continue
                if timely[place] <= LEAST_TIMELY:
                    late_places -= 1
                    if late_places < 0:
                        continue
            if needed[place] > room:
                continue
            room -= needed[place]
            if not begun:
                places -= 1
                if places < 0:
                    continue
            chosen[taken] = row
            taken += 1
    return chosen[:taken]


_ONE_TOKEN: Floats = np.empty(0)
"""Each decode emits one token a step."""

TTFT_MEMORY_S = 60.0
"""How long a TTFT counts as recent, seconds after its request has left the queue."""

SPREADS = 2.0
"""The head-room is at least as many spreads of recent steps around their prediction: a step in 20
or so is longer than that, if the errors are noise."""

LONG_PROMPT = 0.125
"""Share of the KV blocks. The aged lane begins a longer prompt only when it can finish it: on the
lane's small share of the time it would hold its blocks for minutes."""

LONGER = 2.0
"""A batch that completes a prefill which would else be late may be longer than others by this
factor."""

MOST_HEADROOM = 0.35
"""Up to this share. Steps that cannot be predicted must not leave the engine idle."""


class DeadlineTriageOptions(PolicyOptions):
    """Options of :class:`DeadlineTriage`."""

    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start. `first_token` meets a TPOT since "
        "the first token, as mean or maximum; `envelope` is enough for TDG; `last_token` bounds "
        "the time between tokens and in short windows of tokens.",
    )
    headroom: float = Field(
        default=0.1,
        ge=0,
        le=0.5,
        description="Minimum share of every time budget that is left unused, in addition to the "
        "latency model's own head-room: step times vary around their prediction, the model has "
        "errors, and a TPOT measured as a maximum tolerates neither. It is larger while recent "
        "steps were further from their prediction.",
    )
    tail_backlog_s: float = Field(
        default=0.3,
        gt=0,
        le=3600,
        description="Backlog of shed prefills, seconds of work, up to which the tail gets its "
        "largest share of a batch; with a larger backlog its share shrinks in proportion.",
    )
    tail_reserve: float = Field(
        default=0.05,
        ge=0,
        le=0.9,
        description="Share of the KV blocks and of the sequences that the tail leaves free for "
        "requests whose deadlines can be met.",
    )
    patience_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="A shed request that has waited longer is aged, and served from `aged_share`.",
    )
    aged_share: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="Share of each batch's time, and of the running sequences, for aged requests "
        "in order of arrival.",
    )


class _Decodes(NamedTuple):
    """Decodes by deadline: rows, time left, work of one step each, the pace that each must keep
    (infinite if none is stated), and whether the deadline can still be met (``live``). Over the
    live decodes: the time budget, the minimum time left and the minimum pace."""

    rows: Ints
    left_s: Floats
    work_s: Floats
    pace_s: Floats
    live: Mask
    budget_s: float
    first_s: float
    least_pace_s: float

    def capacity_s(self, horizons_s: Floats, latency: LatencyModel) -> Floats:
        """Time for prefill within each of ``horizons_s``, ascending, if the decodes are delayed
        until their slack is spent."""
        return capacity_s(
            horizons_s,
            self.left_s,
            self.pace_s,
            self.work_s,
            latency.fixed_s,
            self.first_s,
            self.least_pace_s,
        )


class DeadlineTriage(BatchPolicy):
    """Keeps the prefills whose deadlines can be held together and sheds the others to a tail.

    ``O(n log n)``. Per batch:

    1. *Time budget*: the minimum slack of the decodes that can still be on time, at least their
       minimum TPOT, minus the head-room (FairBatching §3.2), which is the larger one of the option
       and twice the spread of recent steps around their prediction. Late decodes do not shrink it,
       except guaranteed ones that can be on time again when their expected output ends.
    2. *Triage*: prefills by deadline, kept by weighted Moore-Hodgson
       (:mod:`sluice.scheduling.batching.deadline_triage.selection`) against the time that is left
       for prefill until each deadline if decodes are delayed until their slack is spent (the
       prefill admission budget of FairBatching §3.4, from prefix sums over decodes by slack), then
       against the free sequences and KV blocks. A kept prefill without free blocks or a sequence
       waits for them. For the first of these to be due, shed prefills that have begun and would be
       late even alone are preempted, but not the one that the aged lane works on
       (:mod:`sluice.scheduling.batching.deadline_triage.policy`). Prefills whose deadline cannot
       be met are shed. Each batch decides again, so a shed request is kept once its deadline can be
       met. A late guaranteed prefill is not shed: it goes as far to the front as makes no kept
       prefill miss its deadline.
    3. *Order*: decodes that would be late if left out; the aged lane; kept prefills by deadline;
       the other decodes; the tail. The batch ends before the first kept prefill that it completes
       is due, and soon enough for a request that arrives in the meantime, except where another
       batch would make that prefill late. While the kept prefills
       can meet their deadlines beside all decodes, or blocks or sequences are short, all decodes
       come first: leaving one out then gains nothing and holds its memory longer.
    4. *Tail*: shed prefills (:mod:`sluice.scheduling.batching.deadline_triage.policy`): those that
       have begun, then the others, both by worth, descending: priority times the share of the
       output that can still be on time (a late first token is caught up with at twice the pace of
       its TPOT), over work. The tail gets 0.1 to 0.8 of the minimum TPOT in a batch, less with a
       larger backlog, and leaves a share of blocks and sequences free. A shed prefill starts only
       while the running decodes leave time for new prompts; while they leave little, only a few
       start whose output would all be late.
    5. *Ageing*: requests that are not kept and older than ``patience_s`` get ``aged_share`` of the
       time and of the running sequences, in order of arrival.
       :class:`~sluice.scheduling.batching.aged_lane.AgedLane` states the starvation bound. A decode
       that has been late for longer than ``patience_s`` is in every batch.

    Speculation (SLOs-Serve §3.2.3): a decode step that verifies drafts is due when the last of its
    expected tokens is due, takes the time of all verified tokens, and runs less often. So the time
    budget grows with the accepted tokens, and is short for decodes that fell behind.

    An end-to-end deadline becomes earlier deadlines for the tokens, by the expected length.
    Requests without any deadline belong to the tail, and are never late there. Decodes without TPOT
    are due one token per second.
    """

    name = "deadline_triage"
    source = (
        "ours; time budget and prefill capacity of FairBatching §3.2 and §3.4, "
        "selection by Moore (Management Science 1968)"
    )
    local_order = SLIDE
    Options = DeadlineTriageOptions

    def __init__(self, options: DeadlineTriageOptions | None = None) -> None:
        options = options or DeadlineTriageOptions()
        super().__init__(options)
        self._anchor = options.anchor
        self._headroom = options.headroom
        self._usable = 1 - options.headroom
        self._tail_backlog_s = options.tail_backlog_s
        self._tail_reserve = options.tail_reserve
        self._lane = AgedLane(options.patience_s, options.aged_share)
        self._least_ttft_s = inf
        self._least_seen_s = -inf

    def paced(self, queue: QueueView) -> Mask:
        """All rows: every decode sets the batch time."""
        return np.ones(len(queue), np.bool_)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Take urgent decodes, the aged lane, kept prefills, other decodes, then the tail."""
        table = queue.table
        if not len(table):
            return
        fixed_s = latency.fixed_s
        self._usable = 1 - max(self._headroom, min(SPREADS * latency.spread, MOST_HEADROOM))
        self._notice_ttft(float(table[:, TTFT].min()), now_s)
        work_s = pending_work_s(table, latency.pieces)
        prefill = is_prefill(table)
        left_s = time_left_s(table, prefill, work_s, self._anchor.code, now_s, fixed_s)
        output = _ONE_TOKEN
        if batch.lengths is not None:
            # A step that emits several tokens is due later, and has more work.
            lengths = batch.lengths.of(np.arange(len(table)))
            output = lengths.output
            left_s += lengths.credit_s
            work_s = np.maximum(work_s, lengths.work_s)
        decodes = self._decodes(table, ~prefill, left_s, work_s, latency, output)
        prefills = by_time_left(prefill, left_s)

        running = table[:, RUNNING] > 0
        active = int(np.count_nonzero(running))
        growth = active * GROWTH_TOKENS // batch.block_tokens + 1
        batch.spare(growth)
        kept, ordered, shed = self._triage(table, prefills, left_s, work_s, decodes, latency)
        punctual = len(ordered) == len(kept)
        left_out = shed if punctual else np.concatenate((np.setdiff1d(ordered, kept), shed))
        room = batch.free_blocks - growth
        aged, yielding, most_tokens = self._lane.aged(table, left_out, now_s), shed, inf
        if len(aged):
            blocks = batch.free_blocks + float(table[running, KV_BLOCKS].sum())
            most_tokens = LONG_PROMPT * blocks * batch.block_tokens
            aged = self._lane.in_turn(table, aged, most_tokens)
            yielding = shed[shed != self._lane.under_way(table, aged, latency, most_tokens)]
        gone = yielding[:0]
        if len(yielding) and len(ordered):
            spare_s = left_s - work_s - fixed_s
            gone, place = outranked(table, ordered, yielding, spare_s, room, batch.block_tokens)
        if len(gone):
            batch.evict(gone)
            room = batch.free_blocks - growth
            running[gone] = False
            active -= len(gone)
            aged, shed = aged[~np.isin(aged, gone)], shed[~np.isin(shed, gone)]
            begins = np.arange(len(ordered)) <= place
            ordered = ordered[begins | running[ordered]]
        step_s = fixed_s + float(decodes.work_s.sum())
        answer_s = UNKNOWN_OUTPUT_TOKENS * step_s / (len(decodes.rows) + 1)
        admissible = _admissible(
            table, ordered, batch.sequences_left, room, batch.block_tokens, work_s, answer_s
        )

        scarce = room < growth or batch.sequences_left < self._tail_reserve * len(table)
        urgent = len(decodes.rows)
        if not scarce and not fit_beside(
            kept, left_s, work_s, step_s, decodes.least_pace_s, self._usable
        ):
            urgent = int(np.searchsorted(decodes.left_s, decodes.budget_s + decodes.least_pace_s))
        _take_urgent(batch, decodes, urgent, bool(len(admissible)), self._lane.patience_s)

        on_time = None if punctual else np.isin(admissible, kept)
        until_s = self._until_s(batch, table, admissible, on_time, left_s, work_s, decodes, latency)
        if len(aged):
            answering = table[:, FIRST_TOKEN] - table[:, ARRIVAL] > self._lane.patience_s
            if np.count_nonzero(running & answering) >= self._lane.places(active):
                aged = aged[running[aged]]
        if len(aged):
            self._lane.take(batch, table, aged, now_s, latency, until_s, most_tokens)
        batch.take(admissible, until_s)
        batch.take(decodes.rows[urgent:], until_s)
        if len(shed):
            calm = not len(kept) and not decodes.live.any()
            tail_s = self._tail_s(work_s[shed], decodes, calm, left_s, latency)
            late = int(np.searchsorted(decodes.left_s, 0.0))
            standby = _standby(table, decodes, latency)
            # With nothing else to run, a prompt of nearly all blocks must not wait for its reserve.
            limits = Limits(standby, late, active, 0.0 if batch.empty else self._tail_reserve)
            rows = tail(batch, table, shed, running, left_s, work_s, limits)
            batch.take(rows, min(until_s, batch.cost_s + tail_s))
        if batch.empty:
            batch.spare(0)
            batch.ensure_progress(np.concatenate((decodes.rows, prefills)))

    def _notice_ttft(self, least_s: float, now_s: float) -> None:
        """Remember the minimum TTFT seen recently: the next request may state it, too."""
        if least_s <= self._least_ttft_s or now_s - self._least_seen_s > TTFT_MEMORY_S:
            self._least_ttft_s, self._least_seen_s = least_s, now_s

    def _decodes(
        self,
        table: Floats,
        decode: Mask,
        left_s: Floats,
        work_s: Floats,
        latency: LatencyModel,
        output: Floats,
    ) -> _Decodes:
        rows = by_time_left(decode, left_s)
        fixed_s = latency.fixed_s
        # One TPOT that leaves nothing for prefill must not set the budget of all requests, but
        # admission has checked that a guaranteed TPOT can be met.
        holdable_s = least_useful_s(fixed_s, latency)
        left_s, work_s, pace_s, live, (first_s, least_s, least_step_s) = paces_of(
            table, rows, left_s, work_s, output, fixed_s, holdable_s
        )
        budget_s = max(first_s, least_s) * self._usable
        return _Decodes(rows, left_s, work_s, pace_s, live, budget_s, first_s, least_step_s)

    def _triage(
        self,
        table: Floats,
        prefills: Ints,
        left_s: Floats,
        work_s: Floats,
        decodes: _Decodes,
        latency: LatencyModel,
    ) -> tuple[Ints, Ints, Ints]:
        """See :func:`~sluice.scheduling.batching.deadline_triage.selection.sort_out`."""
        ends_s = left_s[prefills]
        until_s = decodes.capacity_s(ends_s[: np.searchsorted(ends_s, inf)], latency)
        return sort_out(table, prefills, work_s, until_s, self._usable)

    def _until_s(
        self,
        batch: BatchBuilder,
        table: Floats,
        kept: Ints,
        punctual: Mask | None,
        left_s: Floats,
        work_s: Floats,
        decodes: _Decodes,
        latency: LatencyModel,
    ) -> float:
        """When the batch must end, seconds from now; it already has the urgent decodes.

        ``punctual``: which of the prefills ``kept`` are on time; ``None``: all."""
        longest_s = max(TTFT_SHARE * self._least_ttft_s, LEAST_STEPS * latency.fixed_s)
        if decodes.least_pace_s < inf:
            longest_s = max(longest_s, decodes.least_pace_s)
        until_s = min(decodes.budget_s, longest_s)
        if not len(kept):
            return until_s
        whole_s = batch.cost_s + float(work_s[kept[0]])
        if until_s < whole_s <= min(decodes.budget_s, LONGER * longest_s):
            # Another step would cost the first one its deadline.
            left_first_s = float(left_s[kept[0]])
            if whole_s <= left_first_s < whole_s + batch.cost_s:
                until_s = whole_s
        if until_s < inf:
            deepest = int(table[kept, COMPUTED].max())
            until_s = max(until_s, least_useful_s(batch.cost_s, latency, deepest))
        first = 0 if punctual is None else int(np.argmax(punctual))
        if punctual is not None and not punctual[first]:
            return until_s
        first_s = batch.cost_s + float(work_s[kept[: first + 1]].sum())
        if first_s <= until_s:
            # The batch completes the first one: more work must not make it late.
            until_s = min(until_s, max(self._usable * float(left_s[kept[first]]), first_s))
        return until_s

    def _tail_s(
        self,
        shed_s: Floats,
        decodes: _Decodes,
        calm: bool,
        left_s: Floats,
        latency: LatencyModel,
    ) -> float:
        """How much of the batch's time the tail may take."""
        if calm:
            # No request limits the batch: it is full if the queue has no deadline at all.
            deadlines = np.isfinite(left_s).any()
            return LONGEST_STEPS * latency.fixed_s if deadlines else inf
        share = min(0.8, max(0.1, self._tail_backlog_s / max(float(shed_s.sum()), 1e-9)))
        return share * min(decodes.least_pace_s, LONGEST_STEPS * latency.fixed_s)


def _admissible(
    table: Floats,
    kept: Ints,
    places: int,
    room: int,
    block_tokens: int,
    work_s: Floats,
    answer_s: float,
) -> Ints:
    """The requests of ``kept`` for which there are sequences and KV blocks now. If sequences are
    short, priority per time decides; if blocks are short, priority per block.

    ``answer_s`` is the engine time that one sequence takes for its output.
    """
    waiting = kept[table[kept, RUNNING] == 0]
    if len(waiting) > places:
        value = table[waiting, PRIORITY] / np.maximum(work_s[waiting] + answer_s, 1e-9)
        left_out = waiting[np.argsort(-value, kind="stable")[max(0, places) :]]
        kept = kept[~np.isin(kept, left_out)]
    blocks = blocks_needed(table, kept, block_tokens)
    if float(blocks.sum()) > room:
        kept = kept[keep(blocks, table[kept, PRIORITY], np.full(len(kept), float(room)))]
    return kept


def _standby(table: Floats, decodes: _Decodes, latency: LatencyModel) -> float:
    """How many prompts like those in the queue could meet their TTFT beside the decodes; infinite
    where there are none, or no TTFT is stated."""
    ttft_s = mean_ttft_s(table)
    if ttft_s == inf or not len(decodes.rows):
        return inf
    room_s = decodes.capacity_s(np.array([ttft_s]), latency)
    return float(room_s[0]) / max(mean_prompt_s(table, latency.pieces), 1e-9)


def _take_urgent(
    batch: BatchBuilder, decodes: _Decodes, urgent: int, prefills: bool, patience_s: float
) -> None:
    """Take the first ``urgent`` decodes: first those that can be on time or have been late for
    longer than ``patience_s``, then the other late ones, which leave prefills their share of the
    batch."""
    rows = decodes.rows[:urgent]
    first = decodes.live[:urgent] | (decodes.left_s[:urgent] < -patience_s)
    batch.take(rows[first])
    late = rows[~first]
    if len(late):
        cap_s = (1 - PREFILL_SHARE) * decodes.budget_s if prefills else inf
        batch.take(late, cap_s)
