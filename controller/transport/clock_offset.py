"""How another process's monotonic clock differs from this one's, learned from its messages.

No two hosts' clocks are compared directly: a message carries the sender's own time, and the message
with the shortest delay shows best how the clocks differ. So an offset is too large by exactly the
delay of the quickest message: neither the skew of wall clocks nor a step of one changes it.
"""

from __future__ import annotations

from math import inf

WINDOW_S = 30.0
"""Messages of this window and of the one before it are judged together, seconds. Hosts' clocks
drift apart by a few milliseconds meanwhile; a clock that stopped, as of a virtual machine that was
moved, is corrected for within three windows."""


class ClockOffset:
    """Learns the offset that converts a sender's times to the own clock.

    Args:
        window_s: see :data:`WINDOW_S`.
    """

    __slots__ = ("_before_s", "_least_s", "_since_s", "_window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._least_s = inf
        self._before_s = inf
        self._since_s = -inf

    @property
    def seconds(self) -> float:
        """The offset; infinite before the first message."""
        return min(self._least_s, self._before_s)

    def hear(self, sent_s: float, now_s: float) -> float:
        """A message arrived at ``now_s``; it was sent at ``sent_s`` on the sender's clock. Returns
        its delay beyond that of the quickest message, seconds, at least 0."""
        offset_s = now_s - sent_s
        if now_s - self._since_s >= self._window_s:
            recent = now_s - self._since_s < 2 * self._window_s
            self._before_s = self._least_s if recent else inf
            self._least_s, self._since_s = offset_s, now_s
        else:
            self._least_s = min(self._least_s, offset_s)
        return offset_s - self.seconds
