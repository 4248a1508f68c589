"""What ``sluice serve`` shows of its start: on a terminal one line that is replaced, with a bar
that is full when the last start was, elsewhere a line for each phase."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sluice.deploy.config import SluiceConfig
from sluice.telemetry.phases import Ended

_BAR = 20
"""Characters of the bar."""

_LONGEST = 4
"""Phases that a terminal shows once all is ready."""


class Progress:
    """Shows lines and the progress of one start on standard error. Not for several threads."""

    def __init__(self, config: SluiceConfig) -> None:
        self._console = Console(stderr=True)
        self._replaces = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._models = ", ".join(fleet.model for fleet in config.fleets)
        self._note = Path(os.devnull)
        with suppress(RuntimeError):  # there is no home
            cache = config.fleets[0].pools[0].engine.cache_dir.expanduser()
            self._note = cache / "last_start.json"
        self._last_s: float | None = None
        with suppress(OSError, ValueError, LookupError, TypeError):
            models, seconds = json.loads(self._note.read_text())
            self._last_s = float(seconds) if models == self._models else None
        self._took_s: dict[str, float] = {}
        self._doing = ""

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self.clear()
        self._console.print(Text.assemble(("sluice:", "dim"), " ", text), soft_wrap=True)

    def phase(self, ended: Ended) -> None:
        """A phase has ended."""
        self._took_s[ended.name] = max(ended.took_s, self._took_s.get(ended.name, 0.0))
        if not self._replaces:
            self.line(str(ended))

    def doing(self, text: str) -> None:
        """What is waited for has changed."""
        self._doing = text
        if not self._replaces:
            self.line(text)

    def show(self, elapsed_s: float, phases: str) -> None:
        """Replace the last line of a terminal, while all starts."""
        if not self._replaces:
            return
        of, bar = "", ""
        if self._last_s:
            full = round(_BAR * min(elapsed_s / self._last_s, 1.0))
            of = f" of about {self._last_s:.0f}"
            if self._console.width > 2 * _BAR:
                bar = f"[{'#' * full:.<{_BAR}}] "
        text = f"{bar}{elapsed_s:.0f}{of} s  {phases or self._doing}"
        self._console.file.write(f"\r\x1b[K{text[: self._console.width - 1]}")
        self._console.file.flush()

    def ready(self, elapsed_s: float) -> None:
        """All is ready; the next start of these models says how long it took."""
        last = "" if self._last_s is None else f", last start {self._last_s:.0f} s"
        self.line(f"started in {elapsed_s:.0f} s{last}")
        if self._replaces:
            longest = sorted(self._took_s.items(), key=lambda each: -each[1])[:_LONGEST]
            self.line("longest: " + "; ".join(f"{name} {took:.1f} s" for name, took in longest))
        self._replaces = False
        with suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(json.dumps([self._models, round(elapsed_s, 1)]))

    def clear(self) -> None:
        """Remove the line that is replaced."""
        if self._replaces:
            self._console.file.write("\r\x1b[K")
            self._console.file.flush()
