"""Reports the replica that Serve has chosen before it answers. Serve copies its request router's
module by value, so what that shares with the process stands here and in ``running``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final


class Choices:
    """Callbacks for the choices of requests. Bounded by the number of open requests."""

    def __init__(self) -> None:
        self._told: dict[str, Callable[[str], None]] = {}

    def expect(self, request_id: str, told: Callable[[str], None]) -> None:
        """Call ``told`` with the replica of this request each time one is chosen."""
        self._told[request_id] = told

    def forget(self, request_id: str) -> None:
        """Remove the callback of a request. Unknown requests are ignored."""
        self._told.pop(request_id, None)

    def made(self, request_id: str, replica_id: str) -> None:
        """A replica was chosen. Requests without a callback are ignored."""
        told = self._told.get(request_id)
        if told is not None:
            told(replica_id)


CHOICES: Final = Choices()
"""Of this process."""
