"""How the latest requests ended, as their routers saw it, for the decision log.

Routers send endings with their metrics (:meth:`sluice.controller.client.ControllerClient.ended`),
so an ending needs no message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from sluice.controller.messages import RequestEnding

LIMIT = 1_024
"""Most endings kept. The log holds 256 decisions, and an ending arrives about a second late."""


class Endings:
    """The latest endings by request id. ``O(1)`` each, amortised.

    Args:
        limit: most endings.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._endings: dict[str, RequestEnding] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def note(self, endings: Iterable[RequestEnding]) -> None:
        """Requests ended. An ending that is reported twice counts once."""
        for ending in endings:
            self._endings.pop(ending.request_id, None)
            self._endings[ending.request_id] = ending
        over = len(self._endings) - self._limit
        for request_id in list(islice(self._endings, max(0, over))):
            del self._endings[request_id]

    def of(self, request_id: str) -> RequestEnding | None:
        """How a request ended; ``None`` if no router has reported it, or too long ago."""
        return self._endings.get(request_id)
