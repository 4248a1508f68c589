"""The aged lane: a fixed share of the engine for requests that have waited long."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.batching.deadline_triage.rows import blocks_needed
from sluice.scheduling.batching.deadline_triage.selection import fitting
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import ARRIVAL, COMPUTED, PENDING, RUNNING, Floats, Ints
from sluice.scheduling.tenancy.earned_time import EarnedTime

AGED_CHUNK_TOKENS = 64
"""Smallest chunk of an aged prompt. Each chunk reads all of the context before it, so tiny chunks
would cost more than they compute."""

LONGEST_STEPS = 20
"""Longest batch, in empty steps, where no decode limits it: long enough that the fixed time per
step is a small overhead, short enough that a new request does not wait long."""


MOST_OF_BATCH = 0.5
"""Share of a batch's time, beside what was taken before, for a prompt that the lane has begun."""

STILL_EARNED = 0.5
"""Share of the rest of a prompt that the lane must have earned to continue it. It has earned all
of it when it begins; chunks cost more than the whole."""


class AgedLane:
    """Gives requests older than ``patience_s`` the share ``share`` of the time, by arrival.

    Let ``W`` be the work, seconds, of a request and of the aged requests before it. Its prompt is
    computed at most ``patience_s + W / share`` after its arrival, plus the time for which no memory
    or sequence is free, plus the decode time of the aged requests before it, of which
    :meth:`places` run at once. A request older than twice the patience that does not fit blocks
    admission of the requests behind it until it fits.

    A long prompt that runs on a small share of the time holds much KV for long. So it begins once
    the lane has earned its whole work, and then has up to half of each batch. The lane serves no
    other one meanwhile. The bound has the time of these batches in addition.

    The state is the time that the lane has earned and not yet spent.
    """

    def __init__(self, patience_s: float, share: float) -> None:
        self.patience_s = patience_s
        self._share = share
        self._earned = EarnedTime(share)

    def places(self, running: int) -> int:
        """How many of ``running`` sequences belong to the lane: at least one."""
        return max(1, int(self._share * running))

    def aged(self, table: Floats, rows: Ints, now_s: float) -> Ints:
        """The requests of ``rows`` that have waited longer than the patience, by arrival. Call it
        once per plan: while there are aged requests, the lane earns its share of the time since the
        last call. It accumulates the time for a chunk that costs more than its share of one
        batch."""
        aged = rows[now_s - table[rows, ARRIVAL] > self.patience_s]
        self._earned.earn(now_s, len(aged) > 0)
        by_arrival: Ints = aged[np.argsort(table[aged, ARRIVAL], kind="stable")]
        return by_arrival

    def in_turn(self, table: Floats, aged: Ints, most_tokens: float) -> Ints:
        """Those of ``aged`` before the first one of more than ``most_tokens``, or if that is the
        oldest, that one alone."""
        long = table[aged, COMPUTED] + table[aged, PENDING] > most_tokens
        return aged[: max(1, int(np.argmax(long)))] if long.any() else aged

    def overdue(self, table: Floats, rows: Ints, now_s: float) -> NDArray[np.bool_]:
        """Which of ``rows`` have waited longer than twice the patience, and so block admission."""
        late: NDArray[np.bool_] = now_s - table[rows, ARRIVAL] > 2 * self.patience_s
        return late

    def under_way(
        self, table: Floats, aged: Ints, latency: LatencyModel, most_tokens: float
    ) -> int:
        """The first of ``aged`` that has begun, if the lane works on it: if it has no more than
        ``most_tokens``, or the lane has earned its rest. -1 otherwise."""
        begun = aged[table[aged, RUNNING] > 0]
        if not len(begun):
            return -1
        first = table[begun[0]]
        earned = self._earned.seconds >= STILL_EARNED * _rest_s(first, latency)
        return int(begun[0]) if earned or _tokens(first) <= most_tokens else -1

    def take(
        self,
        batch: BatchBuilder,
        table: Floats,
        aged: Ints,
        now_s: float,
        latency: LatencyModel,
        until_s: float = inf,
        most_tokens: float = inf,
    ) -> None:
        """Spend what was earned on the prefills ``aged``, in their order.

        Args:
            until_s: when the batch is to end.
            most_tokens: a prompt of more tokens is a long one.
        """
        fits = fitting(blocks_needed(table, aged, batch.block_tokens), batch.free_blocks)
        fits |= self.overdue(table, aged, now_s)
        aged = aged[fits]
        if not len(aged):
            return
        first = table[aged[0]]
        tokens = min(int(first[PENDING]), AGED_CHUNK_TOKENS)
        chunk_s = needed_s = latency.work_s(tokens, int(first[COMPUTED]))
        # Time earned while nothing fitted must not be spent in one batch.
        most_s = share_s = max(chunk_s, LONGEST_STEPS * latency.fixed_s)
        before_s = batch.cost_s
        if _tokens(first) > most_tokens:
            rest_s = _rest_s(first, latency)
            needed_s = max(chunk_s, STILL_EARNED * rest_s) if first[RUNNING] > 0 else rest_s
            most_s = max(most_s, latency.work_s(_tokens(first), 0))
            share_s = max(chunk_s, MOST_OF_BATCH * (until_s - before_s))
        earned = self._earned
        earned.seconds = min(earned.seconds, most_s)
        if earned.seconds >= needed_s:
            batch.take(aged, before_s + min(earned.seconds, share_s))
            earned.seconds -= batch.cost_s - before_s


def _tokens(row: Floats) -> int:
    """Tokens of a whole prompt."""
    return int(row[COMPUTED] + row[PENDING])


def _rest_s(row: Floats, latency: LatencyModel) -> float:
    """Work of what is left of a prompt, seconds."""
    return latency.work_s(int(row[PENDING]), int(row[COMPUTED]))
