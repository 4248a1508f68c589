"""Notes of the `sluice serve` runs of this user, by which other commands find them.

A note is a file that only the user can read. Its `sluice serve` keeps it locked: a note without a
lock is of a run that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError


class LocalRun(BaseModel):
    """Where an application of this machine is reached, and the admin key that was made for it."""

    address: str
    key: str | None


@contextmanager
def noted(run: LocalRun) -> Iterator[None]:
    """Keep a note of ``run`` until the block ends; no note where the folder cannot be written."""
    try:
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=folder, prefix=".")
    except (OSError, RuntimeError):
        yield
        return
    note = folder / f"{_prefix()}{os.getpid()}.json"
    with open(descriptor, "w") as file:  # noqa: PTH123
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(run.model_dump_json())
        file.flush()
        Path(draft).replace(note)  # from here on it is seen, with its lock
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def local_runs() -> list[LocalRun]:
    """What this user serves on this machine now. Notes of runs that have ended are removed."""
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for note in sorted(state_folder().glob(f"{_prefix()}*.json")):
            with contextlib.suppress(OSError, ValidationError):
                found += [run] if (run := _read(note)) is not None else []
    return found


def _read(note: Path) -> LocalRun | None:
    with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:  # noqa: PTH123
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LocalRun.model_validate_json(file.read())
        note.unlink(missing_ok=True)
        return None


def state_folder() -> Path:
    """Where this user's programs keep what outlives them (XDG base directories).

    Raises:
        RuntimeError: the user has no home.
    """
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "sluice"


def _prefix() -> str:
    # Machines may share a home.
    return f"{socket.gethostname()}-"
