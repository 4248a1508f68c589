"""The aged lane: a share of the engine for those that have waited long, whatever else there is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduling.batching.batch import BatchBuilder
from scheduling.batching.moore_hodgson import fitting
from scheduling.batching.triage_rows import blocks_needed
from scheduling.earned_time import EarnedTime
from scheduling.kernels import ARRIVAL, COMPUTED, PENDING, Floats, Ints
from scheduling.latency import LatencyModel

AGED_CHUNK_TOKENS = 64
"""Least chunk of an aged prompt: each chunk reads all of the context before it, so that tiny ones
would cost more than they compute."""

LONGEST_STEPS = 20
"""Where no decode is waited for, a batch may take as long as this many empty steps: long enough
that little time is lost to them, short enough that a new request does not wait long."""


class AgedLane:
    """Gives requests older than ``patience_s`` the share ``share`` of the time, by arrival.

    With ``W`` seconds of work of aged requests before it and of its own, a request has its prompt
    computed at most ``patience_s + W / share`` after its arrival, plus the time for which no memory
    or sequence is free, and plus the answers of aged requests before it, of which :meth:`places`
    run at once. From twice the patience on, one that does not fit ends admission behind it until it
    does.

    It keeps the time that it has been owed since the last batch.
    """

    def __init__(self, patience_s: float, share: float) -> None:
        self.patience_s = patience_s
        self._share = share
        self._earned = EarnedTime(share)

    def places(self, running: int) -> int:
        """How many of ``running`` sequences are the lane's: at least one."""
        return max(1, int(self._share * running))

    def aged(self, table: Floats, rows: Ints, now_s: float) -> Ints:
        """Those of ``rows`` that have waited longer than the patience, by arrival. To be called
        once a plan: with any of them, the lane earns its share of the time since the last call; it
        saves up for what no share of one batch would pay."""
        aged = rows[now_s - table[rows, ARRIVAL] > self.patience_s]
        self._earned.earn(now_s, len(aged) > 0)
        by_arrival: Ints = aged[np.argsort(table[aged, ARRIVAL], kind="stable")]
        return by_arrival

    def overdue(self, table: Floats, rows: Ints, now_s: float) -> NDArray[np.bool_]:
        """Which of ``rows`` have waited so long that none may begin before they fit."""
        late: NDArray[np.bool_] = now_s - table[rows, ARRIVAL] > 2 * self.patience_s
        return late

    def take(
        self,
        batch: BatchBuilder,
        table: Floats,
        aged: Ints,
        now_s: float,
        latency: LatencyModel,
    ) -> None:
        """Spend what was earned on the prefills ``aged``, in their order."""
        fits = fitting(blocks_needed(table, aged, batch.block_tokens), batch.free_blocks)
        fits |= self.overdue(table, aged, now_s)
        aged = aged[fits]
        if not len(aged):
            return
        first = table[aged[0]]
        tokens = min(int(first[PENDING]), AGED_CHUNK_TOKENS)
        chunk_s = latency.work_s(tokens, int(first[COMPUTED]))
        # What was saved up while there was no room must not come as one batch.
        most_s = max(chunk_s, LONGEST_STEPS * latency.fixed_s)
        earned = self._earned
        earned.seconds = min(earned.seconds, most_s)
        if earned.seconds >= chunk_s:
            before_s = batch.cost_s
            batch.take(aged, before_s + earned.seconds)
            earned.seconds -= batch.cost_s - before_s
