"""The state of files and batches, in the routers' common database."""

from __future__ import annotations

import enum
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel

from sluice.router.batches.byte_store import open_private, sync_folder
from sluice.router.config import BatchesConfig
from sluice.router.errors import ApiError, Reason, shown

# Stored records of files and batches, and their form in OpenAI's API.

Purpose = Literal["batch", "batch_output"]


class Status(enum.StrEnum):
    """Status of a batch; the names are OpenAI's. ``CANCELLING`` is shown and never stored."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


class FileRecord(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A stored file. Times are Unix seconds."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_s: float
    expires_s: float

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineFault(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Why a batch was refused: ``line`` counts from 1, and is ``None`` for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A batch. Times are Unix seconds; ``output_expires_s`` is a duration. ``expires_s``: when what
    is left will not be run; ``reached_s``: time of each status; ``cut_short``: cancelled or expired
    before all lines had run; ``faults``: why it was refused; ``work_s``: engine time of its lines
    by model, where its window is promised; ``behind``: it is going to miss it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_s: float
    expires_s: float
    output_expires_s: float
    status: Status = Status.VALIDATING
    reached_s: dict[Status, float] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    cut_short: bool = False
    faults: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    work_s: dict[str, float] = {}
    behind: bool = False

    @property
    def rest(self) -> float:
        """Share of its lines without a result."""
        return 1.0 - (self.completed + self.failed) / max(1, self.total)

    @property
    def promise(self) -> str | None:
        """What has become of its promised window."""
        if not self.work_s or self.status is Status.CANCELLED:
            return None
        if self.ended:
            return "missed" if self.cut_short else "kept"
        return "behind" if self.behind else "promised"

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED

    @property
    def cancelling(self) -> bool:
        """Whether it was cancelled."""
        return Status.CANCELLING in self.reached_s

    def at(self, status: Status, now_s: float, **changes: Any) -> BatchRecord:
        """A copy that has reached ``status`` now, with ``changes``."""
        reached_s = {**self.reached_s, status: now_s}
        return self.model_copy(update={"status": status, "reached_s": reached_s, **changes})

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        status = Status.CANCELLING if self.cancelling and not self.ended else self.status
        faults = [fault.model_dump() for fault in self.faults]
        timed = [each for each in Status if each is not Status.VALIDATING]
        reached = {f"{each.value}_at": self.reached_s.get(each) for each in timed}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "errors": {"object": "list", "data": faults} if faults else None,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            **{name: None if at_s is None else int(at_s) for name, at_s in reached.items()},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
            "promise": self.promise,
        }


class Page(NamedTuple):
    """What a query asks for: at most ``limit`` objects, after the one with the id ``after``."""

    limit: int
    after: str | None = None
    newest_first: bool = True


# One SQLite database that all routers open, with the state of files and batches.
#
# Which process owns the state: none does. Each router opens the database, SQLite's locks order
# their transactions, and a transaction is either on the disk as a whole or not there at all. So
# there is no further process that can fail, restart or be of another version, and no call can be
# lost on its way.
#
# The journal is a rollback journal, not WAL: WAL needs memory that all processes share, so it
# would lose data where routers on several nodes open the database on a network file system.
# ``synchronous`` is ``EXTRA``: a transaction that has returned survives a power failure.
#
# ``files`` A row exists before and after the bytes do: ``writing`` until they are complete,
# ``ready``, and ``deleted`` until they are removed. Only ``ready`` ones are visible. No bytes
# exist without a row, so a crash leaves nothing that must be searched for. ``batches`` ``holder``
# is the router that runs the batch, see :class:`sluice.router.batches.byte_store.Routers`. Only the
# holder changes the record and adds results; each of its transactions checks that it still is the
# holder, so a router that lost its lock cannot do harm. ``results`` A line of a running batch has
# one result at most: (batch, line) is unique. ``n`` is the order in which lines ended. Results
# become files when the batch ends, and are then deleted.

VERSION: Final = 1  # version of the tables; a database of another version is refused
BUSY_S: Final = 30.0  # maximum wait for another router's transaction, seconds
_TABLES: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL NOT NULL,
    state TEXT NOT NULL, batch_id TEXT
);
CREATE INDEX files_of ON files (owner, created_s, id);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, input_file_id TEXT NOT NULL,
    record TEXT NOT NULL, holder INTEGER, cancelled_s REAL, ended_s REAL,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    result_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_of ON batches (owner, created_s, id);
CREATE INDEX unfinished ON batches (created_s) WHERE ended_s IS NULL;
CREATE TABLE results (
    n INTEGER PRIMARY KEY, batch_id TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL,
    entry BLOB NOT NULL, UNIQUE (batch_id, line)
);
CREATE INDEX results_of ON results (batch_id, ok);
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the database, for one thread at a time. Raises sqlite3.Error, OSError."""
    if not path.exists():  # never later: closing a file would release SQLite's locks on it
        os.close(open_private(path))
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("PRAGMA synchronous = EXTRA")
    with changing(db):
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise OSError(
                f"{path} has version {version} of the tables, and this Sluice uses {VERSION}: "
                "use the Sluice that wrote it, or another router.batches.directory"
            )
    sync_folder(path.parent)


@contextmanager
def changing(db: sqlite3.Connection) -> Iterator[None]:
    """Several changes in one transaction, durable at its end or rolled back."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def page_of(
    db: sqlite3.Connection, select: str, table: str, where: str, values: list[Any], page: Page
) -> tuple[list[Any], bool]:
    """A page by creation time, and whether there is more. ``where`` is SQL with ``values``. Raises
    ApiError: the object after which the page begins does not exist."""
    side, order = ("<", "DESC") if page.newest_first else (">", "ASC")
    if page.after is not None:
        start = db.execute(
            f"SELECT created_s, id FROM {table} WHERE {where} AND id = ?", (*values, page.after)
        ).fetchone()
        if start is None:
            text = f"There is no object {shown(page.after)}."
            raise ApiError(Reason.NOT_FOUND, text, "after")
        where, values = f"{where} AND (created_s, id) {side} (?, ?)", [*values, *start]
    rows = db.execute(
        f"{select} WHERE {where} ORDER BY created_s {order}, id {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


MAX_FILES: Final = 1_000  # uploads of one owner; result files before new batches are refused
MAX_UNFINISHED: Final = 100  # maximum unfinished batches of one owner
MAX_ENDED: Final = 1_000
"""Maximum ended batches of one owner that are kept; the oldest are deleted first."""

ORPHAN_S: Final = 3_600.0  # bytes that are being uploaded for longer were left by a crash
_PAGE_BYTES: Final = 1 << 20
_PAGE_ROWS: Final = 256
_DELETED_ROWS: Final = 1_000

_FILE: Final = "SELECT id, owner, filename, purpose, bytes, created_s, expires_s FROM files"
_VISIBLE: Final = "state = 'ready' AND expires_s > ?"
_BATCH: Final = "SELECT record, completed, failed, cancelled_s, ended_s FROM batches"
_UNUSED: Final = """NOT EXISTS (SELECT 1 FROM batches b WHERE b.ended_s IS NULL
    AND (b.input_file_id = files.id OR b.id = files.batch_id))"""


class Result(NamedTuple):
    """A line's result: ``entry`` with line feed, an error unless ``ok``; ``line`` from 1."""

    line: int
    ok: bool
    entry: bytes


class BatchLostError(Exception):
    """Another router has taken over the batch, or it has ended."""


class BatchState:
    """The database of one ``router``, created if missing. All methods block; one thread at a time.
    Raises sqlite3.Error, OSError: it cannot be opened, or is of another version."""

    def __init__(
        self, config: BatchesConfig, path: Path, router: int, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._folder = path.parent
        self._router = router
        self._now = now
        self._db = connect(path)

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    # Files.

    def begin_upload(self, file: FileRecord) -> None:
        """Note that the bytes of an upload are being written. Raises ApiError: no space is left."""
        self._check_space(file.owner)
        self._begin(file, None)

    def finish_upload(self, file: FileRecord) -> None:
        """Make a complete upload visible. Raises ApiError: it exceeds a limit."""
        with changing(self._db):
            uploads = self._number_of(file.owner, "batch")
            if uploads >= MAX_FILES:
                raise _too_many(f"There are {uploads} files, which is the limit; delete some.")
            self._ready(file)
            self._check_space(file.owner)

    def files(self, owner: str, purpose: str | None, page: Page) -> tuple[list[FileRecord], bool]:
        """A page of the files of ``owner``, and whether there are more."""
        where, values = f"owner = ? AND {_VISIBLE}", [owner, self._now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows, more = page_of(self._db, _FILE, "files", where, values, page)
        return [_file(row) for row in rows], more

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """The file of ``owner`` with that id, if there is one."""
        row = self._db.execute(
            f"{_FILE} WHERE id = ? AND owner = ? AND {_VISIBLE}", (file_id, owner, self._now())
        ).fetchone()
        return None if row is None else _file(row)

    def hide_file(self, file_id: str) -> None:
        """Delete a file for its client. Its bytes stay while a batch reads them."""
        self._db.execute("UPDATE files SET state = 'deleted' WHERE id = ?", (file_id,))

    def unused_files(self, file_id: str | None = None) -> list[str]:
        """Ids of files (or only ``file_id``) deleted, expired or left over by crashes."""
        now_s = self._now()
        orphan_s = now_s - ORPHAN_S
        with changing(self._db):
            # No batch can be made of them, and no upload of them finished, from now on.
            self._db.execute(
                "UPDATE files SET state = 'deleted' WHERE (state = 'ready' AND expires_s <= ?"
                f" OR state = 'writing' AND created_s <= ?) AND {_UNUSED}",
                (now_s, orphan_s),
            )
            rows = self._db.execute(
                "SELECT id FROM files WHERE state = 'deleted' AND id = IFNULL(?, id)"
                f" AND {_UNUSED}",
                (file_id,),
            ).fetchall()
        return [each for (each,) in rows]

    def forget_file(self, file_id: str) -> None:
        """The bytes of a file were deleted."""
        self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # Batches.

    def add_batch(self, batch: BatchRecord) -> None:
        """Add a batch. Raises ApiError: it exceeds a limit, or its input was just deleted."""
        with changing(self._db):
            self._check_space(batch.owner)
            (unfinished,) = self._db.execute(
                "SELECT COUNT(*) FROM batches WHERE owner = ? AND ended_s IS NULL", (batch.owner,)
            ).fetchone()
            if unfinished >= MAX_UNFINISHED:
                raise _too_many(
                    f"There are {unfinished} batches that have not ended, which is the limit."
                )
            results = self._number_of(batch.owner, "batch_output")
            if results >= MAX_FILES:
                raise _too_many(
                    f"There are {results} files of results, which is the limit; delete some."
                )
            if self.file(batch.owner, batch.input_file_id) is None:
                raise file_not_found(batch.input_file_id, "input_file_id")
            self._db.execute(
                "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE owner = ?"
                " AND ended_s IS NOT NULL ORDER BY created_s DESC, id DESC LIMIT -1 OFFSET ?)",
                (batch.owner, MAX_ENDED),
            )
            self._db.execute(
                "INSERT INTO batches (id, owner, created_s, input_file_id, record)"
                " VALUES (?, ?, ?, ?, ?)",
                (
                    batch.id,
                    batch.owner,
                    batch.created_s,
                    batch.input_file_id,
                    batch.model_dump_json(),
                ),
            )

    def batches(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """A page of the batches of ``owner``, and whether there are more."""
        rows, more = page_of(self._db, _BATCH, "batches", "owner = ?", [owner], page)
        return [_batch(row) for row in rows], more

    def batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """The batch of ``owner`` with that id, if there is one."""
        row = self._db.execute(f"{_BATCH} WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        return None if row is None else _batch(row)

    def unfinished(self) -> list[BatchRecord]:
        """Every owner's batches that have not ended, oldest first."""
        rows = self._db.execute(f"{_BATCH} WHERE ended_s IS NULL ORDER BY created_s, id")
        return [_batch(row) for row in rows]

    def cancel(self, batch_id: str) -> None:
        """Ask the holder of a batch to end it. Only the first call has an effect."""
        self._db.execute(
            "UPDATE batches SET cancelled_s = ? WHERE id = ? AND cancelled_s IS NULL"
            " AND ended_s IS NULL",
            (self._now(), batch_id),
        )

    def holder(self, batch_id: str) -> int | None:
        """The router that runs a batch, or ran it when it died."""
        row = self._db.execute("SELECT holder FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else row[0]

    def claim(self, batch_id: str, before: int | None) -> BatchRecord | None:
        """Become a batch's holder if it is still ``before`` and not ended; its record."""
        changed = self._db.execute(
            "UPDATE batches SET holder = ? WHERE id = ? AND holder IS ? AND ended_s IS NULL",
            (self._router, batch_id, before),
        ).rowcount
        if not changed:
            return None
        return _batch(self._db.execute(f"{_BATCH} WHERE id = ?", (batch_id,)).fetchone())

    # For the holder of a batch; what changes the batch raises BatchLostError for other routers.

    def release(self, batch_id: str) -> None:
        """Let other routers run the batch."""
        self._db.execute(
            "UPDATE batches SET holder = NULL WHERE id = ? AND holder = ?",
            (batch_id, self._router),
        )

    def save(self, batch: BatchRecord) -> None:
        """Replace the record."""
        with changing(self._db):
            self._check_holder(batch.id)
            self._save(batch)

    def promise(
        self, batch: BatchRecord, nearest_s: Callable[[Sequence[BatchRecord]], float]
    ) -> float:
        """Replace the record by ``batch``, which is promised, if its window is no shorter than the
        nearest beside the other promised batches. Returns that, seconds from now."""
        with changing(self._db):
            self._check_holder(batch.id)
            others = [each for each in self.unfinished() if each.work_s and each.id != batch.id]
            found = nearest_s(others)
            if found <= batch.expires_s - self._now():
                self._save(batch)
        return found

    def answered(self, batch_id: str) -> set[int]:
        """The lines that have a result."""
        rows = self._db.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        return {line for (line,) in rows}

    def add_results(self, batch_id: str, results: Sequence[Result]) -> None:
        """Add results. One for a line that has a result is dropped."""
        with changing(self._db):
            self._check_holder(batch_id)
            added = [0, 0]
            size = 0
            for result in results:
                if self._db.execute(
                    "INSERT OR IGNORE INTO results (batch_id, line, ok, entry) VALUES (?, ?, ?, ?)",
                    (batch_id, *result),
                ).rowcount:
                    added[result.ok] += 1
                    size += len(result.entry)
            self._db.execute(
                "UPDATE batches SET failed = failed + ?, completed = completed + ?,"
                " result_bytes = result_bytes + ? WHERE id = ?",
                (*added, size, batch_id),
            )

    def results(self, batch_id: str, ok: bool, after: int) -> tuple[list[bytes], int]:
        """Some entries in the order of ending, and the place ``after`` which more are."""
        rows = self._db.execute(
            "SELECT n, entry FROM results WHERE batch_id = ? AND ok = ? AND n > ?"
            " ORDER BY n LIMIT ?",
            (batch_id, ok, after, _PAGE_ROWS),
        )
        entries, size = [], 0
        for n, entry in rows:
            entries.append(entry)
            after = n
            size += len(entry)
            if size >= _PAGE_BYTES:
                rows.close()
                break
        return entries, after

    def begin_result_file(self, file: FileRecord, batch_id: str) -> None:
        """Note that a result file of a batch is being written, perhaps again."""
        with changing(self._db):
            self._check_holder(batch_id)
            self._begin(file, batch_id)

    def end(self, batch: BatchRecord, files: Sequence[FileRecord]) -> None:
        """Save the final record, and make the result files visible, whose bytes are complete."""
        with changing(self._db):
            self._check_holder(batch.id)
            for file in files:
                self._ready(file)
            self._save(batch)
            self._db.execute(
                "UPDATE batches SET ended_s = ?, holder = NULL, result_bytes = 0 WHERE id = ?",
                (self._now(), batch.id),
            )

    # Upkeep.

    def sweep(self) -> bool:
        """Delete expired batches, and some results of ended ones; whether there may be more."""
        with changing(self._db):
            self._db.execute(
                "DELETE FROM batches WHERE ended_s <= ?", (self._now() - self._config.retention_s,)
            )
            deleted = self._db.execute(
                "DELETE FROM results WHERE n IN (SELECT n FROM results WHERE batch_id NOT IN"
                " (SELECT id FROM batches WHERE ended_s IS NULL) LIMIT ?)",
                (_DELETED_ROWS,),
            ).rowcount
        self._db.execute("PRAGMA incremental_vacuum(1000)").fetchall()
        return bool(deleted == _DELETED_ROWS)

    def has_space(self, owner: str) -> bool:
        """Whether results of ``owner`` may be added."""
        try:
            self._check_space(owner)
        except ApiError:
            return False
        return True

    # Parts.

    def _check_space(self, owner: str) -> None:
        """Raises ApiError: no space left for ``owner`` or for all, or the disk is nearly full."""
        limits = self._config
        used = self._used("WHERE owner = ?", owner)
        if used > limits.max_bytes_per_key:
            raise _too_many(
                f"Files and batches use {used} bytes; allowed: {limits.max_bytes_per_key}. "
                "Delete some files."
            )
        free = shutil.disk_usage(self._folder).free
        if free < limits.min_free_bytes or self._used("") > limits.max_bytes:
            raise storage_full()

    def _number_of(self, owner: str, purpose: str) -> int:
        (number,) = self._db.execute(
            f"SELECT COUNT(*) FROM files WHERE owner = ? AND {_VISIBLE} AND purpose = ?",
            (owner, self._now(), purpose),
        ).fetchone()
        return int(number)

    def _used(self, where: str, *values: str) -> int:
        (used,) = self._db.execute(
            f"SELECT (SELECT TOTAL(bytes) FROM files {where})"
            f" + (SELECT TOTAL(result_bytes) FROM batches {where})",
            (*values, *values),
        ).fetchone()
        return int(used)

    def _begin(self, file: FileRecord, batch_id: str | None) -> None:
        columns = (getattr(file, name) for name in FileRecord.model_fields)
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, 'writing', ?)",
            (*columns, batch_id),
        )

    def _ready(self, file: FileRecord) -> None:
        changed = self._db.execute(
            "UPDATE files SET bytes = ?, filename = ?, created_s = ?, expires_s = ?,"
            " state = 'ready' WHERE id = ? AND state = 'writing'",
            (file.bytes, file.filename, file.created_s, file.expires_s, file.id),
        ).rowcount
        if not changed:
            raise OSError(f"{file.id} took too long to write, and was deleted")

    def _check_holder(self, batch_id: str) -> None:
        held = self._db.execute(
            "SELECT 1 FROM batches WHERE id = ? AND holder = ? AND ended_s IS NULL",
            (batch_id, self._router),
        ).fetchone()
        if held is None:
            raise BatchLostError(f"another router runs the batch {batch_id}, or it has ended")

    def _save(self, batch: BatchRecord) -> None:
        self._db.execute(
            "UPDATE batches SET record = ? WHERE id = ?", (batch.model_dump_json(), batch.id)
        )


def file_not_found(file_id: str, param: str | None = None) -> ApiError:
    """A 404 that does not reveal whether another client has the file."""
    return ApiError(Reason.NOT_FOUND, f"There is no file {shown(file_id)}.", param)


def storage_full() -> ApiError:
    """A 507: the server's storage is full, which is not the client's fault."""
    return ApiError(Reason.STORAGE_FULL, "The storage for files and batches is full.")


def _too_many(message: str) -> ApiError:
    return ApiError(Reason.STORAGE_LIMIT, message)


def _file(row: tuple[Any, ...]) -> FileRecord:
    return FileRecord(**dict(zip(FileRecord.model_fields, row, strict=True)))


def _batch(row: tuple[Any, ...]) -> BatchRecord:
    record, completed, failed, cancelled_s, ended_s = row
    batch = BatchRecord.model_validate_json(record)
    changes: dict[str, Any] = {"completed": completed, "failed": failed}
    if cancelled_s is not None and ended_s is None:
        changes["reached_s"] = {**batch.reached_s, Status.CANCELLING: cancelled_s}
    return batch.model_copy(update=changes)
