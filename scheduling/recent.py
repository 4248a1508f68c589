"""What came last: a bounded table, and quantiles."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from math import ceil
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def used(
    known: OrderedDict[_Key, _Value], key: _Key, make: Callable[[], _Value], most: int
) -> _Value:
    """The value of ``key``, made where missing; beyond ``most`` the least recently used goes.
    ``O(1)``."""
    value = known.get(key)
    if value is None:
        value = known[key] = make()
        if len(known) > most:
            known.popitem(last=False)
    else:
        known.move_to_end(key)
    return value


class Latest:
    """The latest ``most`` values, also in order."""

    __slots__ = ("_in_order", "_most", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: deque[float] = deque()
        self._in_order = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Another value; beyond ``most`` the oldest goes. ``O(most)``."""
        if len(self._values) == self._most:
            del self._in_order[bisect_left(self._in_order, self._values.popleft())]
        self._values.append(value)
        insort(self._in_order, value)

    def quantile(self, level: float) -> float:
        """What the next value lies below with probability ``level``, if their order carries no
        information, and above with the rest (split conformal prediction; Vovk, Gammerman & Shafer
        2005, section 4.2); the largest stands for levels that so few say nothing of. Raises
        IndexError without a value."""
        count = len(self._in_order)
        return self._in_order[min(max(ceil(level * (count + 1)), 1), count) - 1]
