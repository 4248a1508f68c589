"""Finds batches that no router runs, and runs them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NamedTuple

from sluice.router.batches.records import BatchRecord
from sluice.router.batches.run import BatchRun, Resources
from sluice.router.batches.state import BatchState
from sluice.router.tenancy.limits import ANYONE, Client

SWEEP_S = 60.0
"""Interval at which expired files and batches are deleted, seconds."""

RETRY_S = 30.0
"""Pause before a failed run of a batch is retried, seconds: the disk may be full."""

_log = logging.getLogger(__name__)


class _Running(NamedTuple):
    run: BatchRun
    owner: str
    task: asyncio.Task[None]


class Runner:
    """Runs batches in one router; the runners of all routers share all batches.

    Each looks every ``poll_s`` for batches that no living router runs, and claims some while it has
    free slots. So a new batch starts at once in the router where it was created, and a batch whose
    router died resumes on another one after ``poll_s``.

    Args:
        holder: finds the client with an owner's name. Batches of an owner without a client, such
            as one whose key was removed, do not run; they only expire.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resources: Resources,
        holder: Callable[[str], Client | None],
        clock: Callable[[], float],
    ) -> None:
        self._resources = resources
        self._holder = holder
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
        """Scan at once: a batch was added or cancelled."""
        self._woken.set()

    async def stop(self) -> None:
        """Release all batches. Their lines in flight run again, later or in another router.
        Idempotent."""
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
                # The disk may have failed, for example. The next scan may succeed.
                _log.exception("could not scan the batches; retrying")
            try:
                async with asyncio.timeout(self._resources.config.poll_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        resources = self._resources
        if self._clock() - self._swept_s >= SWEEP_S:
            self._swept_s = self._clock()
            await resources.store.sweep()
        waiting = []
        for record in await resources.store.ask(BatchState.unfinished):
            if record.id in self._runs:
                self._look_after(self._runs[record.id], record)
            else:
                waiting.append(record)
        ids = {record.id for record in waiting}
        self._not_before_s = {
            batch_id: time_s for batch_id, time_s in self._not_before_s.items() if batch_id in ids
        }
        for record in self._in_turn(waiting):
            await self._try_to_run(record)

    def _look_after(self, running: _Running, record: BatchRecord) -> None:
        client = self._holder(record.owner)
        running.run.look(record, client)
        taken_away = client is None and not self._is_to_end(record)
        # Only once: a second cancellation would interrupt the orderly end.
        if taken_away and not running.task.cancelling():
            running.task.cancel()

    def _in_turn(self, waiting: list[BatchRecord]) -> list[BatchRecord]:
        """Sort: batches that must end come first, as that is little work. Then one batch of each
        owner before any owner's second, the running ones included; else the oldest first, which is
        their given order."""
        before = Counter(running.owner for running in self._runs.values())
        turns = []
        for record in waiting:
            turns.append((not self._is_to_end(record), before[record.owner], record))
            before[record.owner] += 1
        return [record for *_, record in sorted(turns, key=lambda turn: turn[:2])]

    async def _try_to_run(self, record: BatchRecord) -> None:
        """Run a batch if there is a slot for it, and no other router runs it."""
        resources = self._resources
        client = self._holder(record.owner)
        if self._is_to_end(record):
            places = 2 * resources.config.max_running
        else:
            places = resources.config.max_running if client is not None else 0
        held_up = self._clock() < self._not_before_s.get(record.id, -inf)
        if held_up or len(self._runs) >= places:
            return
        claimed = await resources.store.claim(record.id)
        if claimed is None:
            return
        run = BatchRun(resources, claimed, client or ANYONE)
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
        _log.error("batch %s failed to run; retrying later", batch_id, exc_info=error)
        self._resources.metrics.put_off.inc()
        self._not_before_s[batch_id] = self._clock() + RETRY_S
