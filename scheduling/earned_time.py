"""Time that a share of the engine has earned and not spent."""

from __future__ import annotations


class EarnedTime:
    """Grows by ``share`` of the time while it is owed, and is lost when it is not.

    Attributes:
        seconds: earned and not spent yet; who spends it subtracts.
    """

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        self._share = share
        self._earned_at_s: float | None = None

    def earn(self, now_s: float, owed: bool) -> None:
        """It is now ``now_s``, and the time is ``owed``, or not."""
        if not owed:
            self.seconds, self._earned_at_s = 0.0, None
            return
        if self._earned_at_s is not None:
            self.seconds += self._share * max(0.0, now_s - self._earned_at_s)
        self._earned_at_s = now_s
