"""The tail of a batch of :mod:`sluice.scheduling.batching.deadline_triage.policy`: which shed
prefills run in the time that is left."""

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
from sluice.scheduling.batching.deadline_triage.selection import fitting
from sluice.scheduling.request.kernels import KV_BLOCKS, PRIORITY, Floats, Ints

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
    wait; both by worth, descending: priority times :func:`timely_share` over work.
    ``O(n log n)``."""
    timely = timely_share(table, shed, left_s, work_s)
    worth = table[shed, PRIORITY] * timely / np.maximum(work_s[shed], 1e-9)
    order = np.lexsort((-worth, ~running[shed]))
    rows, hopeless = shed[order], timely[order] <= LEAST_TIMELY
    rows = rows[_startable(running[rows], hopeless, limits)]
    blocks = batch.free_blocks + float(table[running, KV_BLOCKS].sum())
    room = batch.free_blocks - limits.reserve * blocks
    rows = rows[fitting(blocks_needed(table, rows, batch.block_tokens), room)]
    sequences = batch.sequences_left + limits.active
    places = batch.sequences_left - int(limits.reserve * sequences)
    waiting = ~running[rows]
    fitted: Ints = rows[~waiting | (np.cumsum(waiting) <= places)]
    return fitted


def _startable(begun: Mask, hopeless: Mask, limits: Limits) -> Mask:
    """Which prefills have begun or may begin. Each one that begins takes time from every prefill
    that arrives while it decodes, so one whose output would all be late waits for its place."""
    if limits.standby < STANDBY_PROMPTS:
        return begun
    if limits.standby >= SPARE_PROMPTS:
        return np.ones(len(begun), np.bool_)
    late = limits.late + int(np.count_nonzero(begun & hopeless))
    places = max(1, int(LATE_SHARE * limits.active)) - late
    return begun | ~hopeless | (np.cumsum(~begun & hopeless) <= places)
