"""The service class of each live request, for an operator; replicas' rows do not contain it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

UNKNOWN_CLASS = ""
"""Class of a request that this controller did not place, but Serve or the controller before a
restart."""

LIMIT = 100_000
"""Most requests remembered; of more, the oldest tenth is forgotten."""


class RequestClasses:
    """Remembers classes from the decision to the request's end. ``O(1)`` each, amortised.

    Args:
        limit: most requests.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._classes: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def note(self, key: int, service_class: str) -> None:
        """A request was placed."""
        self._classes[key] = service_class
        if len(self._classes) > self._limit:
            # Many at once: removing the oldest entry of a dict one at a time is quadratic.
            self.ended(list(islice(self._classes, max(1, self._limit // 10))))

    def ended(self, keys: Iterable[int]) -> None:
        """Requests ended; unknown ones are ignored."""
        for key in keys:
            self._classes.pop(key, None)

    def of(self, keys: Iterable[int]) -> list[str]:
        """The class of each request, or :data:`UNKNOWN_CLASS`."""
        get = self._classes.get
        return [get(key, UNKNOWN_CLASS) for key in keys]
