"""The bytes of files through fsspec: in a folder, or in a bucket of S3 or Google Cloud Storage.

The state decides which names are visible, so nothing is renamed, locked or listed. Finished files
survive a power failure. A writer to a bucket holds some :data:`PART_BYTES` in memory."""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, BinaryIO, Final

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

# Private folders whose names survive a power failure, and the routers that are alive.


def make_folder(path: Path) -> None:
    """Create a folder and parents that only its owner reads, and that survive a power failure."""
    if not path.parent.exists():
        make_folder(path.parent)  # mkdir's own way to make those lets everyone read them
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return  # the folder above it may be one that we cannot read
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_private(path: Path) -> int:
    """A handle of a file that only its owner can read; it is created if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


class Routers:
    """The routers that share a folder. Each locks the byte of a file at its random ``id`` until its
    process ends, so that liveness depends on no clock. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.id = secrets.randbits(62)
        self._mine, self._others = open_private(path), open_private(path)
        _lock(self._mine, self.id, fcntl.F_WRLCK)

    def alive(self, router: int) -> bool:
        """Whether the process of that router lives."""
        try:
            _lock(self._others, router, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        _lock(self._others, router, fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """This router has ended."""
        os.close(self._mine)
        os.close(self._others)


def _lock(handle: int, byte: int, kind: int) -> None:
    """Locks of the open file, so they also hold within a process. Raises BlockingIOError."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))


PART_BYTES: Final = 8 << 20  # of the parts of an object; S3 accepts 10,000 of them
READ_BYTES: Final = 1 << 20  # bytes that are read at once


class ByteStore:
    """Bytes by name, in a folder or at a URL (``s3://bucket/prefix``). All methods block; any
    number of processes and threads may use them. Raises OSError."""

    def __init__(self, place: Path | str) -> None:
        self._folder = place if isinstance(place, Path) else None
        if isinstance(place, Path):
            make_folder(place)
            self._fs, self._root = LocalFileSystem(), str(place)
        else:
            scheme, _, path = place.partition("://")
            self._fs, self._root = _bucket(scheme), path.rstrip("/")

    def create(self, name: str) -> IO[bytes]:
        """Begin to write. Pass the file to :meth:`finish`, or close and delete it."""
        options = {} if self._folder else {"buffer_size": PART_BYTES}
        file: IO[bytes] = self._fs.open(self._path(name), "wb", **options)
        return file

    def finish(self, file: IO[bytes]) -> None:
        """Close a file that was written."""
        if self._folder:
            file.flush()
            os.fsync(file.fileno())
            sync_folder(self._folder)
        file.close()

    def open(self, name: str) -> BinaryIO:
        """Open for reading. Raises FileNotFoundError: there is none."""
        return BufferedReader(self._fs.open(self._path(name), "rb"), READ_BYTES)

    def delete(self, name: str) -> None:
        """Delete it, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _bucket(scheme: str) -> AbstractFileSystem:
    """Credentials, region and endpoint come from the environment or from the machine's role."""
    try:
        from obstore.fsspec import FsspecStore
    except ImportError as error:
        raise OSError(
            "router.batches.url needs the package obstore: install sluice-serve[object-storage]"
        ) from error
    # fsspec would share instances, with the environment that the first of them saw.
    return FsspecStore(scheme, skip_instance_cache=True)  # type: ignore[call-overload]
