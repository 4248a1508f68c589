"""How the latest requests ended, as their routers saw it, for the decision log.

Routers send endings with their metrics (:meth:`sluice.controller.client.ControllerClient.ended`),
so an ending needs no message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import Any

from sluice.controller.messages import MAX_ENDINGS, OBJECTIVES, LateNotice, RequestEnding
from sluice.controller.transport.checks import check_text, listed, short

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


def check_endings(endings: Any) -> None:
    """Check a router's request endings.

    Raises:
        ValueError: it is no sequence of endings, too long, or a field is out of range.
    """
    for ending in listed("endings", endings, "endings", MAX_ENDINGS):
        if not isinstance(ending, RequestEnding):
            raise ValueError(f"expected a RequestEnding, got {short(ending)}")
        check_text("request_id", ending.request_id)
        check_text("outcome", ending.outcome)
        check_text("error", ending.error, empty=True)
        check_text("service_class", ending.service_class, empty=True)
        check_text("replica_id", ending.replica_id, empty=True)
        if ending.kept is not None and type(ending.kept) is not bool:
            raise ValueError(f"kept must be true, false or null, got {short(ending.kept)}")
        if not isinstance(ending.missed, tuple) or not all(
            isinstance(name, str) and name in OBJECTIVES for name in ending.missed
        ):
            raise ValueError(f"missed must be any of {OBJECTIVES}, got {short(ending.missed)}")
        for name in ("tokens", "tenant", "most_tokens"):
            value = getattr(ending, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {short(value)}")
        _check_times(ending, "ttft_s", "tpot_s", "e2e_s")
        if ending.judged_s is not None:
            if not isinstance(ending.judged_s, tuple) or len(ending.judged_s) != len(OBJECTIVES):
                raise ValueError(f"judged_s must be three times, got {short(ending.judged_s)}")
            for name, value in zip(OBJECTIVES, ending.judged_s, strict=True):
                _check_time(f"judged_s of {name}", value)


def check_late(notices: Any) -> None:
    """Check a router's late notices.

    Raises:
        ValueError: it is no sequence of notices, too long, or a field is out of range.
    """
    for notice in listed("late", notices, "notices", MAX_ENDINGS):
        if not isinstance(notice, LateNotice):
            raise ValueError(f"expected a LateNotice, got {short(notice)}")
        check_text("request_id", notice.request_id)
        _check_times(notice, "ttft_s", "tpot_s")


def _check_times(told: RequestEnding | LateNotice, *names: str) -> None:
    for name in names:
        _check_time(name, getattr(told, name))


def _check_time(name: str, value: Any) -> None:
    if value is not None and not (type(value) is float and 0 <= value < inf):
        raise ValueError(f"{name} must be a finite float >= 0, got {short(value)}")
