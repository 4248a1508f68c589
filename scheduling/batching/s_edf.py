"""S-EDF: earliest feasible deadline first for prefills, batched by slack, decided on events."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.batching.base import BatchPolicy
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import DEADLINE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.deadline import ENVELOPE
from sluice.scheduling.request.kernels import (
    COMPUTED,
    FIXED,
    PENDING,
    PREFILL_CONTEXT,
    PREFILL_CROSS,
    PREFILL_SEQUENCE,
    PREFILL_SQUARE,
    PREFILL_TOKENS,
    Floats,
    Ints,
    compiled,
    deadlines_s,
    is_prefill,
)
from sluice.scheduling.request.queue import QueueView


class SEDFOptions(PolicyOptions):
    """Options of :class:`SEDF`."""

    chunk_tokens: int = Field(
        default=1024,
        ge=16,
        le=1_048_576,
        description="Maximum number of prefill tokens in a batch: how long a prefill runs before a "
        "more urgent one can preempt it. An engine that runs whole batches cannot preempt at "
        "operator level.",
    )
    batch_tokens: int = Field(
        default=4096,
        ge=0,
        le=1_048_576,
        description="Token budget G of Algorithm 1: prefills run together only while their sum is "
        "below it. 0 is the paper's `no batching`.",
    )


class SEDF(BatchPolicy):
    """One prefill task at a time: the feasible prefill with the earliest deadline, and those that
    can be batched with it (FlowPrefill Eq. 3, Algorithms 1 and 2). No ageing, as in the paper.
    ``O(n log n)``.

    Our readings: an engine runs whole batches, so preemption happens between chunks, not operators.
    A begun prefill ranks by what remains of it. The paper's instances only prefill; here every
    decode runs beside the task, TPOT objectives are ignored, and ``chunk_tokens`` bounds the wait
    of decodes. A prefill that recomputes after a preemption counts as a new arrival."""

    name = "s_edf"
    source = "FlowPrefill §5.2, Eq. 3, Algorithms 1 and 2"
    local_order = DEADLINE
    Options = SEDFOptions
    options: SEDFOptions

    def __init__(self, options: SEDFOptions | None = None) -> None:
        super().__init__(options)
        self._task = np.empty(0, np.int64)  # keys, the head first
        self._known = np.empty(0, np.int64)  # keys of the prefills decided on, ascending

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Decide again on an event; take every decode, then a chunk of the task."""
        prefill = is_prefill(queue.table)
        rows = np.flatnonzero(prefill)
        known = np.sort(queue.keys[rows])
        if not np.array_equal(known, self._known):
            order = self._ranked(queue.table, rows, now_s, latency)
            head = queue.keys[order[:1]]
            if not np.array_equal(head, self._task[:1]):
                self._task = queue.keys[self._batched(queue.table, order, now_s, latency)]
            else:
                self._task = self._task[np.isin(self._task, known)]
            self._known = known

        batch.take(np.flatnonzero(~prefill))
        by_key = rows[np.argsort(queue.keys[rows])]
        task = by_key[np.searchsorted(known, self._task)]
        if not batch.take(task, tokens=self.options.chunk_tokens) and len(rows):
            rest = self._ranked(queue.table, rows, now_s, latency)
            batch.take(rest, tokens=self.options.chunk_tokens)

    def _first(self, due_s: Floats, now_s: float, ttft_s: Floats) -> NDArray[np.bool_]:
        """Which prefills rank first, by deadline: where the numerator of Eq. 3 is positive."""
        feasible: NDArray[np.bool_] = due_s - now_s - ttft_s >= 0
        return feasible

    def _ranked(self, table: Floats, rows: Ints, now_s: float, latency: LatencyModel) -> Ints:
        """``rows`` by Eq. 3 descending, ties in order of arrival."""
        due_s = deadlines_s(table[rows], ENVELOPE)
        first = self._first(due_s, now_s, self._alone_s(table[rows], latency))
        # The same order as that of the quotient, but without rounding, and for negative clocks too.
        ranked: Ints = rows[np.lexsort((np.where(first, due_s, -due_s), ~first))]
        return ranked

    def _alone_s(self, table: Floats, latency: LatencyModel) -> Floats:
        """Predicted TTFT of every row from now on, with its chunks running alone."""
        chunks = np.ceil(table[:, PENDING] / self.options.chunk_tokens)
        whole = chunked_work_s(table, latency.pieces, self.options.chunk_tokens)
        alone: Floats = (whole + chunks * latency.pieces[:, FIXED, None]).max(axis=0)
        return alone

    def _batched(self, table: Floats, order: Ints, now_s: float, latency: LatencyModel) -> Ints:
        """Algorithm 1: the rows of the new task, ``order`` being all prefills by rank."""
        if not len(order):
            return order
        left_s = deadlines_s(table[order[:1]], ENVELOPE)[0] - now_s
        joined: Ints = order[
            join(
                table[order, PENDING],
                chunked_work_s(table[order], latency.pieces, self.options.chunk_tokens),
                latency.pieces[:, FIXED].copy(),
                self.options.chunk_tokens,
                self.options.batch_tokens,
                left_s,
            )
        ]
        return joined


def chunked_work_s(table: Floats, pieces: Floats, chunk_tokens: int) -> Floats:
    """Seconds of each row's pending tokens in chunks, ``float64[pieces, n]``; no fixed time."""
    pending, computed = table[:, PENDING], table[:, COMPUTED]
    whole = np.floor(pending / chunk_tokens)
    last = pending - whole * chunk_tokens
    contexts = whole * computed + chunk_tokens * whole * (whole - 1) / 2
    last_context = computed + whole * chunk_tokens
    work = np.empty((len(pieces), len(table)))
    for index, piece in enumerate(pieces):
        square, cross = piece[PREFILL_SQUARE], piece[PREFILL_CROSS]
        work[index] = (
            piece[PREFILL_TOKENS] * pending
            + square * (whole * chunk_tokens**2 + last**2)
            + cross * (chunk_tokens * contexts + last * last_context)
            + piece[PREFILL_CONTEXT] * (contexts + (last > 0) * last_context)
            + piece[PREFILL_SEQUENCE] * (whole + (last > 0))
        )
    return work


@compiled
def join(
    tokens: Floats,
    work_s: Floats,
    fixed_s: Floats,
    chunk_tokens: int,
    batch_tokens: int,
    left_s: float,
) -> Ints:
    """Algorithm 1: the indices of the first prefill and of those that join it. ``work_s``:
    ``float64[pieces, n]``; ``fixed_s``: of each chunk, by piece."""
    joined = np.empty(tokens.shape[0], np.int64)
    joined[0] = 0
    count = 1
    total = tokens[0]
    work = work_s[:, 0].copy()
    for place in range(1, tokens.shape[0]):
        together = total + tokens[place]
        if together >= batch_tokens:
            continue
        predicted_s = 0.0
        chunks = ceil(together / chunk_tokens)
        for piece in range(fixed_s.shape[0]):
            own_s = work[piece] + work_s[piece, place] + chunks * fixed_s[piece]
            predicted_s = max(predicted_s, own_s)
        if left_s > predicted_s:
            joined[count] = place
            count += 1
            total = together
            work += work_s[:, place]
    return joined[:count]
