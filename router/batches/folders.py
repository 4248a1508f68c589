"""Private folders whose names survive a power failure, and the routers that are alive."""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from pathlib import Path


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can read, with missing parents of the same kind; they
    survive a power failure."""
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
    """The routers that share a folder, this one included.

    Each holds a lock on one byte of a file: the byte at its id, which is random and used once. The
    system releases the lock when the process ends, so whether a router is alive depends neither on
    clocks nor on how busy it is. The file stays empty.

    Attributes:
        id: of this router.

    Raises:
        OSError: the file cannot be created or locked.
    """

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
    """Locks of the open file, not of the process as POSIX's are: they also hold within a process.

    Raises:
        BlockingIOError: another one holds it.
    """
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))
