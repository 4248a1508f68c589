"""One SQLite database that all routers open, with the state of files and batches.

Which process owns the state: none does. Each router opens the database, SQLite's locks order their
transactions, and a transaction is either on the disk as a whole or not there at all. So there is no
further process that can fail, restart or be of another version, and no call can be lost on its way.

The journal is a rollback journal, not WAL: WAL needs memory that all processes share, so it would
lose data where routers on several nodes open the database on a network file system. ``synchronous``
is ``EXTRA``: a transaction that has returned survives a power failure.

``files``
    A row exists before and after the bytes do: ``writing`` until they are complete, ``ready``, and
    ``deleted`` until they are removed. Only ``ready`` ones are visible. No bytes exist without a
    row, so a crash leaves nothing that must be searched for.
``batches``
    ``holder`` is the router that runs the batch, see
    :class:`sluice.router.batches.folders.Routers`. Only the holder changes the record and adds
    results; each of its transactions checks that it still is the holder, so a router that lost its
    lock cannot do harm.
``results``
    A line of a running batch has one result at most: (batch, line) is unique. ``n`` is the order in
    which lines ended. Results become files when the batch ends, and are then deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sluice.router.batches.folders import open_private, sync_folder
from sluice.router.batches.paging import Page
from sluice.router.errors import ApiError, Reason, shown

VERSION: Final = 1
"""Version of the tables; a database of another version is refused."""

BUSY_S: Final = 30.0
"""Maximum wait for another router's transaction, seconds."""

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
    """Open the database at ``path``, which is created if it is missing. One thread at a time may
    use it.

    Raises:
        sqlite3.Error, OSError: it cannot be opened, or is of another version.
    """
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
    """Several changes in one transaction, which is durable at its end, or rolled back. A single
    change is a transaction of its own."""
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
    """A page of what ``select`` finds in a table by creation time, and whether there is more.

    Args:
        where: condition of the rows, with ``values`` for its parameters.

    Raises:
        ApiError: the object after which the page begins does not exist.
    """
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
