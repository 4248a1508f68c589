"""Where Serve's own choice has sent a request, for who must know before the replica has answered.

A replica says itself that it has a request, unless it hangs. The request router that chooses, and
who waits for the answer, are in one process and share nothing else: Serve makes the one, and the
other only has a handle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final


class Choices:
    """Who is to be told of which request's choice. Bounded by the requests that are open."""

    def __init__(self) -> None:
        self._told: dict[str, Callable[[str], None]] = {}

    def expect(self, request_id: str, told: Callable[[str], None]) -> None:
        """Call ``told`` with the replica of this request, each time that one is chosen."""
        self._told[request_id] = told

    def forget(self, request_id: str) -> None:
        """Nobody needs to know any more. Unknown requests are ignored."""
        self._told.pop(request_id, None)

    def made(self, request_id: str, replica_id: str) -> None:
        """A replica was chosen; a request that nobody expects is ignored."""
        told = self._told.get(request_id)
        if told is not None:
            told(replica_id)


CHOICES: Final = Choices()
"""Of this process."""
