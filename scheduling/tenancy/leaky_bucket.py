"""A leaky bucket: how full it is, as time passes."""

from __future__ import annotations

from bisect import bisect_left


class Bucket:
    """A leaky bucket of unbounded size: its caller decides what fits."""

    __slots__ = ("_at_s", "_lows", "level", "per_s")

    def __init__(self, now_s: float) -> None:
        self.level = 0.0
        self.per_s = 0.0
        self._at_s = now_s
        self._lows = _Lows()

    def drain(self, now_s: float, per_s: float) -> float:
        """Let time pass; ``per_s`` is the rate from now on. Returns the level."""
        self.set(max(0.0, self.level - self.per_s * max(0.0, now_s - self._at_s)))
        self.per_s = per_s
        self._at_s = now_s
        return self.level

    def add(self, amount: float) -> None:
        """Put ``amount`` in, or where it is negative take it out."""
        self.set(max(0.0, self.level + amount))

    def set(self, level: float) -> None:
        """Take over a level from elsewhere."""
        self.level = level
        self._lows.note(level)

    def mark(self) -> int:
        """Name what was put in last, so that :meth:`undo` can take it out once."""
        return self._lows.begin(self.level)

    def undo(self, mark: int, amount: float) -> float:
        """Take out the remaining part of an ``amount`` that was put in at ``mark``, end the mark,
        and return that part: at most the lowest level since, as drained parts stay out.
        ``O(marks)`` that are newer."""
        left = self._lows.end(mark, amount)
        self.level -= left
        return left


class _Lows:
    """The lowest level since each of some open moments, in strictly rising ``_levels``."""

    __slots__ = ("_levels", "_moment", "_moments", "_open")

    def __init__(self) -> None:
        self._moment = 0
        self._open: set[int] = set()
        self._moments: list[int] = []
        self._levels: list[float] = []

    def begin(self, level: float) -> int:
        """From now on."""
        self._moment += 1
        self._open.add(self._moment)
        while self._levels and self._levels[-1] >= level:
            self._pop()
        self._push(level)
        return self._moment

    def note(self, level: float) -> None:
        """The level has changed."""
        if not self._levels or self._levels[-1] <= level:
            return
        while self._levels and self._levels[-1] >= level:
            self._pop()
        self._push(level)

    def end(self, moment: int, most: float) -> float:
        """The lowest level since ``moment``, or ``most`` if that is less. All levels since are as
        much lower from now on; the moment is not asked for again."""
        first = bisect_left(self._moments, moment)
        amount = min(most, self._levels[first])
        if amount > 0:
            self._levels[first:] = [level - amount for level in self._levels[first:]]
            low = self._levels[first]
            while first and self._levels[first - 1] >= low:
                first -= 1
                del self._moments[first], self._levels[first]
        self._open.remove(moment)
        if len(self._levels) > 2 * len(self._open) + 8 or not self._open:
            needed = sorted({bisect_left(self._moments, each) for each in self._open})
            self._moments = [self._moments[index] for index in needed]
            self._levels = [self._levels[index] for index in needed]
        return amount

    def _push(self, level: float) -> None:
        self._moments.append(self._moment)
        self._levels.append(level)

    def _pop(self) -> None:
        self._moments.pop()
        self._levels.pop()
