"""Records of what a process did, as JSON lines in a file, for diagnosis and replay."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final, TextIO

MAX_RECORDS: Final = 100_000
MAX_RECORD_BYTES: Final = 1 << 30
"""Most lines and bytes of a log, which then ends."""

logger = logging.getLogger(__name__)


def whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a file of records, without a last one that a killed process has begun."""
    return takewhile(lambda line: line.endswith("\n"), lines)


class RecordLog:
    """Records as JSON lines: a new log at ``path``. The first of both limits ends it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: TextIO | None = path.open("w", encoding="ascii", buffering=1)
        self._lines = self._bytes = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record. A full disk ends the log, not the process."""
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            self._file.write(line)
            self._lines += 1
            self._bytes += len(line)
            ended = self._lines >= MAX_RECORDS or self._bytes >= MAX_RECORD_BYTES
        except OSError as error:
            logger.warning("%s ends after %d records: %s", self._path, self._lines, error)
            ended = True
        if ended:
            # Closing writes what is left, and fails where writing did.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
