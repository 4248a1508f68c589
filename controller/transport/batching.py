"""Batches many small questions into few calls: questions of one event-loop turn are sent together.

Each call has a fixed cost, which the questions of a batch share: compare the callers in the tables
of ``sluice bench decision``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from sluice.controller.transport.failure import NoAnswerError

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class _Waiting(NamedTuple, Generic[Question, Answer]):
    question: Question
    # A failure is set as a result: asyncio would log an exception that is never retrieved.
    future: asyncio.Future[Answer | NoAnswerError | ValueError]
    deadline_s: float


class Coalescer(Generic[Question, Answer]):
    """Asks questions in batches, with one deadline from question to answer.

    Questions of one event-loop turn go in one call; while ``calls`` calls are in flight, further
    questions are queued. ``O(1)`` per question.

    Args:
        send: sends a batch, with a timeout in seconds; returns the answers in the order of the
            questions. It may raise :class:`NoAnswerError` or ``ValueError``, which is then raised
            to every caller of the batch.
        unwanted: called with each answer whose caller was cancelled or timed out before.
        timeout_s: longest wait of a caller, seconds.
        batch: most questions in a call. calls: most calls in flight. queue: most questions that
            wait for a call.
    """

    def __init__(
        self,
        send: Callable[[list[Question], float], Awaitable[Sequence[Answer]]],
        unwanted: Callable[[Question, Answer], None],
        timeout_s: float,
        batch: int = 256,
        calls: int = 8,
        queue: int = 16_384,
    ) -> None:
        if min(timeout_s, batch, calls, queue) <= 0:
            raise ValueError("timeout_s, batch, calls and queue must be positive")
        self._send = send
        self._unwanted = unwanted
        self._timeout_s = timeout_s
        self._batch = batch
        self._calls = calls
        self._limit = queue
        self._queue: deque[_Waiting[Question, Answer]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def ask(self, question: Question) -> Answer:
        """The answer to ``question``.

        Raises:
            NoAnswerError: no answer in time, or the call failed, or the queue is full.
            ValueError: the batch was refused.
        """
        if len(self._queue) >= self._limit:
            raise NoAnswerError("full")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        waiting: _Waiting[Question, Answer] = _Waiting(question, loop.create_future(), deadline_s)
        self._queue.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        try:
            async with asyncio.timeout_at(deadline_s):
                outcome = await waiting.future
        except TimeoutError:
            self._abandon(waiting)
            raise NoAnswerError("timeout") from None
        except asyncio.CancelledError:
            self._abandon(waiting)
            raise
        if isinstance(outcome, NoAnswerError | ValueError):
            raise outcome
        return outcome

    def fail_queued(self) -> None:
        """Fail every question that was not sent yet with ``unavailable``."""
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.future.done():
                waiting.future.set_result(NoAnswerError("unavailable"))

    def _abandon(self, waiting: _Waiting[Question, Answer]) -> None:
        """Report an answer as unwanted that arrived in the loop turn in which its caller left."""
        future = waiting.future
        if future.done() and not future.cancelled():
            outcome = future.result()
            if not isinstance(outcome, NoAnswerError | ValueError):
                self._unwanted(waiting.question, outcome)

    def _flush(self) -> None:
        self._scheduled = False
        while self._queue and len(self._tasks) < self._calls:
            batch: list[_Waiting[Question, Answer]] = []
            while self._queue and len(batch) < self._batch:
                waiting = self._queue.popleft()
                if not waiting.future.done():
                    batch.append(waiting)
            if batch:
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._flush()
        if not task.cancelled():
            task.result()

    async def _run(self, batch: list[_Waiting[Question, Answer]]) -> None:
        left_s = batch[-1].deadline_s - asyncio.get_running_loop().time()
        questions = [waiting.question for waiting in batch]
        try:
            answers = await self._send(questions, left_s)
        except (NoAnswerError, ValueError) as error:
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_result(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.future.done():
                self._unwanted(waiting.question, answer)
            else:
                waiting.future.set_result(answer)
