"""An event loop with virtual time, which jumps over waits: an hour of a simulated engine takes only
its computing time, and no timer is late."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """In place of waiting for the next timer, the clock jumps to that timer.

    Only for code without external input, which would arrive late.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout > 0:
            self._loop.advance(timeout)
            timeout = 0
        return super().select(timeout)
