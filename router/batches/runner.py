"""Finds batches that nobody runs, and runs them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NamedTuple

from router.batches.records import BatchRecord
from router.batches.run import BatchRun, Resources
from router.tenancy.auth import KeyRing
from router.tenancy.limits import ANYONE

SWEEP_S = 60.0
"""How often what has expired is deleted, seconds."""

RETRY_S = 30.0
"""Pause before a batch is run on that could not be, seconds: the disk may be full."""

_log = logging.getLogger(__name__)


class _Running(NamedTuple):
    run: BatchRun
    owner: str
    task: asyncio.Task[None]


class Runner:
    """Runs the batches of one router, and with those of other routers all batches.

    Each looks at the shared folder every ``poll_s``, and takes the lease of a batch that has none
    while it has places. So a new batch starts at once where it was made, and one whose router died
    goes on elsewhere after ``poll_s``.

    Args:
        keys: who may have batches run: one whose key is gone gets its batches ended only by time.
        clock: monotonic seconds.
    """

    def __init__(self, resources: Resources, keys: KeyRing, clock: Callable[[], float]) -> None:
        self._resources = resources
        self._keys = keys
        self._clock = clock
        self._woken = asyncio.Event()
        self._runs: dict[str, _Running] = {}
        self._not_before_s: dict[str, float] = {}
        self._swept_s = -inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._loop())

    def wake(self) -> None:
        """Look at once: something was added or cancelled."""
        self._woken.set()

    async def stop(self) -> None:
        """Let go of all batches. What was under way runs again elsewhere or later. Idempotent."""
        task, self._task = self._task, None
        tasks = [running.task for running in self._runs.values()]
        tasks += [task] if task is not None else []
        for each in tasks:
            each.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _loop(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._look()
            except Exception:
                # The disk, say. The next look may do better.
                _log.exception("the batches could not be looked at")
            try:
                async with asyncio.timeout(self._resources.config.poll_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        resources = self._resources
        if self._clock() - self._swept_s >= SWEEP_S:
            self._swept_s = self._clock()
            await resources.disk.run(resources.store.sweep)
        waiting = []
        for record in await resources.disk.run(resources.store.unfinished):
            if record.id in self._runs:
                self._look_after(self._runs[record.id], record)
            else:
                waiting.append(record)
        ids = {record.id for record in waiting}
        self._not_before_s = {
            batch_id: time_s for batch_id, time_s in self._not_before_s.items() if batch_id in ids
        }
        for record in self._in_turn(waiting):
            try:
                await self._try_to_run(record)
            except OSError as error:  # of this one's folder; the others may do
                self._put_off(record.id, error)

    def _look_after(self, running: _Running, record: BatchRecord) -> None:
        client = self._keys.holder(record.owner)
        running.run.look(record, client)
        taken_away = client is None and not self._is_to_end(record)
        # Once: it is to end in order, and a second time would break that off.
        if taken_away and not running.task.cancelling():
            running.task.cancel()

    def _in_turn(self, waiting: list[BatchRecord]) -> list[BatchRecord]:
        """Those that are to end first, as that is little work. Then one of each owner's before any
        owner's second, the running ones included; else the oldest first, as they come."""
        before = Counter(running.owner for running in self._runs.values())
        turns = []
        for record in waiting:
            turns.append((not self._is_to_end(record), before[record.owner], record))
            before[record.owner] += 1
        return [record for *_, record in sorted(turns, key=lambda turn: turn[:2])]

    async def _try_to_run(self, record: BatchRecord) -> None:
        """Run a batch if there is a place for it, and nobody else does."""
        resources = self._resources
        client = self._keys.holder(record.owner)
        if self._is_to_end(record):
            places = 2 * resources.config.max_running
        else:
            places = resources.config.max_running if client is not None else 0
        held_up = self._clock() < self._not_before_s.get(record.id, -inf)
        if held_up or len(self._runs) >= places:
            return
        lease = await resources.disk.run(resources.store.lease, record)
        if lease is None:
            return
        run = BatchRun(resources, *lease, client or ANYONE)
        task = asyncio.create_task(run.run())
        self._runs[record.id] = _Running(run, record.owner, task)
        task.add_done_callback(partial(self._ended, record.id))

    def _is_to_end(self, record: BatchRecord) -> bool:
        return record.cancelling or self._resources.now() >= record.expires_s

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._runs[batch_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._put_off(batch_id, error)
        self.wake()

    def _put_off(self, batch_id: str, error: BaseException) -> None:
        _log.error("batch %s is put off", batch_id, exc_info=error)
        self._resources.metrics.put_off.inc()
        self._not_before_s[batch_id] = self._clock() + RETRY_S
