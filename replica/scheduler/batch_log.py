"""Planned and executed batches with their times as JSON lines, for tests and diagnosis."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

MOST_LINES: Final = 100_000
"""Max batches that a log holds."""

logger = logging.getLogger(__name__)


class BatchLog:
    """A new log at ``path``, of :data:`MOST_LINES` batches at most."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = path.open("w", encoding="utf-8", buffering=1)
        self._lines = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Append one batch; nothing more is written after the bound, or an error.

        The scheduler calls it, so a full disk must not end the engine.
        """
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            self._file.write(line)
            self._lines += 1
            if self._lines >= MOST_LINES:
                self._close()
        except OSError as error:
            logger.warning("the batch log ends after %d batches: %s", self._lines, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing writes what is left, and fails where writing did.
            with contextlib.suppress(OSError):
                file.close()
