"""Runs one batch, from the check of its input to its result files, by the router that holds its
lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from math import inf

from sluice.router.batches.disk import DiskThreads, Lock
from sluice.router.batches.line_caller import Admitted, LineCaller
from sluice.router.batches.lines import BatchRequest, check_lines, slices
from sluice.router.batches.metrics import BatchMetrics, LineOutcome
from sluice.router.batches.places import LinePlaces
from sluice.router.batches.records import BatchRecord, Status
from sluice.router.batches.results import Reply, ResultLog, answered, not_run
from sluice.router.batches.store import ERRORS, INPUT, OUTPUT, Store
from sluice.router.batches_config import BatchesConfig
from sluice.router.tenancy.limits import Client

SAVE_S = 1.0
"""Interval at which the progress of a batch is written to disk and its storage quota is checked,
seconds. A crash loses no result; a power failure loses the results since the last write, and their
lines run again."""

_log = logging.getLogger(__name__)

_EXPIRED = "This request could not be run before the completion window had passed."
_CANCELLED = "The batch was cancelled before this request had been run."


@dataclass(frozen=True)
class Resources:
    """Resources that all batches of a router share.

    Attributes:
        max_line_bytes: maximum length of an input line.
        places: slots for the lines in flight.
        now: Unix seconds.
    """

    config: BatchesConfig
    max_line_bytes: int
    store: Store
    disk: DiskThreads
    caller: LineCaller
    places: LinePlaces
    metrics: BatchMetrics
    now: Callable[[], float]


class BatchRun:
    """Runs a batch, or the remaining part of it.

    The run may end at any point, also by a crash: the next holder of the lease resumes from the
    state on disk. Every line of the input gets one result.

    Args:
        lock: the lease; released at the end.
        client: the batch's owner.
    """

    def __init__(
        self, resources: Resources, lock: Lock, record: BatchRecord, client: Client
    ) -> None:
        self._resources = resources
        self._lock = lock
        self._record = record
        self._client = client
        self._ending = asyncio.Event()
        self._had_room_s = -inf
        self.look(record, client)

    def look(self, record: BatchRecord, client: Client | None) -> None:
        """Update the run: whether the record on disk is cancelled, whether the batch has expired,
        and the client's current limits, which apply to lines sent from now on. ``client`` is
        ``None`` if its key was removed; then the caller must stop the run."""
        self._client = client or self._client
        if record.cancelling and not self._record.cancelling:
            reached_s = {**self._record.reached_s}
            reached_s[Status.CANCELLING] = record.reached_s[Status.CANCELLING]
            self._record = self._record.model_copy(update={"reached_s": reached_s})
        if self._record.cancelling or self._resources.now() >= self._record.expires_s:
            self._ending.set()

    async def run(self) -> None:
        """Run it to its end.

        Raises:
            Exception: the run failed, because of the disk for example. No result is lost, and the
                batch can be run again.
        """
        try:
            self._resources.metrics.running.inc()
            if self._record.status is Status.VALIDATING and not await self._check():
                return
            paths = [self._resources.store.path(self._record, name) for name in (OUTPUT, ERRORS)]
            log = await self._resources.disk.run(ResultLog, *paths)
            try:
                if not self._ending.is_set():
                    await self._answer(log)
                await self._finish(log)
            finally:
                await self._resources.disk.run(log.close)
        finally:
            self._resources.metrics.running.dec()
            self._lock.release()

    async def _check(self) -> bool:
        """Whether the input is valid. Otherwise the batch fails."""
        config, record = self._resources.config, self._record
        checked = await self._resources.disk.run(
            check_lines,
            self._resources.store.path(record, INPUT),
            record.endpoint,
            config.max_lines,
            self._resources.max_line_bytes,
        )
        if not checked.faults:
            await self._move(Status.IN_PROGRESS, total=checked.total)
            return True
        await self._move(Status.FAILED, faults=checked.faults)
        await self._resources.disk.run(self._resources.store.drop_work, record)
        self._resources.metrics.ended(Status.FAILED)
        return False

    async def _answer(self, log: ResultLog) -> None:
        """Run the lines without a result until all have one, or until the batch must end."""
        work = asyncio.create_task(self._run_lines(log))
        ending = asyncio.create_task(self._ending.wait())
        saved = asyncio.Event()
        saving = asyncio.create_task(self._save_progress(log, saved))
        try:
            await asyncio.wait({work, ending, saving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            work.cancel()
            saved.set()
            await asyncio.wait({work, ending, saving})
        for task in (work, saving):
            if not task.cancelled():
                task.result()

    async def _run_lines(self, log: ResultLog) -> None:
        with closing(self._slices()) as pending:
            async with asyncio.TaskGroup() as group:
                while lines := await self._resources.disk.run(_next, pending):
                    await self._wait_for_room()
                    for line in lines:
                        if not log.has(line.custom_id):
                            await self._begin(line, log, group)

    async def _begin(self, line: BatchRequest, log: ResultLog, group: asyncio.TaskGroup) -> None:
        # First, and one line at a time: a line that waits for its client's rate limit takes no slot
        # from other clients' lines, and a batch has only one such line.
        admitted = await self._resources.caller.admit(
            line, self._record.endpoint, lambda: self._client
        )
        if isinstance(admitted, Reply):
            await self._keep(line, admitted, log)
            return
        try:
            give_back = await self._resources.places.take(admitted.client)
        except BaseException:
            admitted.drop()
            raise

        def ended(_: object) -> None:
            admitted.drop()
            give_back()

        try:
            task = group.create_task(self._run_line(admitted, log))
        except BaseException:
            ended(None)
            raise
        # Not in the task: a task that is cancelled before it starts runs no code.
        task.add_done_callback(ended)

    async def _run_line(self, admitted: Admitted, log: ResultLog) -> None:
        with self._resources.metrics.in_flight.track_inprogress():
            reply = await self._resources.caller.run(admitted)
        await self._keep(admitted.line, reply, log)

    async def _keep(self, line: BatchRequest, reply: Reply, log: ResultLog) -> None:
        ok = await self._resources.disk.run(_write, log, line, reply)
        self._resources.metrics.line(LineOutcome.OK if ok else LineOutcome.ERROR)

    async def _wait_for_room(self) -> None:
        clock = asyncio.get_running_loop().time
        if clock() - self._had_room_s < SAVE_S:
            return
        store, owner = self._resources.store, self._record.owner
        if not await self._resources.disk.run(store.has_room, owner):
            _log.warning("batch %s waits: no storage is left for its results", self._record.id)
            # Other processes free storage, too, so there is no event to wait for.
            while not await self._resources.disk.run(store.has_room, owner):  # noqa: ASYNC110
                await asyncio.sleep(self._resources.config.poll_s)
        self._had_room_s = clock()

    async def _save_progress(self, log: ResultLog, saved: asyncio.Event) -> None:
        while not saved.is_set():
            try:
                async with asyncio.timeout(SAVE_S):
                    await saved.wait()
            except TimeoutError:
                counts = (log.completed, log.failed)
                if counts != (self._record.completed, self._record.failed):
                    await self._resources.disk.run(log.sync)
                    update = {"completed": counts[0], "failed": counts[1]}
                    await self._save(self._record.model_copy(update=update))

    async def _finish(self, log: ResultLog) -> None:
        """Write a result with the reason for every line without one, and publish the results."""
        store, disk = self._resources.store, self._resources.disk
        await self._move(Status.FINALIZING)
        outcome, code, message = (
            (LineOutcome.CANCELLED, "batch_cancelled", _CANCELLED)
            if self._record.cancelling
            else (LineOutcome.EXPIRED, "batch_expired", _EXPIRED)
        )
        missing = await disk.run(self._fill, log, code, message)
        await disk.run(log.sync)
        files = {
            "output_file_id": await disk.run(store.publish, self._record, OUTPUT),
            "error_file_id": await disk.run(store.publish, self._record, ERRORS),
        }
        if self._record.cancelling:
            status = Status.CANCELLED
        else:
            status = Status.EXPIRED if missing else Status.COMPLETED
        await self._move(status, completed=log.completed, failed=log.failed, **files)
        await disk.run(store.drop_work, self._record)
        self._resources.metrics.line(outcome, missing)
        self._resources.metrics.ended(status)
        _log.info("batch %s ended: %s", self._record.id, status.value)

    def _fill(self, log: ResultLog, code: str, message: str) -> int:
        missing = 0
        if log.completed + log.failed < self._record.total:
            for line in chain.from_iterable(self._slices()):
                if not log.has(line.custom_id):
                    log.add(not_run(line, code, message))
                    missing += 1
        return missing

    def _slices(self) -> Generator[list[BatchRequest], None, None]:
        path = self._resources.store.path(self._record, INPUT)
        return slices(path, self._record.endpoint, self._resources.max_line_bytes)

    async def _move(self, status: Status, **changes: object) -> None:
        await self._save(self._record.at(status, self._resources.now(), **changes))

    async def _save(self, record: BatchRecord) -> None:
        self._record = record
        await self._resources.disk.run(self._resources.store.save, record)


def _write(log: ResultLog, line: BatchRequest, reply: Reply) -> bool:
    result = answered(line, reply)
    log.add(result)
    return result.ok


def _next(pending: Iterator[list[BatchRequest]]) -> list[BatchRequest]:
    return next(pending, [])
