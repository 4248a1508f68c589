"""The live requests of one simulated engine as arrays that grow."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.kernels import FIELDS, Floats, Ints
from sluice.simulation.steps import COUNTERS, LIVE, PRIVATE

_CAPACITY = 256

Array = TypeVar("Array", bound=NDArray[Any])


class Rows:
    """Arrays of one length, the first ``live`` rows of which are in use, in order of arrival.

    Attributes:
        table: what policies see, ``float64[capacity, FIELDS]`` of :mod:`sluice.scheduling.kernels`.
        private: what they do not see, ``int64[capacity, PRIVATE]`` of
            :mod:`sluice.simulation.steps`.
        keys: which requests these are.
        counters: the engine's, ``int64[COUNTERS]``.
        ran: of the step under way, its rows and their tokens, ``int64[capacity, 2]``.
        accepted: of that step, drafted tokens that are right, by place in ``ran``.
        victims: rows that it preempted.
        turns: keys of the requests to which its end was more than that of a step, and what it was.
    """

    def __init__(self) -> None:
        self.table: Floats = np.zeros((_CAPACITY, FIELDS))
        self.private: Ints = np.zeros((_CAPACITY, PRIVATE), np.int64)
        self.keys: Ints = np.zeros(_CAPACITY, np.int64)
        self.counters: Ints = np.zeros(COUNTERS, np.int64)
        self.ran: Ints = np.zeros((_CAPACITY, 2), np.int64)
        self.accepted: Ints = np.zeros(_CAPACITY, np.int64)
        self.victims: Ints = np.zeros(_CAPACITY, np.int64)
        self.turns: Ints = np.zeros((_CAPACITY, 2), np.int64)

    @property
    def live(self) -> int:
        """Rows in use."""
        return int(self.counters[LIVE])

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

    def clear(self) -> list[int]:
        """Take all requests out; return their keys."""
        keys: list[int] = self.keys[: self.live].tolist()
        self.counters[LIVE] = 0
        return keys

    def _grow(self) -> None:
        self.table = _doubled(self.table)
        self.private = _doubled(self.private)
        self.keys = _doubled(self.keys)
        self.ran = _doubled(self.ran)
        self.accepted = _doubled(self.accepted)
        self.victims = _doubled(self.victims)
        self.turns = _doubled(self.turns)


def _doubled(array: Array) -> Array:
    """``array`` with as many empty places behind it."""
    return cast(Array, np.concatenate((array, np.zeros_like(array))))
