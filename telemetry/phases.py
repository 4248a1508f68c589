"""The phases of a start. Each process logs its own; where ``sluice serve`` has started it, it also
appends their begins and ends to one file, which the terminal shows line by line."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

FILE_VARIABLE: Final = "SLUICE_PHASES"
"""The file of one ``sluice serve``; all processes that it starts inherit the variable."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The block, or the decorated function, is a phase of a start."""
    path = os.environ.get(FILE_VARIABLE)
    # Linux has one monotonic clock for all processes.
    begun_s = time.monotonic()
    _append(path, name, begun_s, None)
    how = ["failed"]
    try:
        yield
        how.clear()
    finally:
        ended_s = time.monotonic()
        _append(path, name, begun_s, ended_s, *how)
        logger.info("%s, %.1f s", " ".join([name, *how]), ended_s - begun_s)


def phase_detail(name: str, text: str) -> None:
    """Say how far a phase of this process is that has begun."""
    _append(os.environ.get(FILE_VARIABLE), name, None, None, text)


def _append(path: str | None, *fact: Any) -> None:
    if path is not None:
        with suppress(OSError), open(path, "a") as file:  # noqa: PTH123
            file.write(f"{json.dumps([os.getpid(), *fact])}\n")


class Ended(NamedTuple):
    """A phase that has ended ``at_s`` after the begin of the start."""

    name: str
    how: str
    at_s: float
    took_s: float

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s  {self.name}{self.how}, {self.took_s:.1f} s"


class Phases:
    """Reads the phases of all processes that inherit ``path``. ``zero_s``: the begin of the start,
    monotonic."""

    def __init__(self, path: Path, zero_s: float) -> None:
        path.touch(mode=0o600)
        self._file = path.open()
        self._zero_s = zero_s
        self._open: dict[tuple[int, str], str] = {}
        self._failed: dict[str, int] = {}

    def news(self) -> list[Ended]:
        """The phases that have ended since the last call."""
        found = []
        # A line is written at once, and so is read whole.
        for line in self._file:
            pid, name, begun_s, ended_s, *how = json.loads(line)
            if ended_s is None:
                if begun_s is not None or (pid, name) in self._open:
                    self._open[pid, name] = "".join(f" {word}" for word in how)
                continue
            self._open.pop((pid, name), None)
            if how:
                self._failed[name] = pid
            words = "".join(f" {word}" for word in how)
            found.append(Ended(name, words, ended_s - self._zero_s, ended_s - begun_s))
        return found

    def running(self) -> str:
        """The phases that have not ended, and how far they are, the last to begin first."""
        found = reversed(self._open.items())
        return "; ".join(dict.fromkeys(f"{name}{detail}" for (_, name), detail in found))

    def unfinished(self) -> str:
        """The names of the phases that have failed, or else of those that have not ended."""
        return "; ".join(self._failed or dict.fromkeys(name for _, name in self._open))

    def failed_in(self) -> set[int]:
        """The processes of the phases that have failed."""
        return set(self._failed.values())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
