"""What the expected length of an output makes of a request: a pace, and a claim on memory.

Admission and the replicas must read both in the same way: what one guarantees the other is to hold.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf

import numpy as np

from sluice.scheduling.kernels import (
    E2E,
    EMITTED,
    KV_BLOCKS,
    PROMPT,
    TPOT,
    TTFT,
    Floats,
    compiled,
)


@compiled
def paced(ttft_s: float, tpot_s: float, e2e_s: float, tokens: float) -> tuple[float, float]:
    """The TTFT and the TPOT, seconds, that hold an end-to-end objective, too, with an output of
    ``tokens``; those stated where none is stated.

    The first token comes as much earlier than its TTFT as the others need at their TPOT, but it has
    half of the whole time at least. What is left is for the others.
    """
    later = tokens - 1.0
    if e2e_s == inf:
        return ttft_s, tpot_s
    if later <= 0.0:
        return min(ttft_s, e2e_s), tpot_s
    latest_s = e2e_s - later * tpot_s
    first_s = min(ttft_s, max(e2e_s / 2.0, latest_s))
    return first_s, tpot_s if first_s <= latest_s else (e2e_s - first_s) / later


@compiled
def claim(
    prompt: float,
    tokens: float,
    emitted: float,
    held: float,
    block_tokens: float,
    total: float,
) -> float:
    """KV blocks that a request will need beyond the ``held`` ones, with an output of ``tokens``.

    An output that has ``emitted`` at least that many is expected to double its length. The need is
    at most the ``total`` number of blocks.
    """
    if emitted >= tokens:
        tokens = 2.0 * emitted
    return max(0.0, min(ceil((prompt + tokens) / block_tokens), total) - held)


@compiled
def pace_rows(table: Floats, tokens: Floats) -> None:
    """Give the rows of a queue the TTFT and the TPOT that :func:`paced` says, their outputs having
    ``tokens``, or one more than have left."""
    for row in range(table.shape[0]):
        table[row, TTFT], table[row, TPOT] = paced(
            table[row, TTFT],
            table[row, TPOT],
            table[row, E2E],
            max(tokens[row], table[row, EMITTED] + 1.0),
        )


@compiled
def claims(table: Floats, tokens: Floats, block_tokens: float, total: float) -> Floats:
    """What each row of a queue will :func:`claim`."""
    more = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        more[row] = claim(
            table[row, PROMPT],
            tokens[row],
            table[row, EMITTED],
            table[row, KV_BLOCKS],
            block_tokens,
            total,
        )
    return more
