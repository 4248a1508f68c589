"""Time that a share of the engine has earned and not spent."""

from __future__ import annotations


class EarnedTime:
    """Grows by ``share`` of the time while any request is owed it, and resets to 0 when none is.

    Attributes:
        seconds: earned and not spent yet; the caller subtracts what it spends.
    """

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        self._share = share
        self._earned_at_s: float | None = None

    def earn(self, now_s: float, owed: bool) -> None:
        """Advance to ``now_s``; ``owed``: whether any request is owed the time."""
        if not owed:
            self.seconds, self._earned_at_s = 0.0, None
            return
        if self._earned_at_s is not None:
            self.seconds += self._share * max(0.0, now_s - self._earned_at_s)
        self._earned_at_s = now_s
