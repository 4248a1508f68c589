"""The tail of a batch of :mod:`sluice.scheduling.batching.deadline_triage.policy`: which shed
prefills run in the time that is left."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.batching.deadline_triage.rows import (
    LEAST_TIMELY,
    blocks_needed,
    timely_share,
)
from sluice.scheduling.request.kernels import KV_BLOCKS, PRIORITY, Floats, Ints, compiled

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
