"""Words that the engine and its workers share, so that a check costs a few comparisons."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

REACHED: Final = 0
"""Index of the word with the check that the first worker has reached, as a mark."""

ANY_TASK: Final = -1

MAX_RANKS: Final = 16
"""Max workers that share one engine's words."""

MAX_CHECKS: Final = 1 << 20
"""Max checks of one task."""

_SLOTS = 128
_STOPPED = 1
_STOP = _STOPPED + MAX_RANKS
_AGREED = _STOP + _SLOTS
_BYTES = 8 * (_AGREED + _SLOTS)


def stop_word(task: int) -> int:
    """The word that holds ``task`` while it has to stop.

    Each task has its own word, so that a second task can get its stop signal before the first one
    has seen its own. Two tasks share a word only if their numbers are a multiple of ``_SLOTS``
    apart.
    """
    return _STOP + task % _SLOTS


def agreed_word(task: int) -> int:
    """The word that holds the check at which all workers stop ``task``, as a mark."""
    return _AGREED + task % _SLOTS


def mark(task: int, checks: int) -> int:
    """``task`` and a number of checks in one word, so that both are read at once."""
    return task * MAX_CHECKS + checks


class ControlWords:
    """A few 64-bit words in memory; reads are never torn.

    A task's number is never reused, so a word that is set too late stops nothing. Between threads
    the memory has no name. Between processes it is a file of ``/dev/shm``, which can be deleted as
    soon as all processes have it open.
    """

    __slots__ = ("_memory", "cells")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.cells = memoryview(memory).cast("B").cast("q")

    @classmethod
    def create(cls, path: Path | None = None) -> ControlWords:
        """New words, all 0.

        Raises:
            OSError: ``path`` cannot be made.
        """
        if path is None:
            return cls(mmap.mmap(-1, _BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> ControlWords:
        """Open the words that another process made.

        Raises:
            OSError: the file cannot be opened.
            ValueError: the file has another size.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size != _BYTES:
                raise ValueError(f"{path} has {size} bytes, control words have {_BYTES}")
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def stop(self, task: int) -> None:
        """Have ``task`` stop at its next check, or the next one that its workers agree on."""
        self.cells[stop_word(task)] = task

    def stop_any(self) -> None:
        """Have whatever task runs stop at its next check."""
        for place in range(_STOP, _STOP + _SLOTS):
            self.cells[place] = ANY_TASK

    def stops(self, task: int) -> bool:
        """Whether ``task`` has to stop, and has not stopped yet."""
        return self.cells[stop_word(task)] == task

    def reached(self) -> int:
        """The task that computes now and the checks that it has passed, as a mark; 0 for one
        without checks."""
        return self.cells[REACHED]

    def note_stop(self, rank: int, at: int) -> None:
        """Worker ``rank`` stops at the mark ``at``."""
        self.cells[_STOPPED + rank] = at

    def stopped(self, ranks: int) -> tuple[int, ...]:
        """Where each of the first ``ranks`` workers stopped last, as marks."""
        return tuple(self.cells[_STOPPED : _STOPPED + ranks])
