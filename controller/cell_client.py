"""A process's access to one deciding actor: the controller of a fleet, or one of its cells."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import Part, ensure_controller, ensure_observer, find_or_start
from sluice.controller.transport.channel import Endpoint, NoAnswerError, RouteChannel
from sluice.protocol.messages import (
    MAX_ENDINGS,
    MAX_KEYS,
    MAX_TURN_ENDS,
    FirstTokenWait,
    LateNotice,
    ReplicaDelta,
    ReplicaHello,
    ReportReply,
    RequestEnding,
    RouteReply,
    SyncReply,
    fits,
)
from sluice.scheduling.placement.loops import LoopTurnEnd
from sluice.scheduling.request.job import RouteDecision, RouteQuery

# A process's link to the controller or observer: its handle, whether it answers, its repair.

_PROBE_TIMEOUTS_S = (0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0)
"""Timeouts of successive probes; short at first, because a probe in flight when the actor's process
dies gets its error only about a second later."""

_PROBE_PAUSE_S = 0.05

_TELLING = frozenset(("route", "hello", "report"))
"""Methods that are answered at once, so a timeout means that the actor is unresponsive. The others
may take long."""


_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class CallMetrics:
    """Metrics of a process's calls to the controller."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.outcomes = Counter(
            "sluice_controller_calls",
            "Calls to the controller and observer by method and outcome; each decision of a batch "
            "counts.",
            ("method", "outcome"),
            registry=registry,
        )
        self.batches = Histogram(
            "sluice_controller_batch_queries",
            "Decisions asked for in one call to the controller.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )


class Link:
    """Calls an actor with a deadline; after its death or a timeout, repairs itself in the
    background.

    While the actor does not answer (``up`` is false) every call fails at once, so that no
    request waits for a second timeout. The repair looks a dead actor up again, starts one if the
    name is gone, and probes until there is an answer. For one event loop; only the constructor
    blocks."""

    def __init__(
        self,
        app_name: str,
        config: ControllerConfig,
        on_down: Callable[[], None],
        metrics: CallMetrics,
        part: Part = "controller",
        cell: int = 0,
    ) -> None:
        ensure: Callable[..., Any] = ensure_observer
        if part == "controller":
            ensure = partial(ensure_controller, cell=cell)
        self._part = part
        self._cell = cell
        self._app_name = app_name
        self._config = config
        self._on_down = on_down
        self._metrics = metrics
        self._repair_task: asyncio.Task[None] | None = None
        self._handle: Any = None
        try:
            # In a thread, because Ray warns of blocking calls on an actor's event loop.
            with ThreadPoolExecutor(1) as executor:
                self._handle = executor.submit(ensure, app_name, config).result()
        except (RayError, TimeoutError, RuntimeError) as error:
            _log.warning("the %s of %s is not reachable yet: %s", part, app_name, error)
        self.up = self._handle is not None
        """Whether the actor answered when it was last called."""

    def check(self) -> None:
        """Start a repair of the link unless calls may be made. Raises NoAnswerError: not now."""
        if not self.up:
            self._repair()
            raise NoAnswerError("unavailable")

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """As :meth:`ask`, and count the outcome."""
        try:
            answer = await self.ask(method, *args, timeout_s=timeout_s)
        except NoAnswerError as error:
            self.count(method, error.reason)
            raise
        except ValueError:
            self.count(method, "refused")
            raise
        self.count(method, "answered")
        return answer

    async def answer(self, method: str, *args: Any, timeout_s: float) -> Any:
        """As :meth:`call`, but ``None`` without an answer. Raises ValueError."""
        with contextlib.suppress(NoAnswerError):
            return await self.call(method, *args, timeout_s=timeout_s)

    def count(self, method: str, outcome: str) -> None:
        """Count one call."""
        self._metrics.outcomes.labels(method, outcome).inc()

    async def ask(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of the actor's ``method``. A stalled actor runs queued calls when it
        recovers: ``on_late`` gets a result that arrives after the timeout. Raises NoAnswerError:
        it could not be called or did not answer in time; ValueError: it refused the arguments."""
        self.check()
        try:
            return await self._wait(method, *args, timeout_s=timeout_s, on_late=on_late)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from None
            _log.error("the %s failed in %s: %s", self._part, method, error)
            raise NoAnswerError("error") from None
        except TimeoutError:
            if method in _TELLING:
                self.lost()
            raise NoAnswerError("timeout") from None
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._handle = None
            self.lost()
            raise NoAnswerError("unavailable") from None

    async def close(self) -> None:
        """Stop repairing. The actor keeps running."""
        self.up = False
        task, self._repair_task = self._repair_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _wait(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        answer = asyncio.ensure_future(getattr(self._handle, method).remote(*args))
        try:
            done, _ = await asyncio.wait((answer,), timeout=timeout_s)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if done:
            return answer.result()
        if on_late is None:
            answer.cancel()
        else:
            answer.add_done_callback(partial(_came_late, on_late))
        raise TimeoutError

    def lost(self) -> None:
        """The actor was found unresponsive: fail calls until it answers again."""
        if self.up:
            self.up = False
            _log.warning("the %s of %s does not answer", self._part, self._app_name)
            self._on_down()
        self._repair()

    def _repair(self) -> None:
        if self._repair_task is None:
            self._repair_task = asyncio.get_running_loop().create_task(self._until_up())

    async def _until_up(self) -> None:
        last = len(_PROBE_TIMEOUTS_S) - 1
        attempts = 0
        try:
            while not await self._probe(_PROBE_TIMEOUTS_S[min(attempts, last)]):
                await asyncio.sleep(_PROBE_PAUSE_S)
                attempts += 1
            self.up = True
        finally:
            self._repair_task = None
        _log.info("the %s of %s answers again", self._part, self._app_name)

    async def _probe(self, timeout_s: float) -> bool:
        """Whether the actor answers."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(
                    find_or_start, self._app_name, self._config, self._part, self._cell
                )
            await self._wait("fingerprint", timeout_s=timeout_s)
        except ActorDiedError:
            self._handle = None
            return False
        except (RayError, TimeoutError, ValueError, RuntimeError, OSError) as error:
            _log.debug("the %s of %s does not answer: %s", self._part, self._app_name, error)
            return False
        except Exception:
            # The actor must come back, so probing must continue after any error.
            _log.exception("probing the %s of %s failed", self._part, self._app_name)
            return False
        return True


def _came_late(on_late: Callable[[Any], None], answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        on_late(answer.result())


# Batches many small questions into few calls: questions of one event-loop turn are sent together.
#
# Each call has a fixed cost, which the questions of a batch share: compare the callers in the
# tables of ``sluice bench decision``.

MAX_BATCH = 256
MAX_CALLS = 8
MAX_QUEUED = 16_384

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class _Waiting(NamedTuple, Generic[Question, Answer]):
    question: Question
    # A failure is set as a result: asyncio would log an exception that is never retrieved.
    future: asyncio.Future[Answer | NoAnswerError | ValueError]
    deadline_s: float


class Coalescer(Generic[Question, Answer]):
    """Asks questions in batches, with one deadline (``timeout_s``) from question to answer.

    Questions of one event-loop turn go in one call; while ``MAX_CALLS`` calls are in flight,
    further ones are queued, at most ``MAX_QUEUED``. ``O(1)`` per question. ``send`` gets a batch
    and a timeout in seconds, and answers in order; its NoAnswerError or ValueError goes to every
    caller of the batch. ``unwanted`` gets each answer whose caller was cancelled or timed out."""

    def __init__(
        self,
        send: Callable[[list[Question], float], Awaitable[Sequence[Answer]]],
        unwanted: Callable[[Question, Answer], None],
        timeout_s: float,
    ) -> None:
        self._send = send
        self._unwanted = unwanted
        self._timeout_s = timeout_s
        self._queue: deque[_Waiting[Question, Answer]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def ask(self, question: Question) -> Answer:
        """The answer to ``question``. Raises NoAnswerError: no answer in time, or the call
        failed, or the queue is full; ValueError: the batch was refused."""
        if len(self._queue) >= MAX_QUEUED:
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
        while self._queue and len(self._tasks) < MAX_CALLS:
            batch: list[_Waiting[Question, Answer]] = []
            while self._queue and len(batch) < MAX_BATCH:
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


REPORT_TIMEOUT_S = 0.5
"""Longest wait for the answer to a report, seconds. It bounds how long a restarted controller waits
for the replicas' hellos."""

QUARANTINE_KEPT_S = 60.0
"""How long the controller's last list of quarantined replicas counts while it does not answer: the
longest quarantine before a replica is tried again, seconds."""

NOTICE_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class CellClient:
    """Calls of one process to one deciding actor, with the methods of ``ControllerClient``,
    which has the exceptions. ``on_slack`` gets the number of the cell and its slack whenever the
    cell, one of several, reports it."""

    def __init__(
        self,
        app_name: str,
        config: ControllerConfig,
        number: int,
        timeout_s: float,
        metrics: CallMetrics,
        source: int,
        on_slack: Callable[[int, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._source = source
        self._queries: Coalescer[RouteQuery, RouteDecision] = Coalescer(
            self._send_queries, self._release_unwanted, timeout_s
        )
        self._metrics = metrics
        self._number = number
        self._on_slack = on_slack
        self.closed: frozenset[str] = frozenset()
        """Its replicas that are closed, as it last reported."""
        self._quarantined: frozenset[str] = frozenset()
        self._reported_s = -inf
        # What the next sync sends: of more, the latest.
        self.endings: deque[RequestEnding] = deque(maxlen=MAX_ENDINGS)
        self.late: deque[LateNotice] = deque(maxlen=MAX_ENDINGS)
        self.turns: deque[LoopTurnEnd] = deque(maxlen=MAX_TURN_ENDS)
        self._notices: dict[str, list[Any]] = {}
        self.leaving: tuple[str, ...] = ()
        """Its replicas that are drained or about to stop, as it last reported."""
        self._notice_task: asyncio.Task[None] | None = None
        self._sync_task: asyncio.Task[None] | None = None
        self.link = Link(app_name, config, self._queries.fail_queued, metrics, cell=number)
        # The connection's end is the first sign of a dead controller.
        self._channel = RouteChannel(self._find_endpoint, self.link.lost, self._release_unwanted)

    @property
    def up(self) -> bool:
        """Whether the actor answered the last call."""
        return self.link.up

    @property
    def quarantined(self) -> frozenset[str]:
        """Its replicas that have failed or hang, as it last reported; empty when that was
        ``QUARANTINE_KEPT_S`` ago."""
        if self._clock() - self._reported_s > QUARANTINE_KEPT_S:
            return frozenset()
        return self._quarantined

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision on ``query``, or ``None`` if there was no answer in time."""
        try:
            self.link.check()
            decision = await self._queries.ask(query)
        except NoAnswerError as error:
            self.link.count("route", error.reason)
            return None
        except ValueError as error:
            _log.warning("the controller refused a batch of queries: %s", error)
            self.link.count("route", "refused")
            return None
        except asyncio.CancelledError:
            self.link.count("route", "cancelled")
            raise
        self.link.count("route", "answered")
        return decision

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        """Register a replica."""
        reply: ReportReply | None
        reply = await self.link.answer("hello", hello, timeout_s=REPORT_TIMEOUT_S)
        return reply

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        """Report a replica's changes."""
        self._channel.connect_soon()
        if not (self._channel.open and fits(delta)):
            reply: ReportReply | None
            reply = await self.link.answer("report", delta, timeout_s=REPORT_TIMEOUT_S)
            return reply
        try:
            self.link.check()
            reply = await self._channel.report(delta, REPORT_TIMEOUT_S)
        except NoAnswerError as error:
            self.link.count("report", error.reason)
            return None
        except ValueError:
            self.link.count("report", "refused")
            raise
        self.link.count("report", "answered")
        return reply

    async def delivered(self, method: str, *args: Any) -> bool:
        """Call a method without a result; whether it answered."""
        try:
            await self.link.call(method, *args, timeout_s=NOTICE_TIMEOUT_S)
        except NoAnswerError:
            return False
        return True

    def sync_soon(
        self,
        waits: Sequence[FirstTokenWait],
        missing: Callable[[Sequence[int]], None],
        answered: Callable[[], None],
    ) -> None:
        """Send endings and late notices, and ask about ``waits``, unless the last sync is under
        way. An answer sets ``leaving`` and is passed to ``answered``."""
        if self._sync_task is None:
            sync = self._sync(waits, missing, answered)
            self._sync_task = asyncio.get_running_loop().create_task(sync)

    def notify(self, method: str, item: Any) -> None:
        """Send an item for a method without an answer, which takes a list. Does not wait."""
        pending = self._notices.setdefault(method, [])
        if len(pending) >= MAX_KEYS:
            self.link.count(method, "full")
            return
        pending.append(item)
        if self._notice_task is None:
            self._notice_task = asyncio.get_running_loop().create_task(self._send_notices())

    async def close(self) -> None:
        """Send pending notices, and stop. The actor keeps running."""
        if self._notice_task is not None:
            await self._notice_task
        if self._sync_task is not None:
            await self._sync_task
        self._queries.fail_queued()
        await self._channel.close()
        await self.link.close()

    async def _send_queries(self, queries: list[RouteQuery], left_s: float) -> list[RouteDecision]:
        self._metrics.batches.observe(len(queries))
        reply: RouteReply
        if self._channel.open:
            reply = await self._channel.route(queries, left_s)
        else:
            self._channel.connect_soon()
            reply = await self.link.ask(
                "route", queries, timeout_s=left_s, on_late=partial(self._release_late, queries)
            )
        self._note(reply)
        return list(reply.decisions)

    async def _find_endpoint(self) -> Endpoint:
        endpoint: Endpoint = await self.link.ask("endpoint", timeout_s=NOTICE_TIMEOUT_S)
        return endpoint

    def _note(self, reply: RouteReply | SyncReply) -> None:
        """Keep the closed and quarantined replicas, and the slack, that come with an answer."""
        if reply.slack_s is not None:
            self._on_slack(self._number, reply.slack_s)
        if reply.closed is not None:
            self.closed = frozenset(reply.closed)
        self._quarantined = frozenset(reply.quarantined)
        self._reported_s = self._clock()

    def _release_late(self, queries: list[RouteQuery], reply: RouteReply) -> None:
        for query, decision in zip(queries, reply.decisions, strict=True):
            self._release_unwanted(query, decision)

    def _release_unwanted(self, query: RouteQuery, decision: RouteDecision) -> None:
        if decision.replica_id is not None:
            self.notify("release", query.key)
        if decision.prefill_id is not None:
            self.notify("release", query.prefill_key)

    async def _sync(
        self,
        waits: Sequence[FirstTokenWait],
        missing: Callable[[Sequence[int]], None],
        answered: Callable[[], None],
    ) -> None:
        endings, late, turns = tuple(self.endings), tuple(self.late), tuple(self.turns)
        for sent in (self.endings, self.late, self.turns):
            sent.clear()
        try:
            reply: SyncReply = await self.link.call(
                "sync", endings, late, waits, turns, timeout_s=NOTICE_TIMEOUT_S
            )
        except NoAnswerError:
            # Endings are sent again with the next sync, the latest of them. Late
            # notices are dropped: a late request is reported again by its ending.
            self.endings = deque((*endings, *self.endings), maxlen=MAX_ENDINGS)
            self.turns = deque((*turns, *self.turns), maxlen=MAX_TURN_ENDS)
        except ValueError as error:
            _log.warning("the controller refused sync: %s", error)
        else:
            self._note(reply)
            self.leaving = reply.leaving
            answered()
            if reply.late:
                missing(reply.late)
        finally:
            self._sync_task = None

    async def _send_notices(self) -> None:
        """Send the pending notices until none is left; one call at a time."""
        try:
            while self._notices:
                method = next(iter(self._notices))  # the oldest first
                items = self._notices.pop(method)
                args = (self._source, items) if method == "faulted" else (items,)
                try:
                    await self.delivered(method, *args)
                except ValueError as error:
                    _log.warning("the controller refused %s: %s", method, error)
        finally:
            self._notice_task = None
