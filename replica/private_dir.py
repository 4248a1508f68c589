"""Private folders for sockets and shared memory, which do not outlive their process for long.

Each folder has a lock that the system frees when its process dies; the next process that makes a
folder at the same place removes the folders whose lock is free."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Environment variable that says in which folder vLLM makes its sockets."""

PREFIX = "sluice-"
LOCK = ".private-folder-of-sluice"
"""The lock's file. Its name also says that the folder may be removed, so no other file has it."""


def make_private_dir(base: Path | None = None) -> Path:
    """As ``private_dir``, but in use until this process ends; the caller may remove it before."""
    return _make(base or _short_base())[0]


@contextmanager
def private_dir(base: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end of the block. By default it
    has a path short enough for sockets. Raises OSError: it cannot be made."""
    directory, lock = _make(base or _short_base())
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _short_base() -> Path:
    short = Path("/tmp")
    return short if short.is_dir() else Path(tempfile.gettempdir())


def _make(base: Path) -> tuple[Path, int]:
    _remove_left_over(base)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    unready = directory / f"{LOCK}.new"
    lock = os.open(unready, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # The lock is held before it gets its name, so no process takes the folder for an abandoned one.
    unready.rename(directory / LOCK)
    return directory, lock


def _remove_left_over(base: Path) -> None:
    """Remove dead processes' folders in ``base``, not those of other users or without a lock."""
    for directory in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_named(directory):
                    shutil.rmtree(directory, ignore_errors=True)
                    logger.info("removed %s, which a killed process had left", directory)
            finally:
                os.close(lock)


def _is_named(directory: Path) -> bool:
    """Whether a process has ``directory`` on its command line, as Ray's processes have that outlive
    a killed one: they are found by their files, which must stay until they end."""
    processes = psutil.process_iter(["cmdline"])
    return any(str(directory) in word for each in processes for word in each.info["cmdline"] or ())
