"""A bounded table of what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
