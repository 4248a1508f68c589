"""The bytes of files through fsspec: in a folder, or in a bucket of S3 or Google Cloud Storage.

:mod:`sluice.router.batches.state` decides which names are visible, so nothing here is renamed,
locked or listed. What is finished survives a power failure: a folder is synced, and a bucket has
acknowledged the object. A writer to a bucket holds some parts of :data:`PART_BYTES` in memory at
most.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, BinaryIO, Final

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from sluice.router.batches.folders import make_folder, sync_folder

PART_BYTES: Final = 8 << 20
"""Size of the parts in which an object is sent to a bucket, bytes. S3 accepts 10,000 of them."""

READ_BYTES: Final = 1 << 20
"""Bytes that are read at once."""


class ByteStore:
    """Bytes by name. All methods block; any number of processes and threads may use them.

    Args:
        place: a folder, which is created if it is missing, or a URL such as ``s3://bucket/prefix``.

    Raises:
        OSError: the folder cannot be used, or the package for buckets is not installed.
    """

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
        """Open for reading.

        Raises:
            FileNotFoundError: there is none.
        """
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
            "router.batches.url needs the package obstore: install sluice[object-storage]"
        ) from error
    # fsspec would share instances, with the environment that the first of them saw.
    return FsspecStore(scheme, skip_instance_cache=True)  # type: ignore[call-overload]
