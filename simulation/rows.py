"""Continuous batching, chunked prefill and paged KV over the live requests of one simulated engine.

The simulator's engine (:mod:`sluice.simulation.engine`) and a replica's
(:mod:`sluice.replica.simulated.core`) run on it: the one adds virtual time, a prefix cache, drafts
and stages, the other a local scheduler and a state table.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.request.kernels import FIELDS, KV_BLOCKS, PENDING, RUNNING, Floats, Ints
from sluice.scheduling.request.queue import QueueView
from sluice.simulation import steps
from sluice.simulation.steps import (
    COUNTERS,
    FREE_BLOCKS,
    LIVE,
    PRIVATE,
    SEQUENCES,
    SHARED,
    STEP,
    TARGET,
)

_CAPACITY = 256

_NOWHERE: Floats = np.empty(0)

Array = TypeVar("Array", bound=NDArray[Any])


class Rows:
    """Arrays of one length, the first ``live`` rows of which are in use, in order of arrival.

    It does what stock vLLM does around a plan
    (:class:`~sluice.scheduling.batching.batch.BatchBuilder`): a running request that lacks blocks
    preempts others by recompute. Requests that the plan evicts lose their KV before the step. At
    most one step runs: :meth:`begin`, then :meth:`complete`.

    Args:
        kv_blocks: blocks of the engine.
        block_tokens: tokens per block.
        max_sequences: most running requests.

    Attributes:
        table: what policies see, ``float64[capacity, FIELDS]`` of
            :mod:`sluice.scheduling.request.kernels`.
        private: what they do not see, ``int64[capacity, PRIVATE]`` of
            :mod:`sluice.simulation.steps`.
        keys: which requests these are.
        counters: the engine's, ``int64[COUNTERS]``.
        step: the step under way, ``int64[capacity, STEP]`` of :mod:`sluice.simulation.steps`.
        ran_count: how many entries it has.
    """

    def __init__(self, kv_blocks: int, block_tokens: int, max_sequences: int) -> None:
        self.table: Floats = np.zeros((_CAPACITY, FIELDS))
        self.private: Ints = np.zeros((_CAPACITY, PRIVATE), np.int64)
        self.keys: Ints = np.zeros(_CAPACITY, np.int64)
        self.counters: Ints = np.zeros(COUNTERS, np.int64)
        self.counters[FREE_BLOCKS] = kv_blocks
        self.step: Ints = np.zeros((_CAPACITY, STEP), np.int64)
        self.ran_count = 0
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._dropped = False

    @property
    def live(self) -> int:
        """Rows in use."""
        return int(self.counters[LIVE])

    @property
    def sequences(self) -> int:
        """Running requests: those that hold a slot and KV."""
        return int(self.counters[SEQUENCES])

    @property
    def free_blocks(self) -> int:
        """KV blocks that a plan may use."""
        return int(self.counters[FREE_BLOCKS])

    @property
    def ran(self) -> Ints:
        """Rows and tokens of the entries of the step under way, ``int64[ran_count, 2]``."""
        return self.step[: self.ran_count, steps.RAN : steps.NEW + 1]

    @property
    def victims(self) -> Ints:
        """The rows that it preempted."""
        return self.step[: self.counters[steps.VICTIMS], steps.VICTIM]

    def append(self, key: int, row: Floats, private: Ints) -> int:
        """Add a request, also while a step runs; return its row. Amortised ``O(1)``."""
        live = self.live
        if live == len(self.keys):
            self._grow()
        self.table[live] = row
        self.private[live] = private
        self.keys[live] = key
        self.counters[LIVE] = live + 1
        return live

    def begin(self, plan: BatchPlan) -> int:
        """Carry a plan of the live rows out; return how many of its entries run. See
        :func:`sluice.simulation.steps.begin`."""
        self.ran_count = steps.begin(
            self.table,
            self.private,
            self.counters,
            self.step,
            (plan.rows, plan.tokens, plan.evicted, plan.kept),
            self._block_tokens,
            self._max_sequences,
        )
        return self.ran_count

    def complete(self, now_s: float, drafts: int = 0, emitted_s: Floats = _NOWHERE) -> Ints:
        """End the step; return the keys of the requests to which this was more than the end of a
        step, and what it was. See :func:`sluice.simulation.steps.complete`."""
        steps.complete(
            self.table,
            self.private,
            self.keys,
            self.counters,
            self.step,
            (self.ran_count, drafts, now_s),
            emitted_s,
        )
        self.ran_count = 0
        if self._dropped:
            self._remove_ended()
        return self.step[: self.counters[steps.TURNS], steps.TURNED : steps.TURN + 1]

    def drop(self, key: int) -> None:
        """Take a live request out and free its blocks, also while a step runs. ``O(live)``."""
        row = int(np.flatnonzero(self.keys[: self.live] == key)[0])
        self.counters[FREE_BLOCKS] += int(self.table[row, KV_BLOCKS]) - self.private[row, SHARED]
        self.counters[SEQUENCES] -= int(self.table[row, RUNNING])
        self.table[row, KV_BLOCKS] = self.table[row, RUNNING] = 0.0
        self.private[row, TARGET] = 0
        self._dropped = True
        if not self.ran_count:
            self._remove_ended()

    def clear(self) -> list[int]:
        """Take all requests out; return their keys."""
        keys: list[int] = self.keys[: self.live].tolist()
        self.counters[LIVE] = 0
        return keys

    def _remove_ended(self) -> None:
        steps.remove_ended(self.table, self.private, self.keys, self.counters)
        self._dropped = False

    def _grow(self) -> None:
        self.table = _doubled(self.table)
        self.private = _doubled(self.private)
        self.keys = _doubled(self.keys)
        self.step = _doubled(self.step)


def compile_now() -> None:
    """Run toy steps, so that no later one waits for the compiler."""
    rows = Rows(4, 16, 2)
    private = np.zeros(PRIVATE, np.int64)
    private[TARGET] = 2
    for key in range(2):
        place = rows.append(key, np.zeros(FIELDS), private)
        rows.table[place, PENDING] = 4.0
    both, all_of_it = np.arange(2), np.full(2, 4)
    rows.begin(BatchPlan(QueueView(()), both, all_of_it, 0.0))
    rows.complete(1.0)
    rows.drop(0)


def _doubled(array: Array) -> Array:
    """``array`` with as many empty places behind it."""
    return cast(Array, np.concatenate((array, np.zeros_like(array))))
