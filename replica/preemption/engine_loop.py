"""One round of the loop that replaces the step in vLLM's engine core: take events, decide, return
outputs. It waits only if there is nothing to decide, and then for the next event."""

# vLLM's classes are untyped here.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
import logging
import queue
import time
from dataclasses import asdict
from typing import Any

import torch
from vllm import envs
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.core import EngineCore

from sluice.replica.preemption.messages import (
    MAX_CHECKS,
    Answer,
    Died,
    DiscardTask,
    Done,
    Failed,
    ResumeTask,
    RunTask,
)
from sluice.replica.preemption.scheduler import PreemptiveScheduler, Task
from sluice.replica.preemption.stats import Stats, TaskWatchdog
from sluice.scheduling.preemption import DecodeTurns

logger = logging.getLogger(__name__)

_WAKEUP = (EngineCoreRequestType.WAKEUP, None)

_MIN_WAIT_S = 0.001
"""Interval of checks for decodes that have no capacity, seconds."""

_stock_step = EngineCore.step


def install() -> None:
    """Have engine cores whose scheduler preempts run rounds; before a core has chosen its step."""
    EngineCore.step = _step


def _step(core: Any) -> tuple[dict[int, Any], bool]:
    if not isinstance(core.scheduler, PreemptiveScheduler):
        return _stock_step(core)
    loop = core.__dict__.get("_preemption")
    if loop is None:
        loop = core._preemption = EngineLoop(core)
    return loop.step()


class EngineLoop:
    """The stack of tasks in flight of one engine core; the last one computes. A batch is built
    before the stop signal for it, so a request without KV blocks stops no task."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler: PreemptiveScheduler = core.scheduler
        self._executor = core.model_executor
        self._depth = self._scheduler.bounds.depth
        self._scheduler.turns = DecodeTurns(self._executor.checks)
        self._stack: list[Task] = []
        self._inbox: queue.Queue[Any] = core.__dict__.get("input_queue") or queue.Queue()
        self._deferred: list[tuple[Any, Any]] = []
        self.stats = Stats(reserved_bytes=self._executor.reserve.total)
        # vLLM's own limit: its executor does not see tasks.
        self._watchdog = TaskWatchdog(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        self._handle = getattr(core, "_handle_client_request", None)
        if self._handle is not None:
            core._handle_client_request = self._request
        self._executor.wake = lambda: self._inbox.put_nowait(_WAKEUP)

    def step(self) -> tuple[dict[int, Any], bool]:
        """One round: vLLM's outputs by client, and whether the engine is at work. Raises
        RuntimeError: a batch failed that cannot be isolated, or the executor failed."""
        self._core._process_aborts_queue()
        outputs = self._take_answer()
        self._decide()
        self.stats.rounds += 1
        self.stats.suspended = sum(task.suspended for task in self._stack)
        stop_s = self._scheduler.stop_s(self._stack)
        self._scheduler.publish({**asdict(self.stats), "planned_stop_s": stop_s})
        if not outputs and self._stack and not self._executor.answers:
            self._wait()
        return outputs, bool(self._stack) or bool(outputs)

    # Events.

    def _take_answer(self) -> dict[int, Any]:
        answers = self._executor.answers
        if not answers:
            return {}
        answer: Answer = answers.popleft()
        if isinstance(answer, Died):
            raise RuntimeError("the worker ended") from answer.error
        task = next(each for each in self._stack if each.number == answer.task)
        self._stack.remove(task)
        for took_s in self.stats.ended(task.signalled_s, answer.timing):
            self._scheduler.turns.stopped(took_s, task.predicted_s)
        if isinstance(answer, Done):
            outputs = self._scheduler.completed(task, answer.output, answer.drafts, answer.timing)
            attach = getattr(self._core, "_attach_weight_version", None)
            if attach is not None:
                attach(outputs)
            return outputs
        ended = self._scheduler.failed(task)
        if not isinstance(answer, Failed):
            self.stats.discards += 1
            return {}
        if not task.checked or isinstance(answer.error, torch.AcceleratorError):
            # The state of vLLM's own runner, or of the device, is unknown now.
            raise RuntimeError("a batch failed") from answer.error
        logger.error("a prefill failed", exc_info=answer.error)
        return _errors(ended)

    def _request(self, kind: Any, payload: Any) -> None:
        """vLLM's handling of a client's request; calls wait until no task is in flight."""
        if kind == EngineCoreRequestType.UTILITY and self._stack:
            self._deferred.append((kind, payload))
            return
        assert self._handle is not None
        self._handle(kind, payload)

    def _wait(self) -> None:
        """Wait for the next event, and take all that came with it."""
        timeout_s = self._watchdog.look(self._stack[-1].number, self._executor.words.reached())
        if self._can_nest():
            due_s = self._scheduler.decode_due_s(self._stack[-1])
            if due_s is not None:
                timeout_s = min(timeout_s, max(_MIN_WAIT_S, due_s - time.monotonic()))
        try:
            event = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        self._request(*event)
        while not self._inbox.empty():
            self._request(*self._inbox.get_nowait())

    # Decisions.

    def _decide(self) -> None:
        """Start a task, resume one, or let the running one continue."""
        if self._deferred and not self._stack:
            for event in self._deferred:
                self._request(*event)
            self._deferred.clear()
        top = self._stack[-1] if self._stack else None
        if top is not None and self._is_over(top):
            return
        task = None
        if not self._deferred and (top is None or self._can_nest()):
            began_s = time.perf_counter()
            full = len(self._stack) >= self._depth
            task = self._scheduler.start(top, self._left_s(top), full)
            self.stats.decide_s += time.perf_counter() - began_s
        if task is not None:
            self._start(task, top)
        elif top is not None and top.suspended:
            top.suspended = False
            self.stats.resumes += 1
            self._executor.tell(ResumeTask(top.number))

    def _can_nest(self) -> bool:
        top = self._stack[-1]
        return top.preemptible and not top.discarded and len(self._stack) <= self._depth

    def _is_over(self, top: Task) -> bool:
        """Discard ``top`` if all its requests have ended; true while that is pending."""
        ending = self._scheduler.ending
        if top.discarded:
            return True
        if not top.checked or not all(each in ending for each in top.request_ids):
            return False
        top.discarded = True
        self._executor.tell(DiscardTask(top.number))
        if not top.suspended:
            self._signal(top)
        return True

    def _start(self, task: Task, top: Task | None) -> None:
        # A copy, as the next batch's masks are written to the same buffer.
        grammar = copy.deepcopy(self._scheduler.get_grammar_bitmask(task.batch))
        self._executor.tell(RunTask(task.number, task.batch, grammar, task.checked))
        if top is not None and not top.suspended:
            top.suspended = True
            self._signal(top)
        self._stack.append(task)

    def _signal(self, task: Task) -> None:
        task.signalled_s.append(time.monotonic())
        self._executor.words.stop(task.number)

    def _left_s(self, top: Task | None) -> float:
        """Predicted time until ``top`` ends, by the share of its checks that it has passed."""
        if top is None:
            return 0.0
        task, passed = divmod(self._executor.words.reached(), MAX_CHECKS)
        if task != top.number:
            return top.predicted_s  # the task has not begun
        return top.predicted_s * max(0.0, 1.0 - passed / self._executor.checks)


def _errors(requests: list[Any]) -> dict[int, Any]:
    by_client: dict[int, list[str]] = {}
    for request in requests:
        by_client.setdefault(request.client_index, []).append(request.request_id)
    return {
        client: EngineCoreOutputs(
            outputs=[EngineCoreOutput(each, [], finish_reason=FinishReason.ERROR) for each in ids],
            finished_requests=set(ids),
        )
        for client, ids in by_client.items()
    }
