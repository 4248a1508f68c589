"""A leaky bucket: how full it is, as time passes."""

from __future__ import annotations


class Bucket:
    """A leaky bucket of unbounded size: who fills it decides what fits."""

    __slots__ = ("_at_s", "level", "per_s")

    def __init__(self, now_s: float) -> None:
        self.level = 0.0
        self.per_s = 0.0
        self._at_s = now_s

    def drain(self, now_s: float, per_s: float) -> float:
        """Let time pass; ``per_s`` is the rate from now on. Returns the level."""
        self.level = max(0.0, self.level - self.per_s * max(0.0, now_s - self._at_s))
        self.per_s = per_s
        self._at_s = now_s
        return self.level

    def add(self, amount: float) -> None:
        """Put ``amount`` in, or where it is negative take it out."""
        self.level = max(0.0, self.level + amount)
