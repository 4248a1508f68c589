"""Files and batches in a folder that router replicas share.

::

    <directory>/lock                        held while limits are checked and something is added
    <directory>/<owner>/files/<id>.json     a file's record; while it is there, so is the file
    <directory>/<owner>/files/<id>.data     its bytes
    <directory>/<owner>/batches/<id>/       batch.json: its record; lease: locked by the router that
                                            runs it; cancel: it was cancelled; input.jsonl: the
                                            input, a second name of the file; output.jsonl and
                                            errors.jsonl: results, a line each, until they become
                                            files

One process writes each file: only the holder of the lease changes a batch after its creation. A
record is replaced as a whole. All methods block on the disk: call them in a thread.

The folder must be on a file system with hard links and ``flock``.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sluice.router.batches.disk import (
    TEMPORARY,
    Lock,
    locked,
    make_folder,
    try_lock,
    used_bytes,
    write_whole,
)
from sluice.router.batches.records import (
    BATCH_ID,
    FILE_ID,
    BatchRecord,
    FileRecord,
    Status,
    new_file_id,
    result_file_id,
)
from sluice.router.batches_config import BatchesConfig
from sluice.router.errors import ApiError, Reason, shown

ORPHAN_S = 3_600.0
"""Minimum age, in seconds, at which an unreferenced file or folder counts as left over by a crash.
Writes in progress are younger."""

INPUT = "input.jsonl"
OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"

_RECORD = "batch.json"
_CANCEL = "cancel"
_LEASE = "lease"
_KEPT_RECORDS = 8_192

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record", FileRecord, BatchRecord)


class Store:
    """The folder of one configuration. Any number of processes may have it open.

    Args:
        directory: the folder; it is created if it is missing.
        now: Unix seconds.

    Raises:
        OSError: the folder cannot be created or locked.
    """

    def __init__(self, config: BatchesConfig, directory: Path, now: Callable[[], float]) -> None:
        self._config = config
        self._directory = directory
        self._now = now
        self._ended: set[str] = set()
        make_folder(directory)
        with locked(self._lock):
            pass

    # Files.

    def upload_path(self, owner: str) -> Path:
        """Where to put the bytes of an upload of ``owner`` until :meth:`add_file`.

        Raises:
            ApiError: there is no room for any.
        """
        folder = self._files(owner)
        make_folder(folder)
        self._check_room(owner)
        return folder / f"{TEMPORARY}{new_file_id()}"

    def add_file(
        self, owner: str, content: Path, filename: str, expires_after_s: float | None
    ) -> FileRecord:
        """Take in the upload at ``content``, which :meth:`upload_path` gave; it is moved.

        Raises:
            ApiError: a limit would be passed; it names the limit.
        """
        record = self._new_file(
            owner, new_file_id(), content, filename, expires_after_s or self._config.retention_s
        )
        with locked(self._lock):
            self._check_room(owner)  # the upload is in the folder already
            uploads = sum(each.purpose == "batch" for each in self.files(owner))
            if uploads >= self._config.max_files_per_key:
                raise ApiError(
                    Reason.STORAGE_LIMIT,
                    f"There are {uploads} files, which is the limit; delete some.",
                )
            data = self.data_path(record)
            content.replace(data)
            try:
                self._write_file(record)
            except BaseException:
                data.unlink()  # on a full disk above all nothing may be left
                raise
        return record

    def files(self, owner: str) -> list[FileRecord]:
        """The files of ``owner`` that have not expired, oldest first."""
        found = [
            record
            for path in _listed(self._files(owner), "*.json")
            if (record := _read(path, FileRecord)) is not None and record.expires_s > self._now()
        ]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """The file of ``owner`` with that id, if there is one."""
        if not FILE_ID.fullmatch(file_id):
            return None
        record = _read(self._files(owner) / f"{file_id}.json", FileRecord)
        return record if record is not None and record.expires_s > self._now() else None

    def data_path(self, record: FileRecord) -> Path:
        """Where the bytes of a file are."""
        return self._files(record.owner) / f"{record.id}.data"

    def delete_file(self, record: FileRecord) -> None:
        """Forget a file. A batch that was made of it keeps its input until it ends."""
        (self._files(record.owner) / f"{record.id}.json").unlink(missing_ok=True)
        self.data_path(record).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, record: BatchRecord, source: FileRecord) -> None:
        """Keep a new batch whose input is ``source``.

        Raises:
            ApiError: a limit would be passed, or ``source`` has just been deleted.
        """
        folder = self._folder(record)
        with locked(self._lock):
            self._check_room(record.owner)
            batches = self.batches(record.owner)
            unfinished = sum(not each.ended for each in batches)
            if unfinished >= self._config.max_unfinished_per_key:
                raise ApiError(
                    Reason.STORAGE_LIMIT,
                    f"There are {unfinished} batches that have not ended, which is the limit.",
                )
            results = sum(each.purpose == "batch_output" for each in self.files(record.owner))
            if results >= self._config.max_files_per_key:
                raise ApiError(
                    Reason.STORAGE_LIMIT,
                    f"There are {results} files of results, which is the limit; delete some.",
                )
            ended = [each for each in batches if each.ended]
            for old in ended[: max(0, len(ended) - self._config.max_ended_per_key)]:
                self._remove(old)
            make_folder(folder)
            try:
                (folder / INPUT).hardlink_to(self.data_path(source))
            except FileNotFoundError:
                raise file_not_found(source.id, "input_file_id") from None
            self.save(record)

    def batches(self, owner: str) -> list[BatchRecord]:
        """The batches of ``owner``, oldest first."""
        folders = _listed(self._batches(owner), "batch_*")
        found = [record for path in folders if (record := _batch(path)) is not None]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """The batch of ``owner`` with that id, if there is one."""
        if not BATCH_ID.fullmatch(batch_id):
            return None
        return _batch(self._batches(owner) / batch_id)

    def unfinished(self) -> list[BatchRecord]:
        """Every owner's batches that have not ended, oldest first.

        Must be called by one thread at a time. As it is called repeatedly, a batch that was found
        to have ended is not read again.
        """
        found, ended = [], set()
        for owner in self._owners():
            for folder in _listed(self._batches(owner), "batch_*"):
                if folder.name in self._ended:
                    ended.add(folder.name)
                elif (record := _batch(folder)) is None:
                    continue
                elif record.ended:
                    ended.add(folder.name)
                else:
                    found.append(record)
        self._ended = ended
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def cancel(self, record: BatchRecord) -> None:
        """Ask the router that runs a batch to end it. Only the first call has an effect."""
        path = self._folder(record) / _CANCEL
        if not path.exists():
            write_whole(path, str(self._now()).encode())

    def lease(self, record: BatchRecord) -> tuple[Lock, BatchRecord] | None:
        """Take the lease of a batch, and return it with the current record; ``None`` if another
        router holds it, or the batch has ended."""
        folder = self._folder(record)
        lock = try_lock(folder / _LEASE)
        if lock is None:
            return None
        current = _batch(folder, fresh=True)
        if current is None or current.ended:
            lock.release()
            return None
        return lock, current

    # For the holder of the lease.

    def path(self, record: BatchRecord, name: str) -> Path:
        """Path of a batch's :data:`INPUT`, :data:`OUTPUT` or :data:`ERRORS`."""
        return self._folder(record) / name

    def save(self, record: BatchRecord) -> None:
        """Replace the record."""
        write_whole(self._folder(record) / _RECORD, record.model_dump_json().encode())

    def publish(self, record: BatchRecord, name: str) -> str | None:
        """Make a file of the results :data:`OUTPUT` or :data:`ERRORS`, and return its id; ``None``
        if there are none. Idempotent."""
        source = self._folder(record) / name
        if not source.exists() or source.stat().st_size == 0:
            return None
        file_id = result_file_id(record.id, name)
        file = self._new_file(
            record.owner, file_id, source, f"{record.id}_{name}", record.output_expires_s
        ).model_copy(update={"purpose": "batch_output"})
        with suppress(FileExistsError):
            self.data_path(file).hardlink_to(source)
        self._write_file(file)
        return file_id

    def drop_work(self, record: BatchRecord) -> None:
        """Delete files that an ended batch no longer needs."""
        for name in (INPUT, OUTPUT, ERRORS):
            (self._folder(record) / name).unlink(missing_ok=True)

    def has_room(self, owner: str) -> bool:
        """Whether results of ``owner`` may be added."""
        try:
            self._check_room(owner)
        except ApiError:
            return False
        return True

    # Upkeep.

    def sweep(self) -> None:
        """Delete expired files and batches, and leftovers of crashes. Any process may call this at
        any time."""
        for owner in self._owners():
            self._sweep_files(self._files(owner))
            for folder in _listed(self._batches(owner), "batch_*"):
                self._sweep_batch(folder)

    def _sweep_files(self, folder: Path) -> None:
        for path in _listed(folder, "*.json"):
            record = _read(path, FileRecord)
            if record is not None and record.expires_s <= self._now():
                self.delete_file(record)
        for path in (*_listed(folder, "*.data"), *_listed(folder, f"{TEMPORARY}*")):
            if not path.with_suffix(".json").exists() and self._is_orphan(path):
                path.unlink(missing_ok=True)

    def _sweep_batch(self, folder: Path) -> None:
        record = _batch(folder)
        # A record that cannot be read is no reason to delete a batch: it may be a later version's.
        if not (folder / _RECORD).exists():
            if self._is_orphan(folder):
                shutil.rmtree(folder, ignore_errors=True)
        elif record is not None and record.ended:
            self.drop_work(record)
            if record.reached_s[record.status] + self._config.retention_s <= self._now():
                self._remove(record)
        for path in _listed(folder, f"{TEMPORARY}*"):
            if self._is_orphan(path):
                path.unlink(missing_ok=True)

    def _is_orphan(self, path: Path) -> bool:
        age_s = max(ORPHAN_S, 2 * self._config.upload_timeout_s)
        with suppress(FileNotFoundError):
            return path.stat().st_mtime + age_s <= self._now()
        return False

    def _remove(self, record: BatchRecord) -> None:
        # The record first: without it the rest is nothing.
        folder = self._folder(record)
        (folder / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    # Parts.

    @property
    def _lock(self) -> Path:
        return self._directory / "lock"

    def _files(self, owner: str) -> Path:
        return self._directory / owner / "files"

    def _batches(self, owner: str) -> Path:
        return self._directory / owner / "batches"

    def _folder(self, record: BatchRecord) -> Path:
        return self._batches(record.owner) / record.id

    def _owners(self) -> Iterator[str]:
        for path in _listed(self._directory, "*"):
            if path.is_dir():
                yield path.name

    def _new_file(
        self, owner: str, file_id: str, content: Path, filename: str, kept_s: float
    ) -> FileRecord:
        now_s = self._now()
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose="batch",
            bytes=content.stat().st_size,
            created_s=now_s,
            expires_s=now_s + kept_s,
        )

    def _write_file(self, record: FileRecord) -> None:
        write_whole(
            self._files(record.owner) / f"{record.id}.json", record.model_dump_json().encode()
        )

    def _check_room(self, owner: str) -> None:
        limits = self._config
        used = used_bytes(self._directory / owner)
        if used > limits.max_bytes_per_key:
            raise ApiError(
                Reason.STORAGE_LIMIT,
                f"Files and batches use {used} bytes; allowed: {limits.max_bytes_per_key}. "
                "Delete some files.",
            )
        free = shutil.disk_usage(self._directory).free
        if free < limits.min_free_bytes or used_bytes(self._directory) > limits.max_bytes:
            raise storage_full()


def file_not_found(file_id: str, param: str | None = None) -> ApiError:
    """A 404 that does not reveal whether another client has the file."""
    return ApiError(Reason.NOT_FOUND, f"There is no file {shown(file_id)}.", param)


def storage_full() -> ApiError:
    """A 507: the server's storage is full, which is not the client's fault."""
    return ApiError(Reason.STORAGE_FULL, "The storage for files and batches is full.")


@contextmanager
def full_disk_told() -> Iterator[None]:
    """Convert the system's error for a full disk into :func:`storage_full`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise storage_full() from error


def _listed(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _batch(folder: Path, fresh: bool = False) -> BatchRecord | None:
    """The record in ``folder``, with a cancellation requested since."""
    record = _read(folder / _RECORD, BatchRecord, fresh)
    if record is None or record.ended or record.cancelling:
        return record
    asked_s = _asked_s(folder / _CANCEL)
    if asked_s is None:
        return record
    return record.model_copy(update={"reached_s": {**record.reached_s, Status.CANCELLING: asked_s}})


def _asked_s(path: Path) -> float | None:
    """When the batch was cancelled, Unix seconds; ``None`` if it was not. The file's existence
    decides: if its content is damaged, its modification time is used."""
    try:
        with suppress(ValueError):
            asked_s = float(path.read_text(encoding="ascii"))
            if isfinite(asked_s):
                return asked_s
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _read(path: Path, kind: type[_Record], fresh: bool = False) -> _Record | None:
    """The record at ``path``; ``None`` if it is missing or cannot be read.

    Each version of a record is parsed once, as it is a new file. ``fresh`` parses it in any case,
    for callers that must not rely on two versions differing in inode number or time.
    """
    try:
        found = path.stat()
        if fresh:
            parsed = _parse(path, kind)
        else:
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            parsed = _parsed(os.fspath(path), kind, *version)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _tell_of(os.fspath(path), _first_line(error))
        return None
    assert isinstance(parsed, kind)
    return parsed


def _first_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'text'}: {first['msg']}"
    return str(error)


@lru_cache(maxsize=1_024)
def _tell_of(path: str, why: str) -> None:
    """Log once that a record cannot be read: it is tried every few seconds."""
    _log.warning(
        "unreadable record %s; its file or batch is hidden until it is restored or deleted: %s",
        path,
        why,
    )


@lru_cache(maxsize=_KEPT_RECORDS)
def _parsed(path: str, kind: type[BaseModel], *_version: int) -> BaseModel:
    return _parse(Path(path), kind)


def _parse(path: Path, kind: type[BaseModel]) -> BaseModel:
    record = kind.model_validate_json(path.read_bytes())
    # Otherwise its other files would be looked for in another folder, perhaps outside of this one.
    if isinstance(record, BatchRecord):
        sound = (record.owner, record.id) == (path.parents[2].name, path.parent.name)
    else:
        assert isinstance(record, FileRecord)
        sound = (record.owner, record.id) == (path.parents[1].name, path.stem)
    if not sound:
        raise ValueError("its owner or id does not match its path")
    return record
