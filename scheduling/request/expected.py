"""Expected output lengths as TPOTs and claims on memory, the same for admission and replicas."""

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
"""KV blocks that a request needs beyond those that it holds, and output tokens left."""


@compiled
def whole(tokens: float, emitted: float) -> float:
    """Expected output length; an output that has reached ``tokens`` is to double it."""
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
    """KV blocks beyond the ``held`` ones for an output of ``tokens``, at most ``total``."""
    length = prompt + whole(tokens, emitted)
    return max(0.0, min(ceil(length / block_tokens), total) - held)


@compiled
def peak(claims: Any, block_tokens: float) -> float:
    """The most KV blocks that requests with these ``CLAIM`` will need at a time beyond those they
    hold. ``O(n log n)``. Decodes of the tightest TPOT grow alike; each other one counts with its
    whole claim until its last token is due, or to the end without a TPOT. A later, tighter TPOT may
    raise it."""
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
    for place in np.argsort(ends, kind="mergesort"):
        if ends[place] == inf:
            break
        # Each is up to one block ahead of its tokens.
        most = max(most, need + growing * (ends[place] / block_tokens + 1.0))
        need -= first[place] + claims[place].held
        growing -= grows[place]
    return min(max(most, need), claims["blocks"].sum())


@compiled
def pace_rows(table: Floats, tokens: Floats) -> None:
    """Give rows the times of ``paced`` for outputs of ``tokens``, or one more than have left."""
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
