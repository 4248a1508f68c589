"""File system operations of the store: atomic writes, locks, and the bytes in use.

Locks are ``flock``: they belong to an open file, so they also hold between two users in one
process, and the system frees them when their process dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

TEMPORARY = ".part-"
"""Names of what is not complete begin so."""

_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700

_THREADS = 8


class DiskThreads:
    """Threads for what blocks on the disk, apart from those that other parts of a router use.

    To be used from one event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batches")

    async def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``function`` in a thread. If cancelled, this waits for its end first, so that it
        never writes after its caller has released a lock."""
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


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can read, with missing parents of the same kind; they
    survive a power failure."""
    if not path.parent.exists():
        make_folder(path.parent)  # mkdir's own way to make those lets everyone read them
    try:
        path.mkdir(mode=_PRIVATE_FOLDER)
    except FileExistsError:
        return  # the folder above it may be one that we cannot read
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file by ``data``: a reader or a crash sees the old or the new, never a part."""
    temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        with open_private(temporary, "xb") as file:
            write_all(file, data)
            os.fsync(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(file: FileIO, data: bytes) -> None:
    """Write ``data`` to a file without a buffer, which may take less at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_private(path: Path, mode: str) -> FileIO:
    """A file that only its owner can read, without a buffer; made where it is missing.

    It closes when it is forgotten, so what was opened for a cancelled task is not left open.
    """
    return FileIO(path, mode, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, _PRIVATE_FILE)


class Lock:
    """A lock that was taken. :meth:`release` it."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()


def try_lock(path: Path) -> Lock | None:
    """The lock of ``path``, or ``None`` if another process holds it or its folder is gone."""
    try:
        file = open_private(path, "ab")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return Lock(file)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``; blocks while another process holds it."""
    with open_private(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def used_bytes(folder: Path) -> int:
    """Bytes of all files under ``folder``; one with several names counts once.

    ``O(files)``: it asks the system for the size of each.
    """
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed while we looked
                found = os.lstat(os.path.join(parent, name))  # noqa: PTH118  thousands of them
                sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
