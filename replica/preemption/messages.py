"""What engine and workers exchange: messages, and shared memory that a check can read cheaply.

A task is one batch. Task numbers begin with 1 and are never reused. Messages keep their order. The
worker answers every ``RunTask`` once, unless it dies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

REACHED: Final = 0
"""Index of the word with the check that the first worker has reached, as a mark."""

ANY_TASK: Final = -1

MAX_CHECKS: Final = 1 << 20
"""Max checks of one task."""

_SLOTS = 128
_STOP = 1
_AGREED = _STOP + _SLOTS
_BYTES = 8 * (_AGREED + _SLOTS)


def stop_word(task: int) -> int:
    """The word that holds ``task`` while it must stop; each has its own, as signals may overlap."""
    return _STOP + task % _SLOTS


def agreed_word(task: int) -> int:
    """The word that holds the check at which all workers stop ``task``, as a mark."""
    return _AGREED + task % _SLOTS


def mark(task: int, checks: int) -> int:
    """``task`` and a number of checks in one word, so that both are read at once."""
    return task * MAX_CHECKS + checks


class ControlWords:
    """A few 64-bit words in memory; reads are never torn. Between processes the memory is a file of
    ``/dev/shm``, which can be deleted as soon as all have it open."""

    __slots__ = ("_memory", "cells")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.cells = memoryview(memory).cast("B").cast("q")

    @classmethod
    def create(cls, path: Path | None = None) -> ControlWords:
        """New words, all 0. Raises OSError: ``path`` cannot be made."""
        if path is None:
            return cls(mmap.mmap(-1, _BYTES))
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            file.truncate(_BYTES)
            return cls(mmap.mmap(file.fileno(), _BYTES))

    @classmethod
    def open(cls, path: Path) -> ControlWords:
        """Open another process's words. Raises OSError, or ValueError: the size is wrong."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _BYTES))

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
        """The computing task and its passed checks, as a mark; 0 for one without checks."""
        return self.cells[REACHED]


class RunTask(NamedTuple):
    """Compute ``batch``: now, or inside the check of the task that received the stop signal.
    ``checked``: it has checks, and its own lane."""

    task: int
    batch: Any
    grammar: Any
    checked: bool


class ResumeTask(NamedTuple):
    """Resume the task that was suspended last; any other one ignores it."""

    task: int


class DiscardTask(NamedTuple):
    """Discard the task that was suspended last; any other one ignores it."""

    task: int


class CallWorker(NamedTuple):
    """Call a function when no task is in flight."""

    function: Callable[[], Any]
    result: Future[Any]


class Exit(NamedTuple):
    """Discard all tasks, and end."""


Command = RunTask | ResumeTask | DiscardTask | CallWorker | Exit


class Timing(NamedTuple):
    """When a task ran, monotonic seconds: total time that it was suspended, and of each stop."""

    started_s: float
    ended_s: float
    suspended_s: float
    stopped_s: tuple[float, ...]

    @property
    def busy_s(self) -> float:
        """How long it computed."""
        return self.ended_s - self.started_s - self.suspended_s


class Done(NamedTuple):
    """A complete task: vLLM's ``ModelRunnerOutput``, and ``DraftTokenIds`` after drafting."""

    task: int
    output: Any
    drafts: Any
    timing: Timing


class Failed(NamedTuple):
    """A task raised ``error``. The tasks below it on the stack are not affected."""

    task: int
    error: Exception
    timing: Timing


class Discarded(NamedTuple):
    """A task was discarded."""

    task: int
    timing: Timing


class Died(NamedTuple):
    """The worker's thread ended by ``error``; no more answers will come."""

    error: BaseException


Answer = Done | Failed | Discarded | Died
