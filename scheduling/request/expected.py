"""What the expected lengths of outputs make of requests: paces, and claims on memory.

Admission and the replicas must read both in the same way: what one guarantees the other is to hold.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf
from typing import Any

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

CLAIM = np.dtype([("blocks", "<f8"), ("held", "<f8"), ("left", "<f8"), ("tpot_s", "<f8")])
"""What a request will need of memory: KV blocks beyond those that it holds, those that it holds,
output tokens that are left, and its TPOT, seconds."""


@compiled
def whole(tokens: float, emitted: float) -> float:
    """Length of an output that is expected to have ``tokens``: one that has ``emitted`` at least
    that many is expected to double its length."""
    return tokens if emitted < tokens else 2.0 * emitted


@compiled
def claim(
    prompt: float,
    tokens: float,
    emitted: float,
    held: float,
    block_tokens: float,
    total: float,
) -> float:
    """KV blocks that a request will need beyond the ``held`` ones, with an output of ``tokens``
    (:func:`whole`); at most the ``total`` number of blocks."""
    length = prompt + whole(tokens, emitted)
    return max(0.0, min(ceil(length / block_tokens), total) - held)


@compiled
def peak(claims: Any, block_tokens: float) -> float:
    """The most KV blocks that requests with these :data:`CLAIM` will need at a time beyond those
    that they hold. ``O(n log n)``.

    A request needs its whole claim at its end only, and frees it then. Decodes of the tightest TPOT
    run in every batch, so they grow alike. The others run as seldom as their TPOT allows or as
    often as in every batch: each counts with its whole claim until its last token is due. One
    without a TPOT has no end. After a later request with a tighter TPOT, none of them runs in
    every batch, so earlier guarantees may need more blocks than was found then.
    """
    tightest_s = inf
    for each in claims:
        tightest_s = min(tightest_s, each.tpot_s)
    count = claims.shape[0]
    ends, first, grows = np.full(count, inf), np.empty(count), np.zeros(count)
    for place in range(count):
        each = claims[place]
        first[place] = each.blocks
        if each.tpot_s < inf:
            ends[place] = each.left * max(1.0, each.tpot_s / tightest_s)
            if each.tpot_s <= tightest_s:
                grows[place] = 1.0
                first[place] = max(0.0, each.blocks - each.left / block_tokens)
    need, growing, most = first.sum(), grows.sum(), 0.0
    for place in np.argsort(ends):
        if ends[place] == inf:
            break
        # Each is up to one block ahead of its tokens.
        most = max(most, need + growing * (ends[place] / block_tokens + 1.0))
        need -= first[place] + claims[place].held
        growing -= grows[place]
    return min(max(most, need), claims["blocks"].sum())


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
def claims(table: Floats, tokens: Floats, block_tokens: float, total: float) -> Any:
    """:data:`CLAIM` of each row of a queue, whose outputs are expected to have ``tokens``."""
    found = np.empty(table.shape[0], CLAIM)
    for row in range(table.shape[0]):
        emitted, held = table[row, EMITTED], table[row, KV_BLOCKS]
        own = found[row]
        own.blocks = claim(table[row, PROMPT], tokens[row], emitted, held, block_tokens, total)
        own.held, own.tpot_s = held, table[row, TPOT]
        own.left = whole(tokens[row], emitted) - emitted
    return found
