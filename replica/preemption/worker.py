"""The worker's side: runs tasks, and nested ones from inside a check of a suspended task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.replica.preemption.checks import Checks
from sluice.replica.preemption.control_block import ControlWords
from sluice.replica.preemption.launch_throttle import Immediate, pacer_for
from sluice.replica.preemption.messages import (
    Answer,
    CallWorker,
    Command,
    Discarded,
    DiscardTask,
    Done,
    Exit,
    Failed,
    ResumeTask,
    RunTask,
    Timing,
)
from sluice.replica.preemption.runner_pool import Lanes
from sluice.scheduling.preemption import PreemptionConfig


class _GivenUpError(BaseException):
    """Unwinds a suspended task. Not an ``Exception``, so that no code on the way catches it."""


@dataclass(slots=True)
class _Running:
    """A task on the worker's stack.

    Attributes:
        checks: number of checks that it has passed.
        stops: for each suspension, a function that returns when the device reached the stop, and
            the time of the resumption.
    """

    task: int
    started_s: float
    checks: int = 0
    stops: list[tuple[Callable[[], float], float]] = field(default_factory=list)

    def timing(self, ended_s: float) -> Timing:
        """When it ran."""
        stops = [(stopped_s(), resumed_s) for stopped_s, resumed_s in self.stops]
        return Timing(
            self.started_s,
            ended_s,
            sum(max(0.0, resumed_s - stopped_s) for stopped_s, resumed_s in stops),
            tuple(stopped_s for stopped_s, _ in stops),
            self.checks,
        )


class TaskRunner:
    """Runs tasks on the thread that calls :meth:`serve`, at most ``depth`` of them suspended.

    Args:
        words: control words of the engine and this worker.
        receive: waits for the next command.
        answer: sends an answer.
        clock: monotonic seconds.
        rank: which worker this is, from 0.
        ranks: how many workers compute each task together. All get the same commands.
    """

    def __init__(
        self,
        words: ControlWords,
        receive: Callable[[], Command],
        answer: Callable[[Answer], None],
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._receive = receive
        self._answer = answer
        self._clock = clock
        self._worker: Any = None
        self._lanes: Any = None
        self._stack: list[_Running] = []
        self._exiting = False
        self.checks = Checks(words, self._suspended, rank, ranks)
        self.checks.pacer = Immediate(clock)

    def make_ready(self, worker: Any, options: PreemptionConfig) -> int:
        """Take vLLM's worker, complete with its KV cache, and put checks into its model; returns
        their number."""
        assert options.granularity != "off"
        self.checks.pacer = pacer_for(worker.device)
        checks = self.checks.install(worker.model_runner.get_model(), options.granularity)
        self.attach(worker, Lanes(worker, options.depth))
        return checks

    def attach(self, worker: Any, lanes: Any) -> None:
        """Take vLLM's worker, complete with its KV cache, and its
        :class:`~sluice.replica.preemption.runner_pool.Lanes`."""
        self._worker = worker
        self._lanes = lanes

    def serve(self) -> None:
        """Carry out commands until :class:`Exit`."""
        self._exiting = False
        self._serve(None)

    def _serve(self, suspended: int | None) -> None:
        """Carry out commands on behalf of a ``suspended`` task, until it resumes.

        Raises:
            _GivenUpError: the task is discarded.
        """
        while not self._exiting:
            command = self._receive()
            match command:
                case RunTask():
                    self._run(command)
                case ResumeTask(task) if task == suspended:
                    return
                case DiscardTask(task) if task == suspended:
                    raise _GivenUpError
                case CallWorker():
                    _call(command, suspended)
                case Exit():
                    self._exiting = True
        if suspended is not None:
            raise _GivenUpError

    def _run(self, run: RunTask) -> None:
        import torch  # takes seconds, and an engine has done it

        lanes = self._lanes
        lane = lanes.private[len(self._stack)] if run.checked else lanes.stock
        if run.checked and not self._stack:
            self.checks.pacer.start()
        running = _Running(run.task, self._clock())
        self._stack.append(running)
        answer: Answer
        try:
            # vLLM makes a batch in inference mode, and its mask of allowed tokens can be changed in
            # that mode only.
            with torch.inference_mode(), self.checks.running(run.task if run.checked else 0):
                lanes.enter(lane, run.batch)
                try:
                    output, drafts = self._compute(lane, run)
                finally:
                    running.checks = self.checks.passed
                    lanes.leave(lane)
            answer = Done(run.task, output, drafts, running.timing(self._clock()))
        except _GivenUpError:
            answer = Discarded(run.task, running.timing(self._clock()))
        except Exception as error:
            answer = Failed(run.task, error, running.timing(self._clock()))
        finally:
            self._stack.pop()
        self._answer(answer)

    def _compute(self, lane: Any, run: RunTask) -> tuple[Any, Any]:
        """Compute one batch with vLLM's worker, with ``lane`` as its model runner; returns the
        output and the drafts."""
        import torch

        worker = self._worker
        outer, threads = worker.model_runner, torch.get_num_threads()
        worker.model_runner = lane
        try:
            output = worker.execute_model(run.batch)
            if output is not None:
                return output, None
            output = worker.sample_tokens(run.grammar)
            drafts = worker.take_draft_token_ids()
            if drafts is not None:
                # vLLM returns the list of the lane's batch, which is emptied after the task.
                drafts.req_ids = list(drafts.req_ids)
                # numba, which finds n-grams, sets OpenMP's number of threads in this thread. The
                # attention of a suspended task was prepared for the former one. On CPUs vLLM has
                # made torch.set_num_threads do nothing.
                torch._C.set_num_threads(threads)
            return output, drafts
        finally:
            worker.model_runner = outer

    def _suspended(self) -> None:
        """Called at the check at which the running task stops."""
        running = self._stack[-1]
        stopped_s = self.checks.pacer.stop()
        try:
            with self._lanes.nested():
                self._serve(running.task)
        finally:
            running.stops.append((stopped_s, self._clock()))


def _call(call: CallWorker, suspended: int | None) -> None:
    if suspended is not None:
        call.result.set_exception(RuntimeError("the worker is busy with a preempted task"))
        return
    try:
        call.result.set_result(call.function())
    except BaseException as error:
        call.result.set_exception(error)
