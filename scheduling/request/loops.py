"""When tool loops began: the turns of one session that share a deadline."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MOST_LOOPS: Final = 1 << 16
"""Most loops that are remembered. The one without a turn for longest is forgotten first."""

KEPT_S: Final = 86_400.0
"""A loop without a turn for this long is forgotten, seconds: as long as the longest deadline."""


class LoopStarts:
    """Remembers when the first turn of each loop arrived. Amortised ``O(1)`` per turn."""

    def __init__(self) -> None:
        # By key, its start and its last turn, in order of the last turn.
        self._known: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def started_s(self, key: int, turn_s: float, now_s: float) -> float:
        """When the loop ``key`` began, if a turn of it came at ``turn_s`` (<= ``now_s``)."""
        known = self._known
        seen = known.pop(key, None)
        if seen is not None and now_s - seen[1] <= KEPT_S:
            turn_s = min(turn_s, seen[0])
        known[key] = turn_s, now_s
        while len(known) > MOST_LOOPS or now_s - next(iter(known.values()))[1] > KEPT_S:
            known.popitem(last=False)
        return turn_s
