"""Compiled loops from an engine's counts of tokens to the rows of a queue: for arrays of a few
hundred rows numpy's calls would take longer than its loops, with cold caches most of all."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isnan
from typing import Any

import numpy as np

from sluice.scheduling.batching.warm_up import warm_up
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    EXPECTED,
    FIELDS,
    FIRST_TOKEN,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    PROMPT,
    RUNNING,
    Floats,
    Ints,
    compiled,
    copy_row,
)

# The columns of a request's counts.
PLACE = 0  # of its row
DONE = 1  # tokens whose KV is computed
KNOWN = 2  # tokens of prompt and output
IN_FLIGHT = 3  # tokens of output that running batches will give
HELD = 4  # KV blocks of a waiting request; of others they follow from the computed tokens
COUNTS = 5


@compiled
def queue_rows(
    table: Floats,
    most: Floats,
    running: Ints,
    waiting: Ints,
    limits: tuple[int, int],
    busy_until_s: float,
) -> tuple[Ints, Floats, Ints]:
    """The requests that could run now: their places, rows, and the numbers of those that have
    emitted what was expected. ``table``: ``float64[places, FIELDS]``; ``running``, ``waiting``:
    ``int64[n, COUNTS]``, each by place; ``most``: max tokens by place; ``busy_until_s``: end of
    tokens in flight."""
    longest, block_tokens = limits
    total = running.shape[0] + waiting.shape[0]
    places = np.empty(total, np.int64)
    rows = np.empty((total, FIELDS))
    outgrown = np.empty(total, np.int64)
    count = grown = ran = waited = 0
    while ran < running.shape[0] or waited < waiting.shape[0]:
        runs = waited == waiting.shape[0] or (
            ran < running.shape[0] and running[ran, PLACE] < waiting[waited, PLACE]
        )
        if runs:
            counts = running[ran]
            ran += 1
        else:
            counts = waiting[waited]
            waited += 1
        place, promised = counts[PLACE], counts[IN_FLIGHT]
        known = counts[KNOWN] + promised
        pending = (min(known, longest) if runs else known) - counts[DONE]
        # Its last token is in flight.
        ends = runs and promised > 0 and counts[DONE] + 2 - promised >= most[place]
        if ends or pending <= 0:
            continue
        row = rows[count]
        copy_row(row, table[place])
        row[COMPUTED], row[PENDING] = counts[DONE], pending
        row[EMITTED] = known - row[PROMPT]
        row[KV_BLOCKS] = ceil(counts[DONE] / block_tokens) if runs else counts[HELD]
        row[RUNNING] = 1.0 if runs else 0.0
        if promised > 0:
            row[LAST_TOKEN] = busy_until_s
            if isnan(row[FIRST_TOKEN]):
                row[FIRST_TOKEN] = busy_until_s
        if row[EMITTED] >= row[EXPECTED]:
            outgrown[grown] = count
            grown += 1
        places[count] = place
        count += 1
    return places[:count], rows[:count], outgrown[:grown]


@compiled
def changed_rows(table: Floats, counts: Ints, runs: Ints, block_tokens: int) -> Floats:
    """The rows of requests as the state table has them, from ``table``, ``float64[places,
    FIELDS]``, and ``counts``, ``int64[n, COUNTS]``; ``runs`` is 1 if a request runs."""
    rows = np.empty((counts.shape[0], FIELDS))
    for number in range(counts.shape[0]):
        row = rows[number]
        copy_row(row, table[counts[number, PLACE]])
        done = counts[number, DONE]
        known = counts[number, KNOWN] + counts[number, IN_FLIGHT]
        row[COMPUTED], row[PENDING] = done, max(1, known - done)
        row[EMITTED] = known - row[PROMPT]
        row[KV_BLOCKS] = ceil(done / block_tokens)
        row[RUNNING] = runs[number]
    return rows


@compiled
def emit(table: Floats, places: Ints, now_s: float) -> None:
    """Tokens of the requests in ``places`` left the engine."""
    for place in places:
        table[place, LAST_TOKEN] = now_s
        if isnan(table[place, FIRST_TOKEN]):
            table[place, FIRST_TOKEN] = now_s


def compile_now(policy: str, options: Mapping[str, Any] | None = None, drafts: bool = True) -> None:
    """Compile the loops of an engine's plans under this policy, or load them; ``drafts``: whether
    it speculates. Raises ValueError as ``make_policy``."""
    warm_up(policy, options, drafts)
    table, counts, places = np.empty((0, FIELDS)), np.empty((0, COUNTS), np.int64), np.empty(0)
    queue_rows(table, places, counts, counts, (1, 1), 0.0)
    changed_rows(table, counts, places.astype(np.int64), 1)
    emit(table, places.astype(np.int64), 0.0)
