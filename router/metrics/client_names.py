"""The label ``client`` of metrics.

A key file may hold thousands of names, and they come and go while a router runs. Each is several
series of every router, and a page of metrics has its limits.
"""

from __future__ import annotations

from typing import Final

from sluice.router.tenancy.limits import UNNAMED

MAX_NAMES: Final = 1_000
"""Most names that label the metrics of a router process."""

OTHERS: Final = "other"
"""Stands for the names after the first :data:`MAX_NAMES`."""


class ClientNames:
    """The names that have a label of their own: the first that a router meets. ``O(1)``."""

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._known = {UNNAMED, OTHERS}

    def label(self, name: str) -> str:
        """What a client of this name is called in metrics."""
        if name in self._known:
            return name
        if len(self._known) >= self._most + 2:  # those that every router has
            return OTHERS
        self._known.add(name)
        return name
