"""Messages between engine and worker: the engine's commands for tasks, and the worker's answers.

A task is one batch. The engine numbers tasks from 1 and never uses a number again. Messages keep
their order in both directions. The worker answers every :class:`RunTask` once, unless it dies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class RunTask(NamedTuple):
    """Compute a batch: now, or from inside the check of the task that received the stop signal.

    Attributes:
        task: its number.
        batch: vLLM's ``SchedulerOutput``.
        grammar: vLLM's ``GrammarOutput``, if there is one.
        checked: it has checks, and its own lane.
    """

    task: int
    batch: Any
    grammar: Any
    checked: bool


class ResumeTask(NamedTuple):
    """Resume the task that was suspended last. Any other task ignores it."""

    task: int


class DiscardTask(NamedTuple):
    """Discard the task that was suspended last. Any other task ignores it."""

    task: int


class CallWorker(NamedTuple):
    """Call a function when no task is in flight."""

    function: Callable[[], Any]
    result: Future[Any]


class Exit(NamedTuple):
    """Discard all tasks, and end."""


Command = RunTask | ResumeTask | DiscardTask | CallWorker | Exit


class Timing(NamedTuple):
    """When a task ran, in seconds.

    Attributes:
        started_s, ended_s: on the monotonic clock.
        suspended_s: total time that it was suspended.
        stopped_s: when it stopped, one entry per stop.
        checks: how many checks it passed.
    """

    started_s: float
    ended_s: float
    suspended_s: float
    stopped_s: tuple[float, ...]
    checks: int

    @property
    def busy_s(self) -> float:
        """How long it computed."""
        return self.ended_s - self.started_s - self.suspended_s


class Done(NamedTuple):
    """A task is complete; ``output`` is vLLM's ``ModelRunnerOutput``, and ``drafts`` its
    ``DraftTokenIds``, if tokens were drafted after it."""

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
