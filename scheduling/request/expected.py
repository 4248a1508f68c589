"""What the expected lengths of outputs make of requests: paces, and claims on memory.

Admission and the replicas must read both in the same way: what one guarantees the other is to hold.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil

import numpy as np

from sluice.scheduling.request.kernels import (
    E2E,
    EMITTED,
    KV_BLOCKS,
    PROMPT,
    TPOT,
    TTFT,
    Floats,
    compiled,
    paced,
)


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
    """Give the rows of a queue the TTFT and the TPOT that
    :func:`~sluice.scheduling.request.deadline.paced` says, their outputs having ``tokens``, or one
    more than have left."""
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
