"""The store of files and batches: owners, takeover, upkeep, and what fails."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from prometheus_client import CollectorRegistry

from sluice.router.batches.byte_store import Routers
from sluice.router.batches.lines import BatchMetrics, LineCaller
from sluice.router.batches.run import BatchRun, LinePlaces, Resources, Runner, _Running
from sluice.router.batches.state import (
    VERSION,
    BatchLostError,
    BatchRecord,
    BatchState,
    FileRecord,
    Page,
    Result,
    Status,
    changing,
)
from sluice.router.batches.store import NAME, Store, Threads
from sluice.router.batches.windows import Windows
from sluice.router.config import DAY_S, BatchesConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.auth import KeyRing
from sluice.router.tenancy.limits import ANYONE, RateLimiter
from tests.router.batches.routers import (
    URL,
    UnixClock,
    config,
    jsonl,
    line,
    names_in,
    rows,
    serving,
    until,
)
from tests.router.far_side import Clock, Edge, FarSide, hang, serve

ALL = Page(1_000, newest_first=False)


class Kept:
    """A store with one file."""

    def __init__(self, directory: Path, **options: float) -> None:
        self.now = UnixClock()
        self.directory = directory
        settings = BatchesConfig(directory=directory, **options)  # type: ignore[arg-type]
        self.store = Store(settings, directory, self.now)
        self.file: FileRecord

    async def upload(self, lines: Sequence[object]) -> FileRecord:
        upload = await self.store.begin_upload("anyone")
        await upload.write(jsonl(lines))
        file = await upload.close()
        await self.store.ask(BatchState.finish_upload, file)
        return file

    async def batch(self) -> BatchRecord:
        record = BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            owner="anyone",
            endpoint=URL,
            input_file_id=self.file.id,
            completion_window="24h",
            metadata=None,
            created_s=self.now(),
            expires_s=self.now() + DAY_S,
            output_expires_s=100_000,
        )
        await self.store.ask(BatchState.add_batch, record)
        return record

    async def files(self) -> list[FileRecord]:
        return (await self.store.ask(BatchState.files, "anyone", None, ALL))[0]

    async def end(self, record: BatchRecord) -> FileRecord:
        """Run the batch to its end; the output is one line."""
        assert await self.store.claim(record.id)
        await self.store.ask(BatchState.add_results, record.id, [Result(1, True, b"{}\n")])
        output = await self.store.write_results(record, True)
        assert output is not None and await self.store.write_results(record, False) is None
        await self.store.ask(BatchState.end, record.at(Status.COMPLETED, self.now()), [output])
        return output


@asynccontextmanager
async def kept_in(directory: Path, **options: float) -> AsyncIterator[Kept]:
    kept = Kept(directory, **options)
    try:
        kept.file = await kept.upload([line("a"), line("b")])
        yield kept
    finally:
        await kept.store.close()


# Owners.


def test_a_router_is_alive_until_it_ends(tmp_path: Path) -> None:
    one, two = Routers(tmp_path / "routers"), Routers(tmp_path / "routers")
    for router in (one, two):
        assert router.alive(one.id) and router.alive(two.id)
    one.close()
    for _ in range(2):
        assert not two.alive(one.id) and two.alive(two.id)
    two.close()


async def test_a_batch_has_one_holder_and_none_once_it_has_ended(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as one, kept_in(tmp_path) as two:
        record = await one.batch()
        assert await two.store.claim(record.id) == record
        assert await one.store.claim(record.id) is None
        await two.store.ask(BatchState.release, record.id)
        await one.end(record)
        assert await two.store.claim(record.id) is None
        assert await one.store.claim(record.id) is None


async def test_a_router_that_lost_its_batch_changes_nothing(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as one, kept_in(tmp_path) as two:
        record = await one.batch()
        assert await one.store.claim(record.id)
        await one.store.ask(BatchState.add_results, record.id, [Result(1, True, b"first\n")])
        one.store._routers.close()  # as a network file system may lose a lock
        one.store._routers = Routers(tmp_path / "routers")
        assert await two.store.claim(record.id)
        for change in (
            one.store.ask(BatchState.add_results, record.id, [Result(2, True, b"late\n")]),
            one.store.ask(BatchState.save, record.at(Status.FAILED, 0.0)),
            one.store.ask(BatchState.end, record.at(Status.FAILED, 0.0), []),
            one.store.write_results(record, True),
        ):
            with pytest.raises(BatchLostError):
                await change
        both = [Result(1, False, b"again\n"), Result(2, True, b"second\n")]
        await two.store.ask(BatchState.add_results, record.id, both)
        assert await two.store.ask(BatchState.results, record.id, True, 0) == (
            [b"first\n", b"second\n"],
            2,
        )
        found = await two.store.ask(BatchState.batch, "anyone", record.id)
        assert found is not None and (found.completed, found.failed) == (2, 0)
        assert found.status is Status.VALIDATING


def resources_of(kept: Kept, side: FarSide) -> Resources:
    edge = Edge(side, config=config(kept.directory))
    metrics = BatchMetrics(CollectorRegistry())
    return Resources(
        config=edge.config.batches,
        max_line_bytes=1_000,
        store=kept.store,
        caller=LineCaller(edge.config, edge.fleets, RateLimiter(), metrics),
        places=LinePlaces(1),
        metrics=metrics,
        windows=Windows(edge.fleets, "batch", 1),
        promises_only=False,
        now=kept.now,
    )


class DiedError(Exception):
    """The process died, as far as its disk can tell."""


class DyingThreads(Threads):
    """Do so many pieces of work, counted over all of these, and then none."""

    def __init__(self, left: list[int]) -> None:
        super().__init__(1)
        self.left = left

    async def run(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def, override]
        self.left[0] -= 1
        if self.left[0] < 0:
            raise DiedError
        return await super().run(function, *args, **kwargs)


async def run_until(kept: Kept, record: BatchRecord, stop: int) -> bool:
    """Run a batch until its router dies instead of doing its ``stop``-th work on the disk. Whether
    it got to the end."""
    claimed = await kept.store.claim(record.id)
    assert claimed is not None
    left = [stop]
    threads = kept.store._state_thread, kept.store._byte_threads
    kept.store._state_thread = DyingThreads(left)
    kept.store._byte_threads = DyingThreads(left)
    try:
        await BatchRun(resources_of(kept, FarSide(a=serve)), claimed, ANYONE).run()
    except (ExceptionGroup, DiedError):
        return False
    finally:
        kept.store._state_thread, kept.store._byte_threads = threads
    return True


async def test_who_takes_over_at_any_point_ends_the_batch_the_same_way(tmp_path: Path) -> None:
    ended, stop = False, 0
    while not ended:
        directory = tmp_path / str(stop)
        async with kept_in(directory) as one:
            record = await one.batch()
            ended = await run_until(one, record, stop)
        async with kept_in(directory) as two:
            found = await two.store.ask(BatchState.batch, "anyone", record.id)
            if found is not None and not found.ended:
                assert await run_until(two, record, 1_000)
            await two.store.sweep()
            done = await two.store.ask(BatchState.batch, "anyone", record.id)
            assert done is not None
            assert (done.status, done.completed, done.failed) == (Status.COMPLETED, 2, 0)
            outputs = [file for file in await two.files() if file.purpose == "batch_output"]
            assert [file.id for file in outputs] == [done.output_file_id]
            content = await two.store.read(outputs[0].id, lambda file: file.read())
            assert len(content) == outputs[0].bytes
            names = [json.loads(each)["custom_id"] for each in content.splitlines()]
            assert sorted(names) == ["a", "b"]
        assert rows(directory, "SELECT n FROM results") == []
        assert {name for (name,) in rows(directory, "SELECT id FROM files")} == set(
            names_in(directory / "files")
        )
        stop += 1
    assert stop > 12, "pieces of work on the disk"


async def test_an_expired_batch_stays_so_when_its_router_dies_at_its_end(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as one:
        record = await one.batch()
        assert await run_until(one, record, 3) is False  # it has just been validated
        one.now.now_s += DAY_S
        assert await run_until(one, record, 7) is False  # all its lines have their result
        assert len(await one.store.ask(BatchState.answered, record.id)) == 2
        assert await run_until(one, record, 1_000)
        done = await one.store.ask(BatchState.batch, "anyone", record.id)
        assert done is not None and done.status is Status.EXPIRED


async def test_a_batch_whose_key_is_gone_ends_in_order(tmp_path: Path) -> None:
    side, path = FarSide(a=hang), tmp_path / "keys.yaml"
    path.write_text("- {key: some-key, name: acme}")
    async with kept_in(tmp_path / "batches") as kept:
        record = (await kept.batch()).model_copy(update={"owner": "name-acme"})
        keys = KeyRing([], path, ["batch"])
        resources = resources_of(kept, side)
        runner = Runner(resources, keys.holder, Clock())
        claimed = await kept.store.claim(record.id)
        assert claimed is not None
        run = BatchRun(resources, claimed, ANYONE)
        task = asyncio.create_task(run.run())
        await side.until(lambda: bool(side.live))
        path.write_text("- some-other-key")
        assert await keys.reload()
        running = _Running(run, record.owner, task)
        for _ in range(3):  # each look finds that the key is gone
            runner._look_after(running, record)
            await asyncio.sleep(0)
        assert task.cancelling() == 1
        await asyncio.wait([task])
        assert task.cancelled()
        await side.until(lambda: not side.live)
        assert resources.metrics.in_flight._value.get() == 0
        assert await kept.store.ask(BatchState.holder, record.id) is None


KILLED = """
import asyncio, sys
from pathlib import Path
from sluice.router.config import BatchesConfig
from sluice.router.batches.lines import BatchRequest
from sluice.router.batches.lines import Reply, answered
from sluice.router.batches.state import BatchState
from sluice.router.batches.store import Store

async def main():
    directory = Path(sys.argv[1])
    store = Store(BatchesConfig(directory=directory), directory, lambda: 1.7e9)
    (record,) = await store.ask(BatchState.unfinished)
    assert await store.claim(record.id)
    result = answered(BatchRequest(1, "a", {}, 1), Reply(200, "by the one that died", b"{}"))
    await store.ask(BatchState.add_results, record.id, [result])
    print("claimed", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


async def test_a_killed_router_loses_its_batch_and_no_result(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as kept:
        record = await kept.batch()
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    side = FarSide(a=serve)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "claimed\n"
        async with serving(config(tmp_path), side) as router:
            status = (await router.client.batches.retrieve(record.id)).status
            assert status == "validating" and not side.calls
            process.kill()
            done = await until(router.client, record.id, "completed", "failed")
            assert done.status == "completed"
            content = (await router.client.files.content(str(done.output_file_id))).text
    finally:
        process.kill()
        process.communicate()
    entries = {entry["custom_id"]: entry for entry in map(json.loads, content.splitlines())}
    assert entries.keys() == {"a", "b"}
    assert entries["a"]["response"]["request_id"] == "by the one that died"
    assert len(side.calls) == 1


async def test_work_in_a_thread_ends_before_its_cancelled_task_does() -> None:
    threads = Threads(1)
    loop, began, end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    done = []

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(end.wait(), loop).result()
        done.append(1)

    task = asyncio.create_task(threads.run(work))
    await began.wait()
    task.cancel()
    task.cancel()
    waiter = asyncio.create_task(asyncio.wait({task}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    end.set()
    await waiter
    assert task.cancelled() and done == [1]
    threads.close()


# Upkeep and limits.


async def test_a_sweep_deletes_what_is_over_and_nothing_else(tmp_path: Path) -> None:
    async with kept_in(tmp_path, retention_s=100_000) as kept:
        store, now = kept.store, kept.now
        young, old = await kept.batch(), await kept.batch()
        output = await kept.end(old)
        await store.ask(BatchState.hide_file, kept.file.id)
        cut_off = await store.begin_upload("anyone")  # as by a crash
        await cut_off.write(b"x" * 100)
        await store.sweep()
        assert await store.ask(BatchState.batch, "anyone", old.id) is not None
        assert [file.id for file in await kept.files()] == [output.id]
        assert len(names_in(tmp_path / "files")) == 3, "the input of the young batch, and an upload"
        now.now_s += 7_200
        await store.sweep()
        assert sorted(names_in(tmp_path / "files")) == sorted([kept.file.id, output.id])
        now.now_s += 100_000
        await store.sweep()
        assert await store.ask(BatchState.batch, "anyone", old.id) is None, "past its retention"
        assert names_in(tmp_path / "files") == [kept.file.id]
        assert await store.ask(BatchState.batch, "anyone", young.id) is not None
    assert rows(tmp_path, "SELECT n FROM results") == []


async def test_files_and_folders_are_the_routers_alone_in_a_folder_that_is_not(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for directory in (tmp_path / "new" / "store", shared):
        async with kept_in(directory) as kept:
            await kept.batch()
        assert directory.joinpath(NAME).stat().st_mode & 0o777 == 0o600
    made = [
        tmp_path / "new",
        tmp_path / "new/store",
        tmp_path / "new/store/files",
        shared / "files",
    ]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


async def test_a_file_whose_record_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as kept:
        upload = await kept.store.begin_upload("anyone")
        await upload.write(b"{}")
        file = await upload.close()
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, most[1]))
        try:
            with pytest.raises(OSError, match=r"the database .* I/O error"):
                await kept.store.ask(BatchState.finish_upload, file)
            await upload.abandon()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert names_in(tmp_path / "files") == [kept.file.id]
        assert await kept.files() == [kept.file]
        kept.now.now_s += 7_200
        await kept.store.sweep()
    assert rows(tmp_path, "SELECT id FROM files") == [(kept.file.id,)]


async def test_results_of_a_key_are_bounded_in_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.state.MAX_FILES", 2)
    async with kept_in(tmp_path) as kept:
        for _ in range(2):
            result = await kept.end(await kept.batch())
        with pytest.raises(ApiError, match="2 files of results, which is the limit") as refused:
            await kept.batch()
        assert refused.value.reason is Reason.STORAGE_LIMIT
        await kept.store.delete_file(result.id)
        await kept.batch()


async def test_a_disk_that_is_nearly_full_takes_nothing(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as kept:
        assert await kept.store.ask(BatchState.has_space, "anyone")
        full = Store(BatchesConfig(min_free_bytes=1 << 50), tmp_path, kept.now)
        assert not await full.ask(BatchState.has_space, "anyone")
        with pytest.raises(ApiError) as refused:
            await full.begin_upload("anyone")
        assert refused.value.reason is Reason.STORAGE_FULL
        await full.close()


# What fails.


async def test_a_batch_that_cannot_be_run_is_put_off_and_counted(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as kept:
        record = await kept.batch()
    content = (tmp_path / "files" / kept.file.id).rename(tmp_path / "elsewhere")
    async with serving(config(tmp_path)) as router:
        async with asyncio.timeout(120):
            while router.edge.sample("sluice_batches_put_off_total") == 0:
                await router.client.models.list()
        other = await router.client.files.create(file=jsonl([line("a")]), purpose="batch")
        good = await router.client.batches.create(
            input_file_id=other.id, endpoint=URL, completion_window="24h"
        )
        await until(router.client, good.id, "completed")
    content.rename(tmp_path / "files" / kept.file.id)
    async with serving(config(tmp_path)) as router:
        await until(router.client, record.id, "completed")


async def test_a_transaction_that_a_power_cut_interrupts_has_not_happened(tmp_path: Path) -> None:
    async with kept_in(tmp_path / "here") as kept:
        database = kept.store._state._db
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        extra = 3
        assert database.execute("PRAGMA synchronous").fetchone() == (extra,)
        record = await kept.batch()
        assert await kept.store.claim(record.id)
        await kept.store.ask(BatchState.add_results, record.id, [Result(1, True, b"first\n")])
        database.execute("PRAGMA cache_size = 1")  # so that much is written before the end
        with changing(database):
            for number in range(2, 500):
                database.execute(
                    "INSERT INTO results (batch_id, line, ok, entry) VALUES (?, ?, 1, ?)",
                    (record.id, number, b"x" * 2_000),
                )
            shutil.copytree(tmp_path / "here", tmp_path / "after")
    grown = (tmp_path / "after" / NAME).stat().st_size
    assert grown > 100_000 and (tmp_path / "after" / f"{NAME}-journal").exists()
    assert rows(tmp_path / "after", "SELECT line FROM results") == [(1,)]
    assert rows(tmp_path / "after", "PRAGMA quick_check") == [("ok",)]


async def test_a_damaged_database_is_reported_and_left_alone(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as kept:
        await kept.batch()
    path = tmp_path / NAME
    whole = path.read_bytes()
    path.write_bytes(b"x" * 5_000)
    with pytest.raises(OSError, match=r"state.sqlite3: .*restore it from a copy"):
        Kept(tmp_path)
    assert path.read_bytes() == b"x" * 5_000
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    async with serving(config(tmp_path)) as router:
        with pytest.raises(openai.InternalServerError) as failed:
            await router.client.files.list()
        assert failed.value.status_code == 500
        # Requests are served all the same.
        assert (await router.client.models.list()).data


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Kept(tmp_path).store._state.close()
    database = sqlite3.connect(tmp_path / NAME)
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(OSError, match=f"has version {VERSION + 1} of the tables"):
        Kept(tmp_path)
