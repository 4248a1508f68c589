"""Words that the engine and its workers share, so that a check costs one comparison."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

STOP_TASK: Final = 0
"""Task that has to stop; 0 for none, -1 for any. A task's number is never used again, so a late word stops
nothing."""

STOP_AT: Final = 1
"""First check at which it stops."""

REACHED: Final = 2
"""Checks that the running task has passed: its progress."""

ANY_TASK: Final = -1

_WORDS = 3
_BYTES = 8 * _WORDS


class ControlWords:
    """A few 64-bit words in memory. One side writes each of them; reads are never torn.

    Between threads the memory has no name. Between processes it is a file of ``/dev/shm``, which
    can be deleted as soon as all have it open.
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
        """The words that another process made.

        Raises:
            OSError: there are none.
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

    def stop(self, task: int, at: int = 0) -> None:
        """Have ``task`` stop at its next check, the ``at``-th or later."""
        self.cells[STOP_AT] = at
        self.cells[STOP_TASK] = task

    def stop_any(self) -> None:
        """Have whatever task runs stop at its next check."""
        self.stop(ANY_TASK)

    def reached(self) -> int:
        """Checks that the running task has passed."""
        return self.cells[REACHED]
