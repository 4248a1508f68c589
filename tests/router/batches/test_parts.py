"""The parts of batches alone: input lines, result logs, attempts, upkeep of the folder."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sluice.router.batches.disk import DiskThreads, try_lock, used_bytes, write_whole
from sluice.router.batches.line_caller import (
    FAILED_PAUSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LineCaller,
)
from sluice.router.batches.lines import (
    MAX_CUSTOM_ID,
    MAX_FAULTS,
    SLICE_LINES,
    BatchRequest,
    LineError,
    check_lines,
    parse_line,
    slices,
)
from sluice.router.batches.metrics import BatchMetrics
from sluice.router.batches.places import LinePlaces
from sluice.router.batches.records import BatchRecord, FileRecord, Status, new_batch_id
from sluice.router.batches.results import Reply, ResultLog, answered
from sluice.router.batches.run import BatchRun, Resources
from sluice.router.batches.runner import Runner, _Running
from sluice.router.batches.store import ERRORS, INPUT, OUTPUT, Store
from sluice.router.batches_config import BatchesConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.auth import KeyRing
from sluice.router.tenancy.limits import ANYONE
from sluice.router.tenancy.rate_limits import RateLimiter
from tests.router.batches.routers import URL, UnixClock, config, jsonl, line, serving, until
from tests.router.far_side import Clock, Edge, FarSide, answer, fail, hang, serve

FAST = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
LINE_BYTES = 1_000


def check(path: Path, content: bytes, max_lines: int = 1_000) -> list[tuple[str, int | None]]:
    path.write_bytes(content)
    return [
        (fault.code, fault.line) for fault in check_lines(path, URL, max_lines, LINE_BYTES).faults
    ]


def read(path: Path) -> list[str]:
    return [each.custom_id for some in slices(path, URL, LINE_BYTES) for each in some]


# Input.


@FAST
@given(content=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_input_is_checked_and_what_passes_can_be_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    checked = check_lines(path, URL, 10, LINE_BYTES)
    assert bool(checked.faults) or len(read(path)) == checked.total > 0


@FAST
@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, unique=True
    ),
    blanks=st.lists(st.sampled_from([b"\n", b" \r\n", b""]), min_size=1),
    last=st.booleans(),
)
def test_every_request_is_read_once(
    tmp_path: Path, names: list[str], blanks: list[bytes], last: bool
) -> None:
    path = tmp_path / "input"
    lines = [jsonl([line(name)]) + blanks[n % len(blanks)] for n, name in enumerate(names)]
    assert check(path, b"".join(lines).rstrip(b"\n" if last else b"")) == []
    assert read(path) == names


def test_faults_say_which_line_and_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "input"
    good = [line(str(number)) for number in range(3)]
    assert check(path, jsonl(good) + b"\n" + b"[1]\n" + jsonl([good[0]])) == [
        ("invalid_json_line", 5),
        ("duplicate_custom_id", 6),
    ]
    assert len(check(path, b"x\n" * 1_000)) == MAX_FAULTS
    assert check(path, jsonl(good), max_lines=2) == [("too_many_lines", None)]
    assert check(path, jsonl(good), max_lines=3) == []


def test_a_line_is_cut_at_its_limit_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "input"
    room = LINE_BYTES - len(jsonl([line("a", text="")])) + 1
    fits, long = jsonl([line("a", text="x" * room)]), jsonl([line("b", text="x" * (room + 1))])
    assert len(fits) == LINE_BYTES + 1
    for end in (b"\n", b"\r\n"):
        assert check(path, fits[:-1] + end + jsonl([line("c")])) == []
        assert check(path, long[:-1] + end + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(path, b"x" * 300_000 + b"\n" + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(path, fits[:-1]) == []


def test_the_longest_id(tmp_path: Path) -> None:
    raw = json.dumps(line("x" * MAX_CUSTOM_ID)).encode()
    assert parse_line(raw, URL, 10_000).custom_id == "x" * MAX_CUSTOM_ID
    with pytest.raises(LineError, match="1 to 512 characters"):
        parse_line(json.dumps(line("x" * (MAX_CUSTOM_ID + 1))).encode(), URL, 10_000)


def test_slices_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(jsonl(line(str(number)) for number in range(SLICE_LINES * 2 + 1)))
    assert [len(some) for some in slices(path, URL, LINE_BYTES)] == [SLICE_LINES, SLICE_LINES, 1]


# Results.


def asked(name: str) -> BatchRequest:
    return BatchRequest(name, {}, 10)


def text_of(log: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in log.read_text().splitlines()]


@FAST
@given(
    oks=st.lists(st.booleans(), min_size=1, max_size=12),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    junk=st.sampled_from([b"", b"\0\0\0\n", b"{}\n", b'{"custom_id": "9', b'{"custom_id": 3}\n']),
)
def test_a_log_goes_on_after_any_loss(
    tmp_path: Path, oks: list[bool], cuts: tuple[float, float], junk: bytes
) -> None:
    paths = [tmp_path / "output", tmp_path / "errors"]
    names = [str(number) for number in range(len(oks))]
    for path in paths:
        path.unlink(missing_ok=True)

    def add(log: ResultLog) -> None:
        for name, ok in zip(names, oks, strict=True):
            log.add(answered(asked(name), Reply(200 if ok else 400, "r", b"{}")))

    log = ResultLog(*paths)
    add(log)
    log.close()
    whole = [path.read_bytes() for path in paths]
    for path, cut, content in zip(paths, cuts, whole, strict=True):
        path.write_bytes(content[: round(cut * len(content))] + (junk if cut < 1 else b""))
    log = ResultLog(*paths)
    left = [name for name in names if not log.has(name)]
    assert len(left) == len(names) - log.completed - log.failed
    add(log)
    log.sync()
    log.close()
    assert text_of(paths[0]) + text_of(paths[1]) != []
    assert sorted(text_of(paths[0])) == sorted(n for n, ok in zip(names, oks, strict=True) if ok)
    assert sorted(text_of(paths[1])) == sorted(
        n for n, ok in zip(names, oks, strict=True) if not ok
    )


def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "output", tmp_path / "errors")
    log.add(answered(asked("a"), Reply(200, "r", b"{}")))
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.add(answered(asked("b"), Reply(200, "r", b"{}")))
    assert not log.has("b")
    assert text_of(tmp_path / "output") == ["a"]


def test_an_answer_that_is_not_json_is_an_error() -> None:
    result = answered(asked("a"), Reply(200, "r", b"<html>"))
    assert not result.ok
    assert json.loads(result.text)["error"]["code"] == "invalid_response"
    half = answered(asked("a"), Reply(200, "r", b'{"text": "\\ud800"}'))
    assert json.loads(half.text)["response"]["body"] == {"text": "\ud800"}


# Attempts.


class Pauses:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def caller(side: FarSide, tmp_path: Path, **batches: int) -> tuple[LineCaller, Pauses, Edge]:
    edge = Edge(side, config=config(tmp_path, **batches).model_copy(update={"max_attempts": 1}))
    pauses, metrics = Pauses(), BatchMetrics(CollectorRegistry())
    return LineCaller(edge.config, edge.fleets, RateLimiter(), metrics, pauses), pauses, edge


async def answered_by(lines: LineCaller) -> Reply:
    admitted = await lines.admit(BODY, URL, lambda: ANYONE)
    assert not isinstance(admitted, Reply)
    return await lines.run(admitted)


class Late:
    """A replica that answers otherwise at first."""

    def __init__(self, *first: object) -> None:
        self.first = list(first)

    def __call__(self, side: FarSide, replica: str, request: object) -> object:
        behaviour = self.first.pop(0) if self.first else serve
        return behaviour(side, replica, request)  # type: ignore[operator]


BODY = BatchRequest("a", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, 100)
DEAD = fail(ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True))
FULL = answer(503, b"{}")
NONE = fail(ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False))


async def test_lack_of_room_never_ends_a_line(tmp_path: Path) -> None:
    side = FarSide(a=Late(*[FULL, NONE, answer(429, b"{}")] * 8))  # type: ignore[arg-type]
    lines, pauses, edge = caller(side, tmp_path, max_line_attempts=1)
    reply = await answered_by(lines)
    assert reply.status == 200
    labels = {"class": "batch", "endpoint": "chat"}
    assert edge.sample("sluice_requests_total", **labels, outcome="ok") == 1
    assert edge.sample("sluice_requests_total", **labels, outcome="refused") == 0
    assert len(pauses.seconds) == 24
    assert FIRST_PAUSE_S / 2 <= pauses.seconds[0] <= FIRST_PAUSE_S
    assert all(seconds <= LONGEST_PAUSE_S for seconds in pauses.seconds)
    assert min(pauses.seconds[-10:]) >= LONGEST_PAUSE_S / 2
    ids = [request.request_id for _, request in side.calls]
    assert len(set(ids)) == len(ids) == 25


@pytest.mark.parametrize(("behaviour", "status"), [(DEAD, 503), (answer(500, b"{}"), 500)])
async def test_a_line_that_fails_by_itself_ends(
    tmp_path: Path, behaviour: object, status: int
) -> None:
    side = FarSide(a=behaviour)  # type: ignore[arg-type]
    lines, pauses, _ = caller(side, tmp_path, max_line_attempts=3)
    reply = await answered_by(lines)
    assert (reply.status, len(side.calls), len(pauses.seconds)) == (status, 3, 2)
    for seconds, longest_s in zip(
        pauses.seconds, (FAILED_PAUSE_S, 2 * FAILED_PAUSE_S), strict=True
    ):
        assert longest_s / 2 <= seconds <= longest_s


async def test_a_line_outlives_the_time_in_which_a_dead_replica_is_replaced(tmp_path: Path) -> None:
    side = FarSide(a=Late(*[DEAD] * 4))  # type: ignore[arg-type]
    lines, pauses, _ = caller(side, tmp_path)
    assert (await answered_by(lines)).status == 200
    assert sum(pauses.seconds) > 30


async def test_a_failure_and_then_an_answer(tmp_path: Path) -> None:
    side = FarSide(a=Late(DEAD, DEAD))  # type: ignore[arg-type]
    lines, _, _ = caller(side, tmp_path, max_line_attempts=3)
    assert (await answered_by(lines)).status == 200


async def test_a_line_that_is_given_up_frees_its_replica(tmp_path: Path) -> None:
    side = FarSide(a=hang)
    lines, _, _ = caller(side, tmp_path)
    task = asyncio.create_task(answered_by(lines))
    await side.until(lambda: bool(side.live))
    task.cancel()
    await side.until(lambda: not side.live)


# The folder.


def test_a_lock_holds_within_a_process_and_ends_with_its_owner(tmp_path: Path) -> None:
    mine = try_lock(tmp_path / "lease")
    assert mine is not None
    assert try_lock(tmp_path / "lease") is None
    mine.release()
    mine.release()
    again = try_lock(tmp_path / "lease")
    assert again is not None
    del again
    assert try_lock(tmp_path / "lease") is not None
    assert try_lock(tmp_path / "gone" / "lease") is None


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_whole(tmp_path / "a" / "one", b"x" * 100)
    (tmp_path / "two").hardlink_to(tmp_path / "a" / "one")
    write_whole(tmp_path / "two-more", b"y" * 50)
    assert used_bytes(tmp_path) == 150


async def test_disk_work_ends_before_a_cancelled_task_does() -> None:
    disk = DiskThreads()
    loop, began, end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    done = []

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(end.wait(), loop).result()
        done.append(1)

    task = asyncio.create_task(disk.run(work))
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
    disk.close()


class Kept:
    """A store with one file."""

    def __init__(self, directory: Path, **options: float) -> None:
        self.now = UnixClock()
        settings = BatchesConfig(directory=directory, **options)  # type: ignore[arg-type]
        self.store = Store(settings, directory, self.now)
        self.file = self.add([line("a"), line("b")])

    def add(self, lines: Sequence[object]) -> FileRecord:
        path = self.store.upload_path("anyone")
        path.write_bytes(jsonl(lines))
        return self.store.add_file("anyone", path, "in", None)

    def batch(self) -> BatchRecord:
        record = BatchRecord(
            id=new_batch_id(),
            owner="anyone",
            endpoint=URL,
            input_file_id=self.file.id,
            completion_window="24h",
            metadata=None,
            created_s=self.now(),
            expires_s=self.now() + 86_400,
            output_expires_s=100_000,
        )
        self.store.add_batch(record, self.file)
        return record


def test_a_sweep_deletes_what_is_over_and_nothing_else(tmp_path: Path) -> None:
    kept = Kept(tmp_path, retention_s=100_000)
    store, now = kept.store, kept.now
    young, old = kept.batch(), kept.batch()
    leased = store.lease(old)
    assert leased is not None
    for name in (OUTPUT, ERRORS):
        store.path(old, name).write_bytes(b'{"custom_id": "a"}\n')
    output_id = store.publish(old, OUTPUT)
    assert output_id is not None and store.publish(old, OUTPUT) == output_id
    store.save(old.at(Status.COMPLETED, now(), output_file_id=output_id))
    leased[0].release()
    store.sweep()
    assert store.batch("anyone", old.id) is not None
    assert not store.path(old, INPUT).exists(), "what it needs no more"
    assert store.file("anyone", output_id) is not None
    folder = tmp_path / "anyone"
    leftovers = [
        folder / "files" / ".part-file-x",
        folder / "files" / "file-y.data",
        folder / "batches" / "batch_z",
        folder / "batches" / young.id / ".part-x",
    ]
    for path in leftovers:
        path.mkdir() if path.name == "batch_z" else path.write_text("left by a crash")
    store.sweep()
    assert all(path.exists() for path in leftovers), "too young to tell"
    # The system's times are those of the real clock.
    now.now_s = max(path.stat().st_mtime for path in leftovers) + 7_200
    store.sweep()
    assert not any(path.exists() for path in leftovers)
    assert store.batch("anyone", old.id) is None, "past its retention"
    assert store.file("anyone", output_id) is None
    assert store.batch("anyone", young.id) is not None
    assert store.path(young, INPUT).exists()


def test_folders_are_the_routers_alone_in_a_folder_that_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Kept(tmp_path / "new" / "store").batch()
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 6
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_file_whose_record_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    before = sorted((tmp_path / "anyone/files").iterdir())
    path = kept.store.upload_path("anyone")
    path.write_bytes(b"{}")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            kept.store.add_file("anyone", path, "in", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert sorted((tmp_path / "anyone/files").iterdir()) == before


def test_results_of_a_key_are_bounded_in_number(tmp_path: Path) -> None:
    kept = Kept(tmp_path, max_files_per_key=2)
    made = [kept.batch() for _ in range(3)]
    for record in made[:2]:
        kept.store.path(record, OUTPUT).write_bytes(b"{}\n")
        assert kept.store.publish(record, OUTPUT) is not None
    with pytest.raises(ApiError, match="2 files of results, which is the limit") as refused:
        kept.batch()
    assert refused.value.reason is Reason.STORAGE_LIMIT
    (result, *_) = [file for file in kept.store.files("anyone") if file.purpose != "batch"]
    kept.store.delete_file(result)
    kept.batch()


def test_a_disk_that_is_nearly_full_takes_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.store.has_room("anyone")
    full = Store(BatchesConfig(min_free_bytes=1 << 50), tmp_path, kept.now)
    assert not full.has_room("anyone")
    with pytest.raises(ApiError) as refused:
        full.upload_path("anyone")
    assert refused.value.reason is Reason.STORAGE_FULL


def test_a_batch_that_has_ended_is_looked_for_once(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    young, old = kept.batch(), kept.batch()
    kept.store.save(old.at(Status.COMPLETED, kept.now()))
    assert kept.store.unfinished() == [young]
    # Nobody changes a record that has ended; here it shows that the record is not read again.
    kept.store.save(old)
    assert kept.store.unfinished() == [young]
    kept.store.save(young.at(Status.FAILED, kept.now()))
    assert kept.store.unfinished() == []


async def test_a_batch_that_cannot_be_run_on_is_put_off_and_counted(tmp_path: Path) -> None:
    record = Kept(tmp_path).batch()
    in_the_way = tmp_path / "anyone/batches" / record.id / OUTPUT
    in_the_way.mkdir()
    async with serving(config(tmp_path)) as router:
        async with asyncio.timeout(120):
            while router.edge.sample("sluice_batches_put_off_total") == 0:
                await router.client.models.list()
    in_the_way.rmdir()
    async with serving(config(tmp_path)) as router:
        await until(router.client, record.id, "completed")


def test_a_damaged_record_hides_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path)
    other, batch = kept.add([line("c")]), kept.batch()
    (tmp_path / "anyone/files" / f"{kept.file.id}.json").write_text("{")
    (tmp_path / "anyone/batches" / kept.batch().id / "batch.json").write_text('{"id": 3}')
    assert kept.store.files("anyone") == [other]
    assert kept.store.unfinished() == [batch] == kept.store.unfinished()
    assert kept.store.file("anyone", kept.file.id) is None
    assert len(caplog.records) == 2, "each is told of once"
    assert all("unreadable record" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["batch.json", "cancel"])
def test_a_batch_file_cut_off_or_garbled_anywhere_hides_at_most_its_batch(
    tmp_path: Path, name: str
) -> None:
    kept = Kept(tmp_path)
    batch, other = kept.batch(), kept.batch()
    kept.store.cancel(batch)
    path = tmp_path / "anyone/batches" / batch.id / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            path.unlink()
            path.write_bytes(damaged)
            found = kept.store.unfinished()
            assert other in found
            for record in found:
                json.dumps(record.shown())
            if name == "cancel":
                assert [record.cancelling for record in found if record.id == batch.id] == [True]


@pytest.mark.parametrize("change", [{"owner": "../x"}, {"id": "batch_" + "0" * 32}])
def test_a_record_of_something_else_is_none(tmp_path: Path, change: dict[str, str]) -> None:
    kept = Kept(tmp_path)
    batch = kept.batch()
    path = tmp_path / "anyone/batches" / batch.id / "batch.json"
    path.write_text(batch.model_copy(update=change).model_dump_json())
    assert kept.store.unfinished() == []
    assert kept.store.lease(batch) is None


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-Infinity"])
def test_a_time_that_is_none_is_no_record(tmp_path: Path, time: str) -> None:
    kept = Kept(tmp_path)
    batch = kept.batch()
    path = tmp_path / "anyone/batches" / batch.id / "batch.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "created_s": float(time)}))
    assert kept.store.batches("anyone") == []


def test_a_record_that_cannot_be_read_is_not_swept(tmp_path: Path) -> None:
    """It may be that of a later version."""
    kept = Kept(tmp_path)
    folder = tmp_path / "anyone/batches" / kept.batch().id
    (folder / "batch.json").write_text('{"id": 3}')
    kept.now.now_s = folder.stat().st_mtime + 10 * 86_400
    kept.store.sweep()
    assert sorted(path.name for path in folder.iterdir()) == ["batch.json", "input.jsonl"]


async def test_a_batch_that_cannot_be_leased_does_not_hold_up_the_next(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    broken = kept.batch()
    (tmp_path / "anyone/batches" / broken.id / "lease").mkdir()
    kept.now.now_s += 1
    good = kept.batch()
    async with serving(config(tmp_path), now=kept.now) as router:
        await until(router.client, good.id, "completed")
        assert router.edge.sample("sluice_batches_put_off_total") == 1
        assert (await router.client.batches.retrieve(broken.id)).status == "validating"


def test_a_batch_has_one_owner_and_none_once_it_has_ended(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    record = kept.batch()
    leased = kept.store.lease(record)
    assert leased is not None
    assert kept.store.lease(record) is None
    kept.store.save(record.at(Status.COMPLETED, kept.now()))
    leased[0].release()
    assert kept.store.lease(record) is None


async def test_who_takes_over_at_any_point_ends_the_batch_the_same_way(tmp_path: Path) -> None:
    ended, stop = False, 0
    while not ended:
        kept = Kept(tmp_path / str(stop))
        store = kept.store
        record = kept.batch()
        ended = await run_until(kept, record, stop)
        if (found := store.batch("anyone", record.id)) is not None and not found.ended:
            assert await run_until(kept, record, 1_000)
        store.sweep()
        done = store.batch("anyone", record.id)
        assert done is not None
        assert (done.status, done.completed, done.failed) == (Status.COMPLETED, 2, 0)
        outputs = [file for file in store.files("anyone") if file.purpose == "batch_output"]
        assert [file.id for file in outputs] == [done.output_file_id]
        assert sorted(text_of(store.data_path(outputs[0]))) == ["a", "b"]
        assert not store.path(done, OUTPUT).exists()
        stop += 1
    assert stop > 12, "pieces of work on the disk"


def resources_of(kept: Kept, side: FarSide, disk: DiskThreads) -> Resources:
    edge = Edge(side, config=config(kept.store._directory))
    metrics = BatchMetrics(CollectorRegistry())
    return Resources(
        config=edge.config.batches,
        max_line_bytes=LINE_BYTES,
        store=kept.store,
        disk=disk,
        caller=LineCaller(edge.config, edge.fleets, RateLimiter(), metrics),
        places=LinePlaces(1),
        metrics=metrics,
        now=kept.now,
    )


async def test_a_batch_whose_key_is_gone_ends_in_order(tmp_path: Path) -> None:
    kept, side, path = Kept(tmp_path / "batches"), FarSide(a=hang), tmp_path / "keys.yaml"
    record = kept.batch().model_copy(update={"owner": "name-acme"})
    path.write_text("- {key: some-key, name: acme}")
    keys = KeyRing([], path, ["batch"])
    resources = resources_of(kept, side, DiskThreads())
    runner = Runner(resources, keys, Clock())
    leased = kept.store.lease(kept.store.unfinished()[0])
    assert leased is not None
    run = BatchRun(resources, *leased, ANYONE)
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
    assert kept.store.lease(kept.store.unfinished()[0]) is not None


async def run_until(kept: Kept, record: BatchRecord, stop: int) -> bool:
    """Run a batch until its router dies instead of doing its ``stop``-th work on the disk. Whether
    it got to the end."""
    resources = resources_of(kept, FarSide(a=serve), DyingDisk(stop))
    leased = kept.store.lease(record)
    assert leased is not None
    try:
        await BatchRun(resources, *leased, ANYONE).run()
    except (ExceptionGroup, DiedError):
        return False
    return True


class DiedError(Exception):
    """The process died, as far as its disk can tell."""


class DyingDisk(DiskThreads):
    """Does so many pieces of work, and then none."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    async def run(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def, override]
        self.left -= 1
        if self.left < 0:
            raise DiedError
        return await super().run(function, *args, **kwargs)


KILLED = """
import sys
from pathlib import Path
from sluice.router.batches_config import BatchesConfig
from sluice.router.batches.lines import BatchRequest
from sluice.router.batches.results import Reply, ResultLog, answered
from sluice.router.batches.store import ERRORS, OUTPUT, Store

directory = Path(sys.argv[1])
store = Store(BatchesConfig(directory=directory), directory, lambda: 1.7e9)
(record,) = store.unfinished()
leased = store.lease(record)
log = ResultLog(store.path(record, OUTPUT), store.path(record, ERRORS))
log.add(answered(BatchRequest("a", {}, 1), Reply(200, "by the one that died", b"{}")))
with store.path(record, OUTPUT).open("ab") as file:
    file.write(b'{"id": "x", "custom_id": "b", "resp')
print("leased", flush=True)
sys.stdin.read()
"""


async def test_a_killed_router_loses_its_lease_and_no_result(tmp_path: Path) -> None:
    record = Kept(tmp_path).batch()
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    side = FarSide(a=serve)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "leased\n"
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
