"""Which prefills of :mod:`sluice.scheduling.batching.deadline_triage.policy` give their KV blocks
to one that can be on time."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil

from sluice.scheduling.batching.best_effort import victims
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    KV_BLOCKS,
    PENDING,
    RUNNING,
    Floats,
    Ints,
    compiled,
)


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
