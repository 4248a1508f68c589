"""Files and batches that router replicas share::

    <directory>/state.sqlite3    the state
    <directory>/routers          locked by the routers that are alive
    <directory>/files/<id>       bytes of files, or <url>/<id>

The directory needs a file system with POSIX locks, shared by the routers of several nodes, also
when the bytes are in a bucket: without the state they have no names."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import sqlite3
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, Concatenate, Final, ParamSpec, TypeVar

from sluice.router.batches.byte_store import ByteStore, Routers, make_folder
from sluice.router.batches.state import BatchRecord, BatchState, FileRecord, Purpose, storage_full
from sluice.router.config import BatchesConfig
from sluice.router.errors import ApiError

# Threads for calls that block, apart from those that other parts of a router use.


class Threads:
    """A bounded number of threads. To be used from one event loop."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="batches")

    async def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``function`` in a thread. Cancelled, it waits, so that no file is closed in use."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not call.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # has been looked at
            raise

    def close(self) -> None:
        """Accept no more work; running calls end by themselves."""
        self._threads.shutdown(wait=False)


NAME: Final = "state.sqlite3"

_BYTE_THREADS: Final = 8

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Store:
    """The files and batches of one configuration, used from one event loop per router. Methods
    raise ApiError if the disk is full, OSError if disk, database or bucket fails."""

    def __init__(self, config: BatchesConfig, directory: Path, now: Callable[[], float]) -> None:
        self._retention_s = config.retention_s
        self._now = now
        self._path = directory / NAME
        make_folder(directory)
        self._routers = Routers(directory / "routers")
        with self._converted_errors():
            self._state = BatchState(config, self._path, self._routers.id, now)
        self._bytes = ByteStore(config.url or directory / "files")
        # One thread, as transactions are one at a time; a slow bucket does not delay them.
        self._state_thread = Threads(1)
        self._byte_threads = Threads(_BYTE_THREADS)

    async def ask(
        self,
        method: Callable[Concatenate[BatchState, _P], _T],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Call a method of the state."""
        with self._converted_errors():
            return await self._state_thread.run(method, self._state, *args, **kwargs)

    async def close(self) -> None:
        """The router has ended: other routers can claim its batches."""
        await self.ask(BatchState.close)
        self._routers.close()
        self._state_thread.close()
        self._byte_threads.close()

    # Files.

    async def begin_upload(self, owner: str) -> Upload:
        """Begin an upload for :meth:`BatchState.finish_upload`. Raises ApiError: no space."""
        file_id = f"file-{uuid.uuid4().hex}"
        file = self._file(file_id, owner, "", "batch", self._retention_s)
        await self.ask(BatchState.begin_upload, file)
        return await self._upload(file)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file. A batch that was made of it keeps its input until it ends."""
        await self.ask(BatchState.hide_file, file_id)
        await self.delete_unused(file_id)

    async def read(self, file_id: str, use: Callable[[BinaryIO], _T]) -> _T:
        """Call ``use`` with the open file, in a thread."""

        def call() -> _T:
            with self._bytes.open(file_id) as file:
                return use(file)

        return await self._run(call)

    async def stream(
        self, file_id: str, parts: Callable[[BinaryIO], Iterator[_T]]
    ) -> AsyncGenerator[_T, None]:
        """The ``parts`` of a file, each read in a thread when it is needed."""
        file = await self._run(self._bytes.open, file_id)
        try:
            pending = parts(file)
            while (part := await self._run(next, pending, None)) is not None:
                yield part
        finally:
            file.close()

    # Batches.

    async def claim(self, batch_id: str) -> BatchRecord | None:
        """Become a batch's router; ``None`` if another living one runs it, or it has ended."""
        holder = await self.ask(BatchState.holder, batch_id)
        # This router asks only for batches that it does not run.
        if holder not in (None, self._routers.id) and self._routers.alive(holder):
            return None
        return await self.ask(BatchState.claim, batch_id, holder)

    async def write_results(self, batch: BatchRecord, ok: bool) -> FileRecord | None:
        """Write output or errors, ``None`` if none. Repeated, in any router: the same file."""
        entries, place = await self.ask(BatchState.results, batch.id, ok, 0)
        if not entries:
            return None
        name = "output.jsonl" if ok else "errors.jsonl"
        # Always the same, so that a router which takes over publishes no results twice.
        digest = hashlib.blake2b(f"{batch.id}/{name}".encode(), digest_size=16).hexdigest()
        filename, kept_s = f"{batch.id}_{name}", batch.output_expires_s
        file = self._file(f"file-{digest}", batch.owner, filename, "batch_output", kept_s)
        await self.ask(BatchState.begin_result_file, file, batch.id)
        upload = await self._upload(file)
        try:
            while entries:
                await upload.write(b"".join(entries))
                entries, place = await self.ask(BatchState.results, batch.id, ok, place)
            return await upload.close()
        except BaseException:
            # Another router that runs the batch by now writes the same file.
            if await self.ask(BatchState.holder, batch.id) == self._routers.id:
                await upload.abandon()
            raise

    # Upkeep.

    async def sweep(self) -> None:
        """Delete expired files, batches and leftovers of crashes; any router, any time."""
        await self.delete_unused()
        while await self.ask(BatchState.sweep):
            pass

    async def delete_unused(self, file_id: str | None = None) -> None:
        """Delete the bytes of files that are not used any more, only of ``file_id`` if given."""
        for each in await self.ask(BatchState.unused_files, file_id):
            try:
                await self._run(self._bytes.delete, each)
            except OSError as error:  # its row stays, for the next sweep
                _log.warning("cannot delete the bytes of %s; retrying later: %s", each, error)
            else:
                await self.ask(BatchState.forget_file, each)

    # Parts.

    def _file(
        self, file_id: str, owner: str, filename: str, purpose: Purpose, kept_s: float
    ) -> FileRecord:
        now_s = self._now()
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            bytes=0,
            created_s=now_s,
            expires_s=now_s + kept_s,
        )

    async def _upload(self, file: FileRecord) -> Upload:
        return Upload(self, file, await self._run(self._bytes.create, file.id))

    async def _run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._converted_errors():
            return await self._byte_threads.run(function, *args, **kwargs)

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert errors of SQLite, and that of a full disk."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise storage_full() from error
            advice = ""
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                advice = "; restore it from a copy, or move it away: all files and batches are lost"
            raise OSError(f"the database {self._path}: {error}{advice}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise storage_full() from error
            raise


class Upload:
    """The bytes of a file while they are written. Close or abandon it."""

    def __init__(self, store: Store, file: FileRecord, writer: IO[bytes]) -> None:
        self._store = store
        self._file = file
        self._writer = writer
        self._size = 0

    async def write(self, data: bytes) -> None:
        """Append ``data``."""
        await self._store._run(self._writer.write, data)
        self._size += len(data)

    async def close(self) -> FileRecord:
        """The bytes are complete, and survive a power failure. Returns the record with the size."""
        await self._store._run(self._store._bytes.finish, self._writer)
        return self._file.model_copy(update={"bytes": self._size})

    async def abandon(self) -> None:
        """Delete what was written; what cannot be deleted now is deleted later."""
        with suppress(OSError, ApiError):  # it may have failed before
            await self._store._run(self._writer.close)
        with suppress(OSError, ApiError):
            await self._store._run(self._store._bytes.delete, self._file.id)
            await self._store.ask(BatchState.forget_file, self._file.id)
