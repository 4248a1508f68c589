"""Finds batches that no router runs, and runs them."""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from sluice.router.batches.lines import (
    Admitted,
    BatchMetrics,
    BatchRequest,
    LineCaller,
    LineOutcome,
    Lines,
    Reply,
    WindowOutcome,
    answered,
    check_lines,
    not_run,
    slices,
)
from sluice.router.batches.state import (
    BatchLostError,
    BatchRecord,
    BatchState,
    LineFault,
    Result,
    Status,
)
from sluice.router.batches.store import Store
from sluice.router.batches.windows import Windows, refused
from sluice.router.config import HOUR_S, BatchesConfig
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.tenancy.limits import ANYONE, Client

# Runs one batch, from the check of its input to its result files, in the router that claimed it.
#
# A result is kept in the state as soon as its line has ended, and survives a power failure from
# then on: if the router dies, the next one runs only the lines without a result. Those that were
# in flight run again; each line has one result, whatever happens.

# Limits the batch lines in flight in one router: in total, and per client.


class _Waiting(NamedTuple):
    client: Callable[[], Client]
    granted: asyncio.Future[str]
    due_s: float


class LinePlaces:
    """Slots for lines, those of promised batches by deadline, then in order of request. A client
    holds no more than it may have requests in
    flight, and the lines of others behind it do not wait for it."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._of: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    async def take(self, client: Callable[[], Client], due_s: float = inf) -> Callable[[], None]:
        """Wait for a slot, and return what releases it, to be called once. ``due_s``: when its
        batch was promised."""
        waiting = _Waiting(client, asyncio.get_running_loop().create_future(), due_s)
        insort(self._waiting, waiting, key=lambda each: each.due_s)
        self._hand_out()
        try:
            owner = await waiting.granted
        except asyncio.CancelledError:
            if waiting.granted.cancelled():
                self._hand_out()  # which forgets it
            else:  # it was granted, but the caller will not learn that
                self._give_back(waiting.granted.result())
            raise
        return lambda: self._give_back(owner)

    def _hand_out(self) -> None:
        kept = []
        for waiting in self._waiting:
            if waiting.granted.cancelled():
                continue
            client = waiting.client()
            most = client.caps.max_in_flight
            if not self._free or (most is not None and self._of[client.owner] >= most):
                kept.append(waiting)
                continue
            self._free -= 1
            self._of[client.owner] += 1
            waiting.granted.set_result(client.owner)
        self._waiting = kept

    def _give_back(self, owner: str) -> None:
        self._free += 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]  # clients come and go
        self._hand_out()


POLL_S = 2.0  # interval at which a router looks for batches that no router runs, seconds
MIN_HURRY_S = 1.0  # shortest objective of a line whose batch is behind, seconds
SPACE_S = 1.0  # interval at which a batch checks whether there is space for its results, seconds


_EXPIRED = "This request could not be run before the completion window had passed."
_CANCELLED = "The batch was cancelled before this request had been run."


@dataclass(frozen=True)
class Resources:
    """What all batches of a router share. ``now`` gives Unix seconds; ``promises_only``: a batch
    whose window cannot be promised is refused."""

    config: BatchesConfig
    max_line_bytes: int
    store: Store
    caller: LineCaller
    places: LinePlaces
    metrics: BatchMetrics
    windows: Windows
    promises_only: bool
    now: Callable[[], float]


class BatchRun:
    """Runs a claimed batch and releases it. It may end at any point, also by a crash: the next
    router resumes from the state."""

    def __init__(self, resources: Resources, record: BatchRecord, client: Client) -> None:
        self._resources = resources
        self._store = resources.store
        self._record = record
        self._client = client
        self._ending = asyncio.Event()
        self._unwritten: list[Result] = []
        self._writing = asyncio.Lock()
        self._answered: set[int] = set()
        self._had_space_s = -inf
        self.look(record, client)

    async def mark(self, behind: bool) -> None:
        """Note whether it is behind the promise of its window: then its lines hurry."""
        if behind != self._record.behind:
            self._record = self._record.model_copy(update={"behind": behind})
            self._resources.metrics.behind.inc(1 if behind else -1)
            with suppress(BatchLostError):  # it has just ended
                await self._store.ask(BatchState.save, self._record)

    def look(self, record: BatchRecord, client: Client | None) -> None:
        """Update cancellation, expiry, and the limits for lines sent from now on. ``client`` is
        ``None`` if its key was removed; then the caller must stop the run."""
        self._client = client or self._client
        self._rest = record.rest
        if record.cancelling and not self._record.cancelling:
            reached_s = {**self._record.reached_s}
            reached_s[Status.CANCELLING] = record.reached_s[Status.CANCELLING]
            self._record = self._record.model_copy(update={"reached_s": reached_s})
        if self._record.cancelling or self._resources.now() >= self._record.expires_s:
            self._ending.set()

    async def run(self) -> None:
        """Run it to its end. If it raises, no written result is lost, and it can be run again."""
        try:
            self._resources.metrics.running.inc()
            self._resources.metrics.behind.inc(self._record.behind)
            if self._record.status is Status.VALIDATING and not await self._check():
                return
            self._answered = await self._store.ask(BatchState.answered, self._record.id)
            if not self._ending.is_set():
                await self._answer()
            await self._finish()
        except BatchLostError as error:
            _log.warning("stopped running a batch: %s", error)
        finally:
            self._resources.metrics.running.dec()
            self._resources.metrics.behind.dec(self._record.behind)
            await self._store.ask(BatchState.release, self._record.id)

    async def _check(self) -> bool:
        record = self._record
        checked = await self._store.read(
            record.input_file_id,
            partial(
                check_lines,
                url=record.endpoint,
                max_line_bytes=self._resources.max_line_bytes,
            ),
        )
        faults = checked.faults or await self._promise(checked.lines, checked.total)
        if not faults:
            return True
        await self._store.ask(BatchState.end, self._at(Status.FAILED, faults=faults), [])
        self._resources.metrics.ended(Status.FAILED)
        return False

    async def _promise(
        self, lines: Mapping[str | None, Lines], total: int
    ) -> tuple[LineFault, ...]:
        """Begin, with a promise of the window if that is possible; why not, if it is required."""
        resources, now = self._resources, self._resources.now
        endpoint = INFERENCE_PATHS[self._record.endpoint]
        while True:
            need = await resources.windows.need(lines, endpoint, self._client)
            if need is not None or not resources.promises_only or self._ending.is_set():
                break
            await asyncio.sleep(POLL_S)  # the controller has just started
        if need is not None and need.work_s:
            begun = self._at(Status.IN_PROGRESS, total=total, work_s=dict(need.work_s))
            test = partial(need.nearest_s, now_s=now())
            nearest_s = await self._store.ask(BatchState.promise, begun, test)
            if nearest_s <= begun.expires_s - now():
                # Made again: it may have been cancelled meanwhile.
                self._record = self._at(Status.IN_PROGRESS, total=total, work_s=begun.work_s)
                resources.metrics.window(WindowOutcome.PROMISED)
                return ()
            resources.metrics.window(WindowOutcome.REFUSED)
            if resources.promises_only:
                return (refused(self._record, nearest_s),)
        await self._move(Status.IN_PROGRESS, total=total)
        return ()

    async def _answer(self) -> None:
        work = asyncio.create_task(self._run_lines())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            ending.cancel()
            await asyncio.wait({work, ending})
            # What has ended is kept, also where this run is cancelled.
            await self._write()
        if not work.cancelled():
            work.result()

    async def _run_lines(self) -> None:
        async with aclosing(self._slices()) as pending, asyncio.TaskGroup() as group:
            async for lines in pending:
                await self._wait_for_space()
                for line in lines:
                    if line.number not in self._answered:
                        await self._begin(line, group)

    async def _begin(self, line: BatchRequest, group: asyncio.TaskGroup) -> None:
        # First, and one line at a time: a line that waits for its client's rate limit takes no slot
        # from other clients' lines, and a batch has only one such line.
        admitted = await self._resources.caller.admit(
            line, self._record.endpoint, lambda: self._client
        )
        if isinstance(admitted, Reply):
            await self._keep(answered(line, admitted))
            return
        try:
            due_s = self._record.expires_s if self._record.work_s else inf
            give_back = await self._resources.places.take(admitted.client, due_s)
        except BaseException:
            admitted.drop()
            raise

        def ended(_: object) -> None:
            admitted.drop()
            give_back()

        try:
            task = group.create_task(self._run_line(admitted))
        except BaseException:
            ended(None)
            raise
        # Not in the task: a task that is cancelled before it starts runs no code.
        task.add_done_callback(ended)

    async def _run_line(self, admitted: Admitted) -> None:
        with self._resources.metrics.in_flight.track_inprogress():
            reply = await self._resources.caller.run(admitted, self._hurry_s)
        await self._keep(answered(admitted.line, reply))

    def _hurry_s(self) -> float | None:
        """In which time a line should end, seconds, while the batch is behind: as many lines are in
        flight as may be, and the rest is to be answered in the time that is left (Little's law)."""
        if not self._record.behind:
            return None
        left_s = max(MIN_HURRY_S, self._record.expires_s - self._resources.now())
        lines = max(1.0, self._rest * self._record.total)
        part_s = left_s * min(1.0, self._resources.config.max_lines_in_flight / lines)
        return min(max(MIN_HURRY_S, part_s), HOUR_S)

    async def _keep(self, result: Result) -> None:
        """Write a result. Results that end while others are written are written together."""
        self._resources.metrics.line(LineOutcome.OK if result.ok else LineOutcome.ERROR)
        self._unwritten.append(result)
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            results, self._unwritten = self._unwritten, []
            if results:
                await self._store.ask(BatchState.add_results, self._record.id, results)

    async def _wait_for_space(self) -> None:
        clock = asyncio.get_running_loop().time
        if clock() - self._had_space_s < SPACE_S:
            return
        owner = self._record.owner
        if not await self._store.ask(BatchState.has_space, owner):
            _log.warning("batch %s waits: no storage is left for its results", self._record.id)
            # Other processes free storage, too, so there is no event to wait for.
            while not await self._store.ask(BatchState.has_space, owner):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        self._had_space_s = clock()

    async def _finish(self) -> None:
        """Write a result with the reason for every line without one, and publish the results."""
        self._answered = await self._store.ask(BatchState.answered, self._record.id)
        missing = self._record.total - len(self._answered)
        await self._move(Status.FINALIZING, cut_short=self._record.cut_short or missing > 0)
        outcome, code, message = (
            (LineOutcome.CANCELLED, "batch_cancelled", _CANCELLED)
            if self._record.cancelling
            else (LineOutcome.EXPIRED, "batch_expired", _EXPIRED)
        )
        if missing:
            await self._fill(code, message)
        written = [await self._store.write_results(self._record, ok) for ok in (True, False)]
        output_id, error_id = (file.id if file else None for file in written)
        if self._record.cancelling:
            status = Status.CANCELLED
        else:
            status = Status.EXPIRED if self._record.cut_short else Status.COMPLETED
        record = self._at(status, output_file_id=output_id, error_file_id=error_id)
        await self._store.ask(BatchState.end, record, [file for file in written if file])
        await self._store.delete_unused(record.input_file_id)
        self._resources.metrics.line(outcome, missing)
        self._resources.metrics.ended(status)
        if record.work_s and not record.cancelling:
            kept = WindowOutcome.MISSED if record.cut_short else WindowOutcome.KEPT
            self._resources.metrics.window(kept)
        _log.info("batch %s ended: %s", record.id, status.value)

    async def _fill(self, code: str, message: str) -> None:
        async with aclosing(self._slices()) as pending:
            async for lines in pending:
                results = [
                    not_run(line, code, message)
                    for line in lines
                    if line.number not in self._answered
                ]
                await self._store.ask(BatchState.add_results, self._record.id, results)

    def _slices(self) -> AsyncGenerator[list[BatchRequest], None]:
        read = partial(
            slices, url=self._record.endpoint, max_line_bytes=self._resources.max_line_bytes
        )
        return self._store.stream(self._record.input_file_id, read)

    def _at(self, status: Status, **changes: object) -> BatchRecord:
        return self._record.at(status, self._resources.now(), **changes)

    async def _move(self, status: Status, **changes: object) -> None:
        self._record = self._at(status, **changes)
        await self._store.ask(BatchState.save, self._record)


SWEEP_S = 60.0  # interval at which expired files and batches are deleted, seconds
RETRY_S = 30.0  # pause before a failed run of a batch is retried, seconds: the disk may be full

_log = logging.getLogger(__name__)


class _Running(NamedTuple):
    run: BatchRun
    owner: str
    task: asyncio.Task[None]


class Runner:
    """Runs batches in one router; the runners of all routers share all batches.

    Each claims batches that no living router runs every :data:`POLL_S`. Batches whose owner (by
    ``holder``) has no client any more do not run; they only expire."""

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
        """Release all batches; lines in flight run again, later or elsewhere. Idempotent."""
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
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        resources = self._resources
        if self._clock() - self._swept_s >= SWEEP_S:
            self._swept_s = self._clock()
            await resources.store.sweep()
        waiting = []
        unfinished = await resources.store.ask(BatchState.unfinished)
        behind = await resources.windows.behind(unfinished, resources.now())
        for record in unfinished:
            if record.id in self._runs:
                await self._runs[record.id].run.mark(record.id in behind)
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
        """Batches that must end, then promised ones by deadline, then one of each owner (running
        ones included), oldest first."""
        before = Counter(running.owner for running in self._runs.values())
        turns = []
        for record in waiting:
            due_s = record.expires_s if record.work_s else inf
            turns.append((not self._is_to_end(record), due_s, before[record.owner], record))
            before[record.owner] += 1
        return [record for *_, record in sorted(turns, key=lambda turn: turn[:3])]

    async def _try_to_run(self, record: BatchRecord) -> None:
        resources = self._resources
        client = self._holder(record.owner)
        if self._is_to_end(record) or (record.work_s and client is not None):
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
            _log.error("batch %s failed to run; retrying later", batch_id, exc_info=error)
            self._resources.metrics.put_off.inc()
            self._not_before_s[batch_id] = self._clock() + RETRY_S
        self.wake()
