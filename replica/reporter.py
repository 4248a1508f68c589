"""Keeps the controller's copy of this replica's state up to date.

A hello carries the whole state, each report the changes since the last acknowledged one. After an
unanswered report, which may have arrived, comes a hello. Times: the replica's monotonic clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from sluice.protocol.messages import ReplicaDelta, ReplicaHello, ReportReply
from sluice.replica.config import ReplicaConfig
from sluice.replica.engine import EngineInfo
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS
from sluice.scheduling.fleet.state import ROW, EngineState
from sluice.scheduling.roles import Role

logger = logging.getLogger(__name__)

MAX_FINISHED = 4096
"""Max ended requests in the next report; beyond it reservations expire by themselves."""

_RETRY_S = 0.1  # Min wait after an unanswered report

_TOKENS_EVERY = 4
"""Intervals after which further tokens alone are reported, while no request waits for its first:
deadlines are absolute, and the controller counts at once what it has placed since."""


class ReportTarget(Protocol):
    """The receiver of reports: a controller's client. Each call has its own deadline."""

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        """Register; ``None`` if no answer came in time."""

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        """Report; ``None`` if no answer came in time."""

    async def goodbye(self, replica_id: str) -> object:
        """Leave."""


class Membership(NamedTuple):
    """The part of a hello that describes the replica. ``capacity``: rows of the engine's state
    table; ``role``: the first one if it is ``elastic``."""

    replica_id: str
    node_id: str
    capacity: int
    role: Role = "mixed"
    elastic: bool = False


class Changes(NamedTuple):
    """The differences between two states, as in a delta."""

    slots: np.ndarray
    rows: np.ndarray
    held_slots: np.ndarray
    held: np.ndarray
    only_tokens: bool
    """Whether all requests decode, as they did before, and have further tokens."""

    @property
    def any(self) -> bool:
        """Whether there is any difference."""
        return len(self.slots) + len(self.held_slots) > 0


_SAME_IN_DECODE = ("key", "phase", "pending_tokens", "later_stages")


class AcknowledgedState:
    """The state that the controller has acknowledged; computes the difference to a newer one."""

    def __init__(self, capacity: int) -> None:
        # Records as words: NumPy compares and copies words several times faster.
        self._words = np.zeros((capacity, ROW.itemsize // 8), np.int64)
        self._slots = np.empty(0, np.int32)
        self._is_live = np.zeros(capacity, bool)
        self._held = np.zeros((HELD_SLOTS, HELD.itemsize // 8), np.int64)

    def changes(self, state: EngineState) -> Changes:
        """The changes in ``state``; a freed slot is an empty record. Compared as bytes, since a
        missing first token is a nan. ``O(live requests + slots of held chunks)``."""
        slots, rows = state.slots, state.rows
        differs = (_words(rows) != self._words[slots]).any(axis=1)
        self._is_live[slots] = True
        freed = self._slots[~self._is_live[self._slots]]
        self._is_live[slots] = False
        all_decode = bool((rows["emitted_tokens"] > 0).all())
        slots, rows = slots[differs], rows[differs]
        before = self._words[slots].view(ROW)[:, 0]
        decodes = before["emitted_tokens"] > 0
        for name in _SAME_IN_DECODE:
            decodes &= rows[name] == before[name]
        only_tokens = all_decode and bool(decodes.all()) and not len(freed)
        if len(freed):
            slots = np.concatenate([slots, freed])
            rows = np.concatenate([rows, np.zeros(len(freed), ROW)])
        # Most reports have no new chunks, and a look at the whole is faster than one at each.
        held, held_slots = _words(state.held), np.empty(0, np.int32)
        known = self._held[: len(held)]
        if not np.array_equal(held, known):
            held_slots = np.flatnonzero((held != known).any(axis=1)).astype(np.int32)
        only_tokens = only_tokens and not len(held_slots)
        return Changes(slots, rows, held_slots, state.held[held_slots], only_tokens)

    def acknowledge(self, state: EngineState) -> None:
        """The controller has acknowledged ``state``."""
        self._words[self._slots] = 0
        self._words[state.slots] = _words(state.rows)
        self._slots = state.slots
        self._held[: len(state.held)] = _words(state.held)


def _words(records: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(records).view("<i8").reshape(len(records), records.itemsize // 8)


class Reporter:
    """Reports a replica's changes, at most every ``report_interval_s``, at least every
    ``heartbeat_s``, and further tokens alone every :data:`_TOKENS_EVERY` intervals.

    The state table sends no notifications, so it is read every interval while requests are live,
    and else at the next heartbeat or ``wake``. ``read_state`` may raise ``RuntimeError``: the
    engine is gone. ``live_requests`` may count some that are not in the state yet."""

    def __init__(
        self,
        read_state: Callable[[], EngineState],
        info: EngineInfo,
        target: ReportTarget,
        config: ReplicaConfig,
        member: Membership,
        live_requests: Callable[[], int],
        hung: Callable[[EngineState], bool],
        clock: Callable[[], float] = time.monotonic,
        follow: Callable[[Role], None] = lambda _: None,
    ) -> None:
        self._read_state = read_state
        self._info = info
        self._target = target
        self._interval_s = config.report_interval_s
        self._heartbeat_s = config.heartbeat_s
        self._member = member
        self._live_requests = live_requests
        self._hung = hung
        self._clock = clock
        self._acknowledged = AcknowledgedState(member.capacity)
        self._draining = False
        self._known_draining = False
        self._known_hung = False
        self._closed = False
        self._role = member.role
        self._follow = follow
        self._finished: dict[int, None] = {}
        self._epoch: int | None = None
        self._seq = 0
        self._sent_s = float("-inf")
        self.lost = 0  # Unanswered reports
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """Whether the controller acknowledged the last report."""
        return self._epoch is not None

    def finished(self, key: int) -> None:
        """A request ended; the next report says so."""
        self._finished[key] = None
        if len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        self._woken.set()

    def drain(self) -> None:
        """This replica takes no new requests; the next report says so."""
        self._draining = True
        self._woken.set()

    def wake(self) -> None:
        """Something changed: read the state as soon as the interval allows."""
        self._woken.set()

    def start(self) -> None:
        """Report until :meth:`stop`. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="reporter")

    async def stop(self) -> None:
        """Stop, and tell the controller that this replica leaves. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._epoch = None
        await self._target.goodbye(self._member.replica_id)

    async def _run(self) -> None:
        while True:
            try:
                wait_s = await self.tick()
            except Exception:
                # A refused message or a broken client must not end the reports for good.
                logger.exception("a report to the controller failed")
                self._no_answer()
                wait_s = self._heartbeat_s
            await self._sleep(wait_s)

    async def _sleep(self, wait_s: float) -> None:
        """Wait; a wake-up shortens the wait to the rest of the interval."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        self._woken.clear()
        left_s = self._sent_s + self._interval_s - self._clock()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def tick(self) -> float:
        """Report if it is time; return the seconds until the next call."""
        try:
            state = self._read_state()
        except RuntimeError as error:
            # Send nothing: the controller then excludes this replica as stale.
            logger.warning("no report: %s", error)
            return self._heartbeat_s
        changes = self._acknowledged.changes(state)
        hung = self._hung(state)
        known = self._draining == self._known_draining and hung == self._known_hung
        epoch = self._epoch
        silent_s = self._clock() - self._sent_s
        waits = changes.only_tokens and silent_s < _TOKENS_EVERY * self._interval_s
        changed = (changes.any and not waits) or bool(self._finished) or not known
        if epoch is None:
            reply = await self._send_hello(state, hung)
        elif changed or silent_s >= self._heartbeat_s:
            reply = await self._send_delta(state, epoch, changes, hung)
        else:
            return self._interval_s if self._busy(state) else self._heartbeat_s - silent_s
        if reply is None:
            self._no_answer()
            return _RETRY_S
        if reply.resync:
            self._epoch = None
            return self._interval_s
        self._epoch = reply.epoch
        self._closed = reply.closed
        if reply.role is not None and reply.role != self._role:
            self._role = reply.role
            self._follow(self._role)
        self._acknowledged.acknowledge(state)
        return self._interval_s if self._busy(state) else self._heartbeat_s

    def _busy(self, state: EngineState) -> bool:
        return len(state.rows) > 0 or bool(self._finished) or self._live_requests() > 0

    async def _send_hello(self, state: EngineState, hung: bool) -> ReportReply | None:
        info = self._info
        draining = self._draining
        held_slots = np.flatnonzero(state.held["hash"]).astype(np.int32)
        self._count_report()
        reply = await self._target.hello(
            ReplicaHello(
                replica_id=self._member.replica_id,
                node_id=self._member.node_id,
                model=info.model,
                policy=info.policy,
                local_order=POLICIES[info.policy].local_order,
                role=self._role,
                max_batch_tokens=info.max_batch_tokens,
                max_sequences=info.max_sequences,
                block_tokens=info.block_tokens,
                capacity=self._member.capacity,
                profile=info.profile,
                seq=self._seq,
                now_s=state.now_s,
                slots=state.slots,
                rows=state.rows,
                summary=state.summary,
                draining=draining,
                held_slots=held_slots,
                held=state.held[held_slots],
                closed=self._closed,
                preempts=info.preempts,
                hung=hung,
                elastic=self._member.elastic,
            )
        )
        self._known_draining, self._known_hung = draining, hung
        return reply

    async def _send_delta(
        self, state: EngineState, epoch: int, changes: Changes, hung: bool
    ) -> ReportReply | None:
        finished = tuple(self._finished)
        draining = self._draining
        self._count_report()
        reply = await self._target.report(
            ReplicaDelta(
                replica_id=self._member.replica_id,
                epoch=epoch,
                seq=self._seq,
                now_s=state.now_s,
                slots=changes.slots,
                rows=changes.rows,
                summary=state.summary,
                finished=finished,
                draining=draining,
                held_slots=changes.held_slots,
                held=changes.held,
                hung=hung,
            )
        )
        if reply is not None and not reply.resync:
            for key in finished:
                self._finished.pop(key, None)
        self._known_draining, self._known_hung = draining, hung
        return reply

    def _count_report(self) -> None:
        self._seq += 1
        self._sent_s = self._clock()

    def _no_answer(self) -> None:
        self._epoch = None
        self.lost += 1
